"""``lightning-wlb fit``: LightningCLI with the strategy's section."""

import io
import logging
import os
import re
import shlex
import sys
from functools import wraps
from pathlib import Path
from unittest import mock

import pytest
import torch
import yaml
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Trainer

from lightning_wlb.cli.main import main, parser
from lightning_wlb.cli.request import requests_of
from lightning_wlb.cli.train import BESIDE_THE_POINT, WLBCLI, RunsConfig, quieten
from lightning_wlb.cost.profile import Profile
from lightning_wlb.models.config import TransformerConfig
from lightning_wlb.models.language_module import LanguageModule
from lightning_wlb.plan import Scheme
from lightning_wlb.strategy.launch import RunDevices
from lightning_wlb.strategy.mesh_choice import mesh_request, run_profile
from lightning_wlb.strategy.wlb import WLBStrategy
from tests.data.tokenising.support import saved, write_lines
from tests.ranks import run_ranks

EXAMPLES = Path(__file__).parents[2] / "examples"
QUIET = ["--trainer.logger=false", "--trainer.enable_progress_bar=false"]
SCHEMES = [[Scheme(0, (2,), tensor=2)], [Scheme(0, (1, 1))]]
DATA = ["--data.documents=stdlib", "--data.context_window=512", "--data.micro_batches=2"]


def cli(*options: str, **given) -> WLBCLI:
    return WLBCLI(LanguageModule, run=False, args=[*DATA, *QUIET, *options], **given)


def test_the_strategy_takes_its_sizes_from_its_section():
    made = cli(
        "--trainer.strategy=wlb",
        "--trainer.devices=4",
        "--trainer.accelerator=cpu",
        "--wlb.pipeline_parallel_size=2",
        "--wlb.schedule=interleaved",
    )
    strategy = made.trainer.strategy
    assert isinstance(strategy, WLBStrategy)
    assert "('auto', 2, 'auto', 'auto')" in repr(strategy)
    assert strategy.schedule == "interleaved"


def test_words_stand_for_no_files(tmp_path, monkeypatch):
    """What another user put into the working folder, or beside the configuration, is not read."""
    made = tmp_path / "made"
    runs = {"class_path": "subprocess.Popen", "init_args": {"args": ["touch", str(made)]}}
    strategy = "lightning.pytorch.strategies.DeepSpeedStrategy"
    spec = {"class_path": strategy, "init_args": {"config": {"x": runs}}}
    for name in ("wlb", "auto", "cpu", "wlb_auto", "lightning_wlb.LanguageModule"):
        (tmp_path / name).write_text(yaml.safe_dump(spec))
    (tmp_path / "tiny").write_text(yaml.safe_dump({"dim": 32, "x": runs}))
    for name in ("stdlib", "h100"):
        os.mkfifo(tmp_path / name)
    words = {
        "trainer": {"strategy": "wlb", "accelerator": "cpu"},
        "data": {"documents": "stdlib", "profile": "h100", "packing": "auto"},
        "model": {"class_path": "lightning_wlb.LanguageModule", "init_args": {"config": "tiny"}},
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(words))
    monkeypatch.chdir(tmp_path)
    for given in (["--config=run.yaml"], [f"--config={tmp_path / 'run.yaml'}"]):
        made_of = WLBCLI(run=False, args=[*given, *QUIET, *DATA[1:]])
        assert isinstance(made_of.trainer.strategy, WLBStrategy)
        assert made_of.model.config == TransformerConfig()
        assert made_of.datamodule.profile == Profile.load("h100")
    assert not made.exists()
    # A section may be a file by itself, if it is given as one.
    (tmp_path / "data.yaml").write_text(yaml.safe_dump(words["data"]))
    assert cli("--data=data.yaml").datamodule.profile == Profile.load("h100")


def test_strategies_that_steps_may_take_come_from_a_file(tmp_path):
    file = tmp_path / "run.yaml"

    def read(text: str) -> WLBCLI:
        file.write_text(text)
        return cli("--trainer.accelerator=cpu", "--config", str(file))

    section = "trainer: {strategy: wlb}\nwlb: {dynamic: %s}"
    by_class = (
        "trainer: {strategy: {class_path: lightning_wlb.WLBStrategy, init_args: {dynamic: %s}}}"
    )
    for text, strategies in (
        ("[[{first: 0, stages: [2], tensor: 2}], [{first: 0, stages: [1, 1]}]]", SCHEMES),
        ("auto", "auto"),
        ("off, overlap: off", "off"),  # which YAML reads as False
    ):
        made = read(section % text)
        # As a run saves it, too.
        others = (
            [read(by_class % text), read(made.parser.dump(made.config))] if text[0] == "[" else []
        )
        for each in [made, *others]:
            strategy = each.trainer.strategy
            wanted = WLBStrategy(dynamic=strategies)
            assert strategy.planning.asked == wanted.planning.asked
            assert strategy.overlap == ("off" if "overlap" in text else "auto")
    with pytest.raises(SystemExit):
        cli("--trainer.strategy=wlb", "--wlb.dynamic=sometimes")


def test_another_strategy_leaves_the_section_alone():
    made = cli("--trainer.strategy=auto", "--trainer.accelerator=cpu")
    assert not isinstance(made.trainer.strategy, WLBStrategy)


def test_sizes_without_the_strategy_are_refused():
    with pytest.raises(MisconfigurationException, match=r"trainer\.strategy is 'auto'.*: wlb"):
        cli("--trainer.strategy=auto", "--wlb.context_parallel_size=2")


@pytest.mark.parametrize("option", ["--optimizer=SGD", "--lr_scheduler=ExponentialLR"])
def test_an_option_of_which_nothing_is_made_is_refused(option, capsys):
    with pytest.raises(SystemExit):
        cli(option)
    assert option in capsys.readouterr().err


def train(rank: int) -> int:
    """The exit code of a run of two steps."""
    return main(
        [
            "fit",
            "--model=lightning_wlb.LanguageModule",
            "--trainer.strategy=wlb",
            "--trainer.accelerator=cpu",
            "--trainer.devices=1",
            "--trainer.max_steps=2",
            "--trainer.log_every_n_steps=1",
            "--trainer.logger=lightning.pytorch.loggers.CSVLogger",
            "--trainer.logger.save_dir=runs",
            "--trainer.enable_checkpointing=false",
            "--trainer.enable_progress_bar=false",
            "--data.num_workers=0",
            *DATA,
        ]
    )


def test_the_command_trains(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run_ranks(train, 1, process_group=False) == [0]
    (metrics,) = tmp_path.rglob("metrics.csv")
    assert len(metrics.read_text().splitlines()) == 3


def test_a_run_writes_over_no_config_of_the_users(tmp_path, monkeypatch):
    """Without a logger the working folder is the log folder, where anybody may have put a link."""
    monkeypatch.chdir(tmp_path)
    own, other = tmp_path / "config.yaml", tmp_path / "thesis.txt"
    sizes = ["--data.validation_documents=1", "--trainer.limit_val_batches=1"]
    given = [*DATA, *QUIET, *sizes, "--trainer.accelerator=cpu", "--data.num_workers=0"]
    given.append("--model=lightning_wlb.LanguageModule")

    def run(*options: str) -> str:
        assert main(["validate", *given, *options]) == 0
        return own.read_text()

    assert run().startswith(RunsConfig.mark)
    assert "limit_val_batches: 1" in run("--trainer.enable_model_summary=false")
    assert "enable_model_summary: false" in own.read_text(), "what it wrote itself"
    for text in ("trainer:\n  max_steps: 3\n", own.read_text()):
        own.write_text(text)
        with pytest.warns(match="config.yaml is there, and is another file"):
            assert run("--config", "config.yaml") == text
    own.unlink()
    other.write_text("mine")
    own.symlink_to(other)
    with pytest.warns(match="The configuration of this run is not written down"):
        assert run() == "mine"
    own.unlink()
    monkeypatch.setattr(Path, "replace", mock.Mock(side_effect=PermissionError(1, "sticky")))
    with pytest.warns(match="not written down: .*sticky"), pytest.raises(FileNotFoundError):
        run()
    assert not list(tmp_path.glob(".config*"))


def test_the_configuration_and_no_checkpoint_says_what_the_model_is(tmp_path, monkeypatch):
    (tmp_path / "stranger.py").write_text("class Ran: pass")
    monkeypatch.syspath_prepend(tmp_path)
    path, asked = tmp_path / "run.ckpt", []
    torch.save({"hyper_parameters": {"_class_path": "stranger.Ran"}}, path)

    @wraps(Trainer.validate)
    def validate(*_: object, ckpt_path: object, **__: object) -> None:
        asked.append(ckpt_path)

    monkeypatch.setattr(Trainer, "validate", validate)
    options = ["--model=lightning_wlb.LanguageModule", "--trainer.accelerator=cpu", *DATA, *QUIET]
    assert main(["validate", *options, f"--ckpt_path={path}"]) == 0
    assert asked == [str(path)]
    assert "stranger" not in sys.modules


def test_what_is_no_checkpoint_is_refused_by_name(tmp_path, capsys):
    """Without the strategy; torch.load answers with a KeyError, an IndexError or an EOFError."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "text").write_text("hello world\n")
    for name in ("folder", "text"):
        path = f"--ckpt_path={tmp_path / name}"
        sizes = "--model.config=tiny", "--trainer.max_steps=0", "--trainer.accelerator=cpu"
        assert main(["fit", *DATA, *QUIET, *sizes, path]) == 2
        said = capsys.readouterr().err.splitlines()[-1]
        assert said.startswith(f"lightning-wlb fit: {tmp_path / name} is no file that torch.save")


def test_help_names_both_modules_in_plain_words(capsys):
    pytest.importorskip("transformers")
    for arguments, named in (
        (["--help"], ("lightning_wlb.LanguageModule", "lightning_wlb.HuggingFaceModule")),
        (["--model.help", "HuggingFaceModule"], ("--model.pretrained",)),
    ):
        with pytest.raises(SystemExit) as ended:
            main(["fit", *arguments])
        assert ended.value.code == 0
        said = capsys.readouterr().out
        assert all(name in said for name in named)
        assert not re.search(r":\w+:`|``", said)


def test_lines_that_bury_ours_are_left_out():
    for name in ("lightning.pytorch", "lightning.fabric"):
        logger = logging.getLogger(name)
        handler = logging.StreamHandler(io.StringIO())
        logger.addHandler(handler)
        quieten()
        for line in (*BESIDE_THE_POINT, "WLBStrategy: chose a mesh"):
            logger.info(line)
        logger.removeHandler(handler)
        assert handler.stream.getvalue() == "WLBStrategy: chose a mesh\n"


def test_documents_must_be_named(capsys):
    assert main(["fit", "--model=lightning_wlb.LanguageModule", *DATA[1:]]) == 2
    assert "required: fit.data.documents" in capsys.readouterr().err


def test_plan_and_fit_of_the_readme_ask_for_the_same_mesh(tmp_path, monkeypatch):
    """Every fact that decides the mesh is in the digest of what is asked."""
    pytest.importorskip("transformers")
    readme = (EXAMPLES.parent / "README.md").read_text().replace("\\\n", " ")
    words = [
        shlex.split(line) for line in re.findall(r"^lightning-wlb (.+)$", readme, re.MULTILINE)
    ]
    by_name = {line[0]: line[1:] for line in words}
    write_lines(tmp_path / "TEXTS" / "a.jsonl", [{"text": "a" * n} for n in (5, 30, 5000)])
    saved(tmp_path)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(EXAMPLES)
    by_name["tokenize"][by_name["tokenize"].index("--tokenizer") + 1] = saved(tmp_path)
    assert main(["tokenize", *by_name["tokenize"], "--workers", "1"]) == 0
    planned = requests_of(parser().parse_args(["plan", *by_name["plan"]]))[-1]
    made = WLBCLI(run=False, args=by_name["fit"])
    made.datamodule.prepare_data()
    ranks = made.trainer.num_devices
    devices = RunDevices(
        device=torch.device("cpu"), count=ranks, per_node=ranks,
        parameter_dtype="float32", reduce_dtype="float32", overlap=True,
    )  # fmt: skip
    profile = run_profile(devices, "auto", made.datamodule, searched=True)
    options = made.trainer.strategy.options
    made.model.trainer = made.trainer
    run = mesh_request(options, devices, made.datamodule, made.model, profile)
    assert run.digest == planned.digest


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.yaml")), ids=lambda path: path.stem)
def test_the_examples_are_understood(path):
    if path.stem == "config":
        pytest.skip("of examples/cli.py, whose strategy is named by its class")
    pytest.importorskip("transformers")
    options = [f"--config={path}", "--trainer.accelerator=cpu", "--trainer.devices=8"]
    if path.stem in ("continue", "chat_lora"):
        options += ['--model.init_args.config={"model_type": "llama"}']
        options += ["--model.init_args.pretrained=folder"]
    options += ["--data.documents=stdlib"]
    made = WLBCLI(run=False, args=options)
    assert isinstance(made.trainer.strategy, WLBStrategy)
    kind = "qwen3_5_text" if path.stem == "hybrid" else "llama"
    assert made.model.config.model_type == kind
