"""What the documentation says of the code is so: a printed plan, tables of names, files.

Links between its pages, and from docstrings, are checked where the site is built (``make docs``).
"""

import ast
import contextlib
import io
import json
import re
import shlex
import tomllib
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

import lightning_wlb
from lightning_wlb.cli.main import TRAINING, parser
from lightning_wlb.planning.packing import PACKINGS
from lightning_wlb.planning.packing.base import PackingOptions
from lightning_wlb.sharding import ADAPTIVE, SHARDINGS

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
GUIDE = sorted((DOCS / "guide").glob("*.md"))
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "SECURITY.md",
    DOCS / "design.md",
    *GUIDE,
    DOCS / "index.md",
    DOCS / "alternatives.md",
    DOCS / "reliability.md",
    ROOT / "benchmarks/README.md",
]
MADE = "site/"  # by make docs


def test_the_plan_in_the_design_is_what_its_code_prints() -> None:
    blocks = r"```python\n(.*?)```\n\n```text\n(.*?)```"
    ((code, shown),) = re.findall(blocks, (DOCS / "design.md").read_text(), re.DOTALL)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, "design.md", "exec"), {})
    assert printed.getvalue() == shown


def test_the_guide_has_every_option_of_every_packing() -> None:
    table = (DOCS / "guide/packing.md").read_text().split("## Options of the packings")[1]
    rows = re.findall(r"^\| `(\w+)` \| ([\d.]+) \| (.*)\|$", table, re.MULTILINE)
    assert [name for name, *_ in rows] == list(PACKINGS)
    for name, cap, options in rows:
        packer = PACKINGS[name]
        assert float(cap) == packer.cap_percent / 100
        known = [
            f"{each.name}={each.default!r}".replace("'", '"') for each in fields(packer.Options)
        ]
        assert re.findall(r"`([^`]+)`", options) == known


def test_the_reference_has_every_public_name_and_the_internals_every_packing() -> None:
    pytest.importorskip("transformers")
    reference, internals = ((DOCS / name).read_text() for name in ("reference.md", "internals.md"))
    shown = re.findall(r"^\.\. auto\w+:: ([\w.]+)$", reference, re.MULTILINE)
    public = [getattr(lightning_wlb, name) for name in lightning_wlb.__all__]
    assert sorted(shown) == sorted(f"{each.__module__}.{each.__name__}" for each in public)
    listed = re.findall(r"^   ~([\w.]+)$", internals, re.MULTILINE)
    methods = {packer.Options for packer in PACKINGS.values()} - {PackingOptions}
    methods |= set(PACKINGS.values())
    assert {f"{each.__module__}.{each.__name__}" for each in methods} <= set(listed)


def commands() -> list[str]:
    """Every ``lightning-wlb`` command in a block of README and guide, continued lines joined."""
    pages = [ROOT / "README.md", DOCS / "index.md", *GUIDE]
    blocks = [
        block
        for page in pages
        for block in re.findall(r"```\n(.*?)```", page.read_text(), re.DOTALL)
    ]
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    return [line for line in lines if line.startswith("lightning-wlb ") and "..." not in line]


@pytest.mark.parametrize("command", commands())
def test_commands_of_the_docs_are_understood(command: str) -> None:
    _, *arguments = shlex.split(command, comments=True)
    if arguments[0] not in TRAINING:  # LightningCLI's, which builds what it reads
        assert parser().parse_args(arguments).command == arguments[0]


def test_the_guide_has_every_sharding() -> None:
    section = (DOCS / "guide/packing.md").read_text().split("## Sharding over")[1].split("##")[0]
    rows = re.findall(r'^\| `"(\w+)"`', section, re.MULTILINE)
    assert sorted(rows) == sorted([ADAPTIVE, *SHARDINGS])


def test_the_floors_of_the_design_are_those_that_are_checked() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    layers = contracts["contracts"][0]["layers"]
    floors = {
        (len(layers) - place, room)
        for place, layer in enumerate(layers)
        for room in layer.split(" | ")
    }
    rows = re.findall(r"^\| (\d+) \| (.*?) \|", (DOCS / "design.md").read_text(), re.MULTILINE)
    named = {
        (int(floor), room) for floor, rooms in rows for room in re.findall(r"`(\w+)[/.]", rooms)
    }
    assert named == floors


def mentioned(page: Path) -> Iterator[str]:
    """Files and folders that a page names in backticks, such as ``plan/step.py``."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    for word in re.findall(r"`([\w./-]+)`", text):
        if re.fullmatch(r"\w[\w/-]*\.py|\w[\w/-]*/[\w-]+\.\w+|(\w+/)+", word):
            yield word


@pytest.mark.parametrize("page", GUIDE, ids=lambda page: page.name)
def test_a_page_of_the_guide_is_read_in_one_go(page: Path) -> None:
    assert page.read_text().count("\n") < 200


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_file_that_is_named_exists(page: Path) -> None:
    folders = [ROOT, ROOT / "lightning_wlb", ROOT / "tests", page.parent]
    folders += [path.parent for path in (ROOT / "lightning_wlb").rglob("*.py")]
    missing = [
        name
        for name in mentioned(page)
        if not name.startswith(MADE) and not any((folder / name).exists() for folder in folders)
    ]
    assert missing == []


COMPARED = {
    "**FSDP or DDP**": [["concatenate and cut, no packer"]],
    "**TRL's packing**": [["TRL bfd"], ["TRL wrapped"]],
    "**transformers**": [["transformers batch_rebalance"], ["transformers group_by_length"]],
    "**Megatron Core's": [["Megatron BalancedCPScheduler"], ["Megatron DpBalancedScheduler"]],
    "**torchtitan**": [["concatenate and cut, no packer"]],
    "**verl, slime**": [
        ["verl rearrange_micro_batches"],
        ["slime balance_by_flops", "slime first fit, dealt by FLOPs"],
    ],
}
"""The rows of packers.md that a row of the comparison with others is about, by how it begins."""


def test_the_comparison_with_others_says_what_was_simulated() -> None:
    result = json.loads((ROOT / "benchmarks/results/packers.json").read_text())
    page = (DOCS / "alternatives.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith("| **")]
    assert len(rows) == len(COMPARED)
    for row, (begins, groups) in zip(rows, COMPARED.items(), strict=True):
        assert row.startswith(f"| {begins}")
        said = re.findall(r"(\d\.\d\d) to (\d\.\d\d)", row.split(" | ")[3])
        assert said == [range_over_auto(result, packers) for packers in groups]
        missing = [
            every for every in groups if len(times_over_auto(result, every)) < len(every) * 5
        ]
        assert ("does not fit" in row) == bool(missing)
    exact = " to ".join(range_over_auto(result, ["auto, by exact work"]))
    assert f"Planned by exact work alone it takes {exact} times as long" in page


def times_over_auto(result: dict[str, Any], packers: list[str]) -> list[float]:
    """Time of a step over that of `auto`, of each setting in which a packer fits."""
    return [
        of[packer]["ns_per_gigaflop"] / of["auto"]["ns_per_gigaflop"]
        for of in result["settings"].values()
        for packer in packers
        if "ns_per_gigaflop" in of.get(packer, {})
    ]


def range_over_auto(result: dict[str, Any], packers: list[str]) -> tuple[str, str]:
    found = times_over_auto(result, packers)
    return f"{min(found):.2f}", f"{max(found):.2f}"


OTHERS = {  # Lightning's, torch's and Python's
    "You selected an invalid strategy name: strategy",
    "instance of pytorch_lightning",
    "must be a LightningModule",
    "isinstance(treespec, LeafSpec) is deprecated",
    "When using an IterableDataset",
    "or an int",
}
COMPOSED = {  # of texts of ours, and words between them
    "data-parallel ranks under DDPStrategy would all train on the same documents",
    "The mesh data",
    "has no torch.float32 on CUDA",
    "was begun for another request",
    "reading tokens of",
    "The ranks hold different plans for step",
    "the loss is nan on rank",
    "failed, step",
    "is not a lightning_wlb checkpoint: it holds",
    "holds optimizer state",
}


def test_messages_that_are_explained_are_given() -> None:
    """Beside other packages' and a few that are put together, each is a text in the code."""
    said = []
    for path in (ROOT / "lightning_wlb").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = (getattr(each, "value", "") for each in node.values)
                said.append("\0".join(each if isinstance(each, str) else "" for each in parts))
            elif isinstance(node, ast.Constant):
                said.append(str(node.value))
    code, unsaid = "\n".join(said), set()
    rows = re.findall(r"^\| (`.*?`) \| ", (DOCS / "guide/troubleshooting.md").read_text(), re.M)
    assert len(rows) > 50
    for quote in re.findall("`(.*?)`", " ".join(rows)):
        for part in re.split(r"\.\.\.|\b\d+\b|\bN\b|'.*?'", quote):
            words = part.strip(" ()[]:;,.!=")
            if len(words) > 7 and words not in code:
                unsaid.add(words)
    assert unsaid == OTHERS | COMPOSED
