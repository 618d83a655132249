import os
import struct
from itertools import chain, pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_wlb.data.open_documents import documents
from tests.data.stores.corpora import (
    TOKENS,
    Documents,
    check,
    check_in_workers,
    corpora,
    write_arrow,
)

CODES = {"uint8": 1, "int8": 2, "int16": 3, "int32": 4, "int64": 5, "uint16": 8}


def write_megatron(stem: Path, sequences: Documents, bounds: list[int], dtype: str) -> Path:
    """A pair of files, from the layout as Megatron-LM documents it."""
    item = np.dtype(dtype).itemsize
    sizes = [len(tokens) for tokens in sequences]
    pointers = [item * sum(sizes[:number]) for number in range(len(sizes))]
    with open(f"{stem}.idx", "wb") as index:
        index.write(b"MMIDIDX\x00\x00" + struct.pack("<QB", 1, CODES[dtype]))
        index.write(struct.pack("<QQ", len(sizes), len(bounds)))
        index.write(struct.pack(f"<{len(sizes)}i", *sizes))
        index.write(struct.pack(f"<{len(pointers)}q", *pointers))
        index.write(struct.pack(f"<{len(bounds)}q", *bounds))
    with open(f"{stem}.bin", "wb") as tokens:
        for sequence in sequences:
            tokens.write(np.array(sequence, dtype).tobytes())
    return stem


@settings(max_examples=40, deadline=None)
@given(corpora(), st.sampled_from(["int32", "int64", "uint16"]), st.data())
def test_pairs_read_as_they_were_written(tmp_path_factory, sequences, dtype, data):
    inner = data.draw(st.sets(st.integers(1, len(sequences)), max_size=4))
    bounds = sorted({0, len(sequences)} | inner)
    stem = write_megatron(tmp_path_factory.mktemp("megatron") / "a.b", sequences, bounds, dtype)
    joined = [list(chain(*sequences[first:last])) for first, last in pairwise(bounds)]
    store = documents(f"{stem}.{data.draw(st.sampled_from(['idx', 'bin']))}")
    check(store, joined)


def test_paths_and_workers(tmp_path: Path) -> None:
    rows = [[number] * (number + 1) for number in range(9)]
    stem = write_megatron(tmp_path / "corpus", rows, list(range(10)), "uint16")
    check(documents(str(stem)), rows)
    check_in_workers(documents(tmp_path))
    write_megatron(tmp_path / "other", rows, list(range(10)), "uint16")
    with pytest.raises(ValueError, match=r"has 2 \.idx files. Give the path of one pair"):
        documents(tmp_path)


def test_empty_documents_are_left_out(tmp_path: Path) -> None:
    stem = write_megatron(tmp_path / "a", [[1], [], [2]], [0, 1, 2, 2, 3], "int32")
    check(documents(stem), [[1], [2]])
    with pytest.raises(ValueError, match=r"document 3 of Megatron.*token 2 .*\[0, 2\)"):
        documents(stem, vocab_size=2).read(1, 0, 1)


def changed(stem: Path, at: int, values: bytes) -> None:
    path = Path(f"{stem}.idx")
    content = bytearray(path.read_bytes())
    content[at : at + len(values)] = values
    path.write_bytes(content)


HEADER, SIZES, POINTERS, DOCUMENTS = 34, 12, 24, 32


@pytest.mark.parametrize(
    ("at", "values", "message"),
    [
        (0, b"TNTIDX\x00\x00", "does not begin as an index of Megatron's does"),
        (9, struct.pack("<Q", 2), "is of version 2"),
        (17, b"\x06", r"tokens of type 6\. Known are version 1 and the types 1 \(uint8\)"),
        (17, b"\x08", r"counts 6 tokens, .*a\.bin has 12 of uint16"),
        (18, struct.pack("<Q", 4), r"has 102 bytes, but 114 for the 4 sequences"),
        (HEADER, struct.pack("<i", 4), "counts 7 tokens"),
        (HEADER, struct.pack("<ii", 2, 2), "sequence 1 has 2 tokens from byte 12 on"),
        (HEADER, struct.pack("<iii", 9, -5, 2), "sequence 1 has -5 tokens"),
        (HEADER + SIZES, struct.pack("<q", 4), "sequence 0 has 3 tokens from byte 4 on"),
        (HEADER + SIZES + POINTERS, struct.pack("<q", 1), "from sequence 1 to 3 of 3"),
        (HEADER + SIZES + POINTERS + 24, struct.pack("<q", 2), "from sequence 0 to 2 of 3"),
        (HEADER + SIZES + POINTERS + 8, struct.pack("<qq", 2, 1), "go back"),
        (HEADER + SIZES + POINTERS + 8, struct.pack("<qq", 2**63 - 1, -2), "go back"),
    ],
)
def test_an_index_that_disagrees_is_refused(tmp_path, at, values, message):
    stem = write_megatron(tmp_path / "a", TOKENS, [0, 1, 2, 3], "int32")
    assert Path(f"{stem}.idx").stat().st_size == HEADER + SIZES + POINTERS + DOCUMENTS
    changed(stem, at, values)
    with pytest.raises(ValueError, match=message):
        documents(stem)


def test_truncated_and_missing_files_are_refused(tmp_path: Path) -> None:
    stem = write_megatron(tmp_path / "a", TOKENS, [0, 1, 2, 3], "int32")
    index = Path(f"{stem}.idx")
    whole = index.read_bytes()
    for size in range(len(whole)):
        index.write_bytes(whole[:size])
        with pytest.raises(ValueError, match=r"a\.idx (cannot be read|does not|has \d+)"):
            documents(stem)
    index.write_bytes(whole)
    Path(f"{stem}.bin").unlink()
    with pytest.raises(ValueError, match=r"a\.bin cannot be read"):
        documents(stem)


def test_no_stranger_adds_a_pair_or_takes_its_place(scratch: Path) -> None:
    ours, theirs = (scratch / name for name in ("ours", "other"))
    for stem in (ours, theirs):
        write_megatron(stem, TOKENS, [*range(len(TOKENS) + 1)], "int32")
    for mine, strange in (("idx", "bin"), ("bin", "idx")):
        os.chown(f"{theirs}.{mine}", 0, 0)
        os.chown(f"{theirs}.{strange}", 65534, 65534)
        with pytest.raises(ValueError, match=rf"other\.{strange} is another user's, where others"):
            documents(theirs)
    os.chown(f"{theirs}.bin", 65534, 65534)
    assert len(documents(theirs).lengths) == len(TOKENS), "which was named"
    Path(f"{ours}.idx").rename(scratch / "kept")
    with pytest.raises(ValueError, match=r"other\.idx is another user's, where others may put"):
        documents(scratch)
    (scratch / "kept").rename(f"{ours}.idx")
    ours.mkdir()
    assert len(documents(f"{ours}.idx").lengths) == len(TOKENS)
    with pytest.raises(ValueError, match=r"ours may mean .*/ours\.idx or .*/ours/\*\. Give"):
        documents(ours)
    write_arrow(ours / "a.arrow", pa.table({"input_ids": TOKENS}))
    with pytest.raises(ValueError, match=r"ours' may be a Hugging Face .*, or Megatron's \.bin"):
        documents(ours)
    Path(f"{ours}.bin").rename(scratch / "kept")  # whose index may be another program's
    assert len(documents(ours).lengths) == len(TOKENS)
    (scratch / "kept").rename(f"{ours}.bin")
    (ours / "a.arrow").unlink()
    for end in ("idx", "bin"):
        os.chown(Path(f"{theirs}.{end}").rename(ours / f"other.{end}"), 0, 0)
    with pytest.raises(ValueError, match=r"ours may mean .*/ours\.idx or .*/ours/other\.idx"):
        documents(ours)
    os.chown(ours, 65534, 65534)
    with pytest.raises(ValueError, match=r"ours is another user's, where others may put"):
        documents(ours)
