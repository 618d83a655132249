"""How the command answers mistakes: one paragraph, once a node, on request with a traceback."""

from pathlib import Path
from unittest import mock

import pytest
from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_wlb.cli import main as command

FIT = [
    "fit",
    "--model=lightning_wlb.LanguageModule",
    "--data.documents=stdlib",
    "--data.context_window=512",
    "--data.micro_batches=2",
    "--trainer.accelerator=cpu",
    "--trainer.logger=false",
]


def said(capsys: pytest.CaptureFixture[str], *options: str) -> str:
    """What `fit` prints of a mistake, without what Lightning logs before it."""
    capsys.readouterr()
    assert command.main([*FIT, *options]) == 2
    lines = capsys.readouterr().err.splitlines()
    (answer,) = [line for line in lines if line.startswith("lightning-wlb fit")]
    assert lines[-1] == answer
    return answer


def test_a_wrong_value_is_one_paragraph(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("typo.yaml").write_text("trainer: {max_stepz: 3}\n")
    assert said(capsys, "--model.learning_rate=-1") == (
        "lightning-wlb fit: learning_rate=-1.0 is out of range. Give a number from 0."
    )
    assert said(capsys, "--data.nonsense=3") == (
        "lightning-wlb fit: unrecognized arguments: --data.nonsense=3"
    )
    assert said(capsys, "--trainer.max_stepz=3") == (
        "lightning-wlb fit: unrecognized arguments: --trainer.max_stepz=3. Is trainer.max_steps"
        " meant?"
    )
    assert said(capsys, "--config", "typo.yaml") == (
        "lightning-wlb fit: Subcommand 'fit' does not accept option"
        " 'trainer.max_stepz'. Is trainer.max_steps meant?"
    )
    assert said(capsys, "--model.learning_rte=3") == (
        "lightning-wlb fit: lightning_wlb.LanguageModule: Option 'learning_rte' is not accepted."
        " --help and --model.help list what is."
    )
    assert said(capsys, "--config=none.yaml") == (
        f"lightning-wlb fit: Parser key \"config\": File does not exist: '{tmp_path / 'none.yaml'}'"
    )
    text = said(capsys, "--data.cap=much")
    assert text.startswith('lightning-wlb fit: Parser key "data.cap": ')
    assert text.endswith("Given value: much")


def test_a_name_is_no_command_to_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["export", "\x1b[2J.ckpt", "out"]) == 2
    assert r"\x1b[2J" in capsys.readouterr().err


def test_a_traceback_is_there_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGHTNING_WLB_TRACEBACK", "1")
    with pytest.raises(ValueError, match="learning_rate"):
        command.main([*FIT, "--model.learning_rate=-1"])


def test_a_mistake_is_said_once_a_node(monkeypatch, capsys):
    def answer(error: Exception) -> str:
        monkeypatch.setattr(command, "_module", mock.Mock(side_effect=error))
        assert command.main(["fit"]) == 2
        return capsys.readouterr().err

    wrong = MisconfigurationException("wrong sizes")
    for name, other in (("LOCAL_RANK", "SLURM_LOCALID"), ("SLURM_LOCALID", "LOCAL_RANK")):
        monkeypatch.delenv(other, raising=False)
        for local, text in (("0", "lightning-wlb fit: wrong sizes\n"), ("1", "")):
            monkeypatch.setenv(name, local)
            assert answer(wrong) == text
            assert answer(ValueError("wrong sizes")) == text
    monkeypatch.setenv("LOCAL_RANK", "0")
    damaged = ValueError("Caught ValueError in worker.\nOriginal Traceback\n  x\nValueError: bad\n")
    assert answer(damaged) == "lightning-wlb fit: ValueError: bad\n"


def test_a_path_or_a_text_that_cannot_be_used_is_named(tmp_path, capsys) -> None:
    (tmp_path / "latin.yaml").write_bytes(b"caf\xe9: 1\n")
    (tmp_path / "empty.npy").touch()
    model = ["--model=tiny", "--mesh=1,1,1,1", "--profile=cpu", "--steps=1"]
    plan = ["plan", *model, "--context-window=64", "--long-documents=split"]
    for arguments, message in (
        ([*plan, "--lengths=generator-a", f"--picture={tmp_path}"], f"{tmp_path}: Is a directory."),
        ([*plan, f"--lengths={tmp_path / 'empty.npy'}"], "empty.npy is not a list of lengths"),
        (["fit", f"--config={tmp_path / 'latin.yaml'}"], "is no text in UTF-8"),
    ):
        assert command.main(arguments) == 2
        said = capsys.readouterr().err.splitlines()[-1]
        assert said.startswith(f"lightning-wlb {arguments[0]}: ")
        assert message in said


def test_other_errors_keep_their_traceback(monkeypatch) -> None:
    monkeypatch.setattr(command, "parser", mock.Mock(side_effect=ZeroDivisionError))
    with pytest.raises(ZeroDivisionError):
        command.main(["plan"])


def test_ctrl_c_while_a_command_starts_is_one_line(monkeypatch, capsys) -> None:
    def interrupted(name: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "_module", interrupted)
    for name in ("fit", "plan"):
        assert command.main([name]) == 130
        assert capsys.readouterr().err == f"lightning-wlb {name}: interrupted.\n"
