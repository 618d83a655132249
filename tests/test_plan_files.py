"""Plans as files: what is written is read, and what is not a plan is refused by its line."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest

from lightning_wlb.cli.main import main
from lightning_wlb.cli.shared_options import given_model
from lightning_wlb.cost.flops import PassWork, Work
from lightning_wlb.plan.plan_files import FORMAT, VERSION, read_plans, write_plans
from lightning_wlb.planning import DataSettings, Planner
from lightning_wlb.planning.planner import plan_steps


def test_the_command_writes_what_is_read(tmp_path: Path) -> None:
    lengths, out = tmp_path / "lengths.npy", tmp_path / "plans.jsonl"
    np.save(lengths, np.random.default_rng(0).integers(16, 4000, 200))
    command = f"plan --lengths {lengths} --model tiny --mesh 2,2,1,1 --context-window 4096"
    assert main([*command.split(), "--profile", "h100", "--steps", "3", "--write", str(out)]) == 0
    header, plans = read_plans(str(out))
    assert (header["format"], header["version"]) == (FORMAT, VERSION)
    assert (header["packing"], header["mesh"], header["documents"]) == ("auto", "2,2,1,1", 200)
    assert [plan.step for plan in plans] == [0, 1, 2]
    again = tmp_path / "again.jsonl"
    write_plans(again, plans, {name: header[name] for name in list(header)[2:]})
    assert again.read_text() == out.read_text()
    # As docs/planner.md tells a reader in another language: from the JSON alone.
    step = json.loads(out.read_text().splitlines()[1])
    tokens = [
        stop - start
        for replica in step["replicas"]
        for micro_batch in replica["forward"]
        for document, origin, start, stop in (replica["slices"][i] for i in micro_batch["slices"])
        if micro_batch["replicas"][0] == step["replicas"].index(replica)
    ]
    assert sum(tokens) == plans[0].tokens


def test_what_is_not_a_plan_is_named(tmp_path: Path) -> None:
    path = tmp_path / "plans.jsonl"
    for text, line in [
        ("", "line 1"),
        ('{"format": "lightning-wlb plans", "version": 2}', "line 1: .*version 2"),
        ('{"format": "lightning-wlb plans", "version": 1}\n{"step": 0}', "line 2"),
        ('{"format": "lightning-wlb plans", "version": 1}\n' + "[" * 100_000, "line 2"),
        ("[" * 100_000, "line 1"),
        # Numbers that all have one hash, or are none.
        *(
            (f'{{"format": "lightning-wlb plans", "version": 1}}\n{{"pieces": [[{number}]]}}', why)
            for number, why in [
                (f"{2**61 - 1}", "line 2: 2305843009213693951 is no whole number of up to 10"),
                ("1e18", "line 2: 1e18 is no whole number"),
                ("NaN", "line 2: NaN is no whole number"),
                ("-1", "line 2: -1 is no whole number"),
            ]
        ),
    ]:
        path.write_text(text)
        with pytest.raises(ValueError, match=line):
            read_plans(str(path))


def test_no_line_answers_for_another_step_or_document(tmp_path: Path) -> None:
    work = Work(PassWork(1, 1), PassWork(2, 2))
    planner = Planner([40, 30, 20, 10] * 8, DataSettings(64, 2, shuffle=False), work)
    path, plans = tmp_path / "plans.jsonl", plan_steps(planner, 2)
    write_plans(path, plans, {})
    header, first, second = path.read_text().splitlines()
    for lines, said in [
        ((first, first), "line 3: step 0 does not follow 0"),
        # A full disk, or a process that was killed, may leave whole lines alone.
        ((first,), "line 2: the file ends after 1 of 2 plans"),
        ((second, first), "line 3: step 0 does not follow 1"),
        ((first.replace('"step":0', '"step":0,"step":1'),), "line 2: .*'step' twice"),
        ((first.replace('"step":0', '"step":false'),), "line 2: step=False"),
        ((first.replace("[1,0,", "[true,0,"),), "line 2: piece=True"),
        ((first.replace('"rows":', '"rows":1,"rows":'),), "line 2: .*'rows' twice"),
        ((first.replace('"sharding":"hybrid"', '"sharding":["hybrid"]'),), "line 2: .*sharding="),
        ((first.replace('"sharding":"h', '"sharding":"\\u001b[2J'),), "line 2: .*sharding='.x1b"),
    ]:
        path.write_text("\n".join((header, *lines)))
        with pytest.raises(ValueError, match=said):
            read_plans(path)
    # Fields of a later writer are passed over.
    path.write_text("\n".join((header, first.replace('"step":0', '"later":[1],"step":0'), second)))
    assert read_plans(path)[1] == plans


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no FIFOs")
def test_plans_and_configs_that_never_end_are_refused(tmp_path: Path) -> None:
    for name, read in [("plans.jsonl", read_plans), ("run.yaml", lambda it: given_model(str(it)))]:
        os.mkfifo(tmp_path / name)
        with pytest.raises(ValueError, match="FIFO"):
            read(tmp_path / name)
    (tmp_path / "deep.yaml").write_text("[" * 20_000)
    with pytest.raises(ValueError, match=r"deep\.yaml"):
        given_model(str(tmp_path / "deep.yaml"))


def test_a_search_writes_no_plans(capsys: pytest.CaptureFixture[str]) -> None:
    command = "plan --lengths generator-a --model 7b --mesh auto --devices 2 --micro-batches 4"
    rest = "--context-window 4096 --profile h100 --write plans.jsonl"
    assert main([*command.split(), *rest.split()]) == 2
    assert "--write shows one mesh" in capsys.readouterr().err
