"""A few bytes of a pickle, or of the archive around it, ask for no more than a few bytes."""

import io
import pickle
import struct
import sys
import tracemalloc
import zipfile
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from lightning_wlb.checkpoints import safe_metadata
from lightning_wlb.checkpoints.manifest import Damaged
from lightning_wlb.checkpoints.pickle_checks import (
    NamedRecords,
    check_archive,
    load_plain,
    load_state,
)
from lightning_wlb.checkpoints.stored_checkpoint import StoredCheckpoint
from tests.checkpoints.small_checkpoints import Called, archive, list_anew, load, save, written

pytestmark = pytest.mark.timeout(60)  # some of these would never end
HUGE = 1 << 30
AGAIN = "names the same, or itself, again and again"


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value)) + value.encode()


def number(value: int) -> bytes:
    return b"J" + struct.pack("<i", value)


NESTED = b"](K\x01q\x01" + b"h\x01h\x01\x86q\x01" * 60 + b"e"
"""A list whose last item, remembered as 1, is a tuple of one twice, which is a tuple of one twice,
and so on: its hash takes 2 ** 60 steps."""
HEXADECIMAL = (
    b"c_codecs\nencode\n"
    + text("aaaaaaaaaa")
    + text("latin1")
    + b"\x86Rq\x00"
    + (b"c_codecs\nencode\nh\x00" + text("hex") + b"\x86Rq\x00") * 60
)
ASKING = {
    "a byte array": b"c__builtin__\nbytearray\n" + number(HUGE) + b"\x85R",
    "a new byte array": b"c__builtin__\nbytearray\n" + number(HUGE) + b"\x85\x81",
    "a tensor": b"ctorch\nFloatTensor\n" + number(HUGE) + b"\x85R",
    "a storage": b"ctorch.storage\nUntypedStorage\n" + number(HUGE) + b"\x85R",
    "a byte array of another name": b"ctorch._tensor\n_rebuild_from_type_v2\n(c__builtin__\n"
    + b"bytearray\nN("
    + number(HUGE)
    + b"tNtR",
    "a text in hexadecimal of hexadecimal": HEXADECIMAL,
    "a key": NESTED + b"}h\x01Ns\x86",
    "keys": NESTED + b"}(K\x01Nh\x01Nu\x86",
    "a set": b"c__builtin__\nset\n" + NESTED + b"\x85R",
}


@pytest.mark.parametrize("asking", ASKING.values(), ids=ASKING.keys())
def test_nothing_is_made_by_a_number(asking: bytes) -> None:
    with pytest.raises(pickle.UnpicklingError, match=r"it calls|too many of its keys|again"):
        load_plain(archive(b"\x80\x02" + asking + b"."))


@pytest.mark.parametrize("sizes", [(1,) * 65, (1 << 63,), (-1,)])
def test_dims_are_few_and_of_64_bits(sizes: tuple[int, ...]) -> None:
    """The product of many long numbers takes quadratic time."""
    with zipfile.ZipFile(written(torch.ones(1))) as stored:
        made = stored.read("archive/data.pkl")
    for place in (b"q\x06", b"q\x07"):  # the sizes, the strides
        begin, found, end = made.partition(b"K\x01\x85" + place)
        lying = archive(begin + pickle.dumps(sizes, 2)[2:-1] + end, value=torch.ones(1))
        with pytest.raises(pickle.UnpicklingError, match=r"\(.*\) in place of sizes"):
            load_plain(lying)
        assert found


def test_a_storage_has_no_more_values_than_its_file() -> None:
    """Torch compares them where it reads a file, and not where it maps one into memory."""
    tensor = torch.zeros(1).expand(HUGE)
    with zipfile.ZipFile(written(tensor)) as stored:
        made = stored.read("archive/data.pkl")
    begin, _, end = made.partition(b"K\x01t")
    lying = archive(begin + number(HUGE) + b"t" + end, value=tensor)
    with pytest.raises(pickle.UnpicklingError, match="a storage of 1,073,741,824 values in 4 byte"):
        load_plain(lying)
    key_of_tuples = archive(begin.replace(text("0"), NESTED) + b"K\x00t" + end, value=tensor)
    with pytest.raises(pickle.UnpicklingError, match="a storage of 0 values in -1 bytes"):
        load_plain(key_of_tuples)


def test_nor_by_a_state_or_by_a_call_that_takes_sizes_alone() -> None:
    """A state of a tensor is a storage and a size; meta and sparse tensors have any size."""
    for value in (torch.zeros(1), nn.Parameter(torch.zeros(1))):
        with zipfile.ZipFile(written(value)) as stored:
            made = stored.read("archive/data.pkl").removesuffix(b".")
        size = b"(NK\x00" + number(HUGE) + b"\x85K\x00\x85tb."
        with pytest.raises(pickle.UnpicklingError, match=r"a state to torch\._utils\._rebuild_"):
            load_plain(archive(made + size, value=value))
    meta, sparse = torch.empty(HUGE, device="meta"), torch.eye(2).to_sparse()
    for value, name in ((meta, "meta_tensor_no_storage"), (sparse, "sparse_tensor")):
        with pytest.raises(pickle.UnpicklingError, match=rf"it calls torch._utils._rebuild_{name}"):
            load_plain(written({"a": value}))


def test_nothing_is_unpacked() -> None:
    packed = archive(b"\x80\x02" + text("a" * 10_000_000) + b".", zipfile.ZIP_DEFLATED)
    assert len(packed.getvalue()) < 20_000
    with pytest.raises(pickle.UnpicklingError, match="not as torch writes it"):
        load_plain(packed)


def test_the_pickle_that_torch_takes_is_the_one_that_is_looked_at() -> None:
    """torch takes ``archive/DATA.PKL``, and would find another directory by its place."""
    made = io.BytesIO()
    with zipfile.ZipFile(written(0)) as old, zipfile.ZipFile(made, "w") as new:
        new.writestr("archive/DATA.PKL", b"\x80\x02" + ASKING["a byte array"] + b".")
        for name in old.namelist():
            new.writestr(name.replace("/data.pkl", "/b/data.pkl"), old.read(name))
    with pytest.raises(pickle.UnpicklingError, match="too many values"):
        load_plain(made)
    other_name = archive(b"\x80\x02]." + bytes(8)).getvalue().replace(b"data.pkl", b"data.pk\0")
    elsewhere = bytearray(written(0).getvalue())
    assert elsewhere[-42:-38] == b"PK\x06\x07"
    elsewhere[-34] ^= 1
    moved = bytearray(archive(b"\x80\x02N.").getvalue())
    place = struct.unpack_from("<I", moved, len(moved) - 6)[0]
    struct.pack_into("<I", moved, len(moved) - 6, place + 16)  # of the directory, and of records
    while moved[place : place + 4] == b"PK\x01\x02":
        moved[place + 42] += 16
        place += 46 + sum(struct.unpack_from("<HHH", moved, place + 28))
    for spoiled in (other_name, bytes(elsewhere), written(0).getvalue() + bytes(1), bytes(moved)):
        with pytest.raises(pickle.UnpicklingError, match="not as torch writes it"):
            load_plain(io.BytesIO(spoiled))


@pytest.mark.parametrize("spoiled", ["twice", "before", "comment", "overlapping"])
def test_an_archive_is_what_it_seems_to_every_reader(spoiled: str) -> None:
    stream = written({"a": torch.ones(1000)})
    if spoiled == "before":
        stream = io.BytesIO(bytes(64) + stream.getvalue())
    else:
        with zipfile.ZipFile(stream, "a") as zipped:
            if spoiled == "twice":
                zipped.writestr(zipped.namelist()[0].upper(), b"")
            elif spoiled == "comment":
                zipped.comment = b"a"
            else:
                data = zipped.getinfo("archive/data/0")
                for each in range(9):
                    again = zipfile.ZipInfo(f"archive/data/{each + 1}")
                    again.file_size, again.compress_size = data.file_size, data.compress_size
                    again.header_offset, again.CRC = data.header_offset, data.CRC
                    zipped.filelist.append(again)
                zipped._didModify = True
    with pytest.raises(pickle.UnpicklingError, match="not as torch writes it"):
        load_plain(stream)


@pytest.mark.parametrize("spoiled", [None, "attribute", "name", "two places", "two lengths"])
def test_a_record_is_no_folder_and_in_one_place(spoiled: str | None) -> None:
    """torch leaves its memory as it is where a folder was to be read, and takes the first place."""
    stream = written({"a": torch.ones(1000)})
    with zipfile.ZipFile(stream, "a") as zipped:
        zipped._didModify = True
        record = zipped.getinfo("archive/data/0")
        record.external_attr = 0o600 << 16  # as zipfile writes it
        if spoiled == "attribute":
            record.external_attr |= 0x10
        elif spoiled == "name":
            zipped.writestr("archive/data/1/", b"a")
        elif spoiled == "two places":
            record.extra = 2 * struct.pack("<HHQ", 1, 8, 0)
        elif spoiled == "two lengths":
            record.compress_size -= 1
    if spoiled is None:
        assert load_plain(stream)["a"].equal(torch.ones(1000))
        return
    with pytest.raises(pickle.UnpicklingError, match="not as torch writes it"):
        load_plain(stream)


def test_a_file_of_another_format_is_no_archive_by_its_directory() -> None:
    """torch decides by the first four bytes, and others look at the end."""
    made = io.BytesIO()
    torch.save({"a": Called(DeviceMesh, "cpu", [0])}, made, _use_new_zipfile_serialization=False)
    with zipfile.ZipFile(made, "a") as zipped:
        zipped.writestr("archive/data.pkl", b"\x80\x02N.")
        zipped.filelist.append(zipfile.ZipInfo("archive/version"))
        zipped.filelist[-1].header_offset = zipped.filelist[-1].CRC = 0
    with pytest.raises(pickle.UnpicklingError, match="not as torch writes it"):
        check_archive(made)


class Trusted:
    """A class that the user has told torch to trust."""

    def __init__(self) -> None:
        self.kept = 1


def test_what_a_checkpoint_holds_is_read_as_torch_reads_it() -> None:
    plain = {
        "ordered": OrderedDict(a=1),
        "counted": Counter("aab"),
        "set": {1, 2},
        "bytes": [b"a\xff", bytearray(b"a\xff"), bytearray()],
        "numbers": [1 + 2j, 2**70, -3, 300, 1.5, True, None],
        "types": [torch.float32, torch.strided, torch.device("cpu"), torch.Size([1, 2])],
        "keys": {("a", 1): (0.9, 0.999), ((1, 2), 3): ()},
        "generator": list(range(1000)),
    }
    assert load_plain(written(plain)) == plain
    weights = nn.Linear(1, 1).state_dict()
    assert load_plain(written(weights))._metadata == weights._metadata  # type: ignore[attr-defined]
    tensor = torch.ones(2)
    tensor.note = "attributes are kept"  # type: ignore[attr-defined]
    tensors = [
        nn.Parameter(torch.arange(3.0)),
        torch.ones(3, dtype=torch.bfloat16).expand(2, 3),
        tensor,
    ]
    for one, other in zip(load_plain(written(tensors)), tensors, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
    with torch.serialization.safe_globals([Trusted]):
        assert load_plain(written(Trusted())).kept == 1
    with pytest.raises(pickle.UnpicklingError, match=r"it calls .*Trusted"):
        load_plain(written(Trusted()))


def test_classes_that_torch_trusts_by_itself_are_not_called(tmp_path, monkeypatch) -> None:
    """A mesh begins a process group while it is read, and waits for ranks that read nothing."""
    monkeypatch.setattr(DeviceMesh, "__init__", lambda *_: pytest.fail("a mesh was made"))
    assert DeviceMesh in torch.serialization.get_safe_globals()
    for value in (Called(DeviceMesh, "cpu", [0]), DeviceMesh):
        with pytest.raises(pickle.UnpicklingError, match=r"names torch\S+device_mesh.DeviceMesh"):
            load_plain(written({"a": value}))
    folder = tmp_path / "run.ckpt"
    save(folder, 1.0)
    rest = torch.load(folder / "meta.pt", weights_only=True)
    torch.save(rest | {"callbacks": Called(DeviceMesh, "cpu", [0])}, folder / "meta.pt")
    list_anew(folder)
    with pytest.raises(ValueError, match=r"meta.pt cannot be read .* names .*DeviceMesh"):
        load(folder)


COPIES = b"cown\nOne\nh\x00R"  # of what is remembered as 0
MEMO = b"r" + struct.pack("<I", 30_000_000)
MODULUS = sys.hash_info.modulus  # its multiples have the hash 0


def collisions(count: int, protocol: int = 2) -> bytes:
    return pickle.dumps({each * MODULUS: None for each in range(99, count)}, protocol)


@pytest.mark.parametrize(
    ("operations", "message"),
    [
        (b"\x80\x04B\xff\xff\xff\x7fa.", "^$"),
        (b"\x80\x04\x8e" + struct.pack("<q", 1 << 40) + b"a.", "142"),
        (b"\x80\x04cbuiltins\nlist\n.", "it names builtins.list"),
        (b"\x80\x04ctorch\nfloat32\n}b.", "__setstate__"),
        (b"\x80\x04cown\nOne\n}b.", "missing 1 required"),
        (b"\x80\x02](cown\nOne\n(" + b"N" * 999 + b"tq\x00R" + COPIES * 5000 + b"e.", AGAIN),
        (collisions(300, 4), r"\d+ cannot be a key"),
        (b"\x80\x02}]K\x00s.", "cannot be a key"),
        (pickle.dumps({(each, each): 0 for each in range(4000)}), "too many .* are tuples"),
        (b"\x80\x02}" + NESTED + b"h\x01Nss.", "too many .* are tuples|list"),
    ],
)
def test_operations_that_lead_astray_are_refused(operations: bytes, message: str) -> None:
    with pytest.raises(Exception, match=message):
        NamedRecords(operations, {"own.One"}).load()


@pytest.mark.parametrize("state", [{"keys": set}, {"items": Counter}, [("a", 1)]])
def test_an_ordered_dictionary_hides_its_entries_by_no_attribute(state: Any) -> None:
    """A look at what it holds would find nothing there, and Lightning what is there."""
    stated = pickle.dumps(state, 2)[2:-1]
    with pytest.raises(pickle.UnpicklingError, match=r"gives a state to collections\.OrderedDict"):
        load_plain(archive(b"\x80\x02ccollections\nOrderedDict\n)R" + stated + b"b."))


def test_a_tensor_has_its_own_methods() -> None:
    """Else it says of itself that it holds as little as somebody likes."""
    for tensor in (torch.ones(2), nn.Parameter(torch.ones(2))):
        tensor.numel = set  # type: ignore[assignment,method-assign]
        with pytest.raises(pickle.UnpicklingError, match="gives a tensor other attributes"):
            load_plain(written(tensor))


def test_no_bytes_are_made_by_a_codec_that_takes_quadratic_time() -> None:
    made = pickle.dumps(("a", "punycode"), 2)[2:-1]
    with pytest.raises(pickle.UnpicklingError, match=r"it calls __builtin__\.bytearray"):
        load_plain(archive(b"\x80\x02c__builtin__\nbytearray\n" + made + b"R."))


def test_a_place_far_off_in_the_memo_takes_no_room() -> None:
    tracemalloc.start()
    assert NamedRecords(b"\x80\x04]" + MEMO + b".", ()).load() == []
    assert tracemalloc.get_traced_memory()[1] < 100_000
    tracemalloc.stop()


@pytest.mark.parametrize("key", [99 * MODULUS, 1j, torch.Size([1]), torch.device("cpu")])
def test_no_key_has_a_hash_that_somebody_chose(key: Any) -> None:
    for value in ({"a": {key: 1}}, OrderedDict([(key, 1)]), {("a", key): 1}):
        with pytest.raises(pickle.UnpicklingError, match="cannot be a key"):
            load_plain(written(value))
    members = {99 * MODULUS} if isinstance(key, int) else {(1, key)}
    with pytest.raises(pickle.UnpicklingError, match="cannot be a key"):
        load_plain(written([members]))
    chosen = b"(" + pickle.dumps(99 * MODULUS, 2)[2:-1] + b"t\x85R."
    for made in (b"c__builtin__\nset\n", b"ccollections\nCounter\n"):
        with pytest.raises(
            pickle.UnpicklingError, match=r"cannot be a key|it calls collections\.Counter"
        ):
            load_plain(archive(b"\x80\x02" + made + chosen))


def test_records_are_made_of_what_pickle_writes() -> None:
    value = {"t": ("tt", "t" * 300), "l": [1, 300, -70_000, 2**70, 1.5, None, True, b"t"], "e": ()}
    for protocol in (4, 5):
        assert NamedRecords(pickle.dumps(value, protocol), ()).load() == value


def test_a_lie_about_itself_has_a_short_message(tmp_path: Path) -> None:
    """What is made up of itself over and over would be written out in gigabytes."""
    save(tmp_path / "run.ckpt", 1.0)
    nested: list[Any] = []
    for _ in range(60):
        nested = [nested, nested]
    (tmp_path / "run.ckpt" / ".metadata").write_bytes(pickle.dumps(nested))
    with pytest.raises(Damaged, match=r"\[\.\.\.\].* in place of Metadata"):
        safe_metadata.read(tmp_path / "run.ckpt")


@pytest.mark.parametrize("name", ["meta.pt", "__0_0.distcp"])
def test_every_way_into_a_checkpoint_is_guarded(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "run.ckpt"
    save(folder, 1.0)
    if name == "meta.pt":
        (folder / name).write_bytes(archive(b"\x80\x02" + ASKING["a byte array"] + b".").getvalue())
    else:
        stored = safe_metadata.read(folder)
        place = next(p for index, p in stored.storage_data.items() if index.fqn.endswith("weight"))
        entry = archive(b"\x80\x02" + ASKING["a byte array"] + b".").getvalue()
        assert len(entry) <= place.length
        shard = bytearray((folder / name).read_bytes())
        # The end of an archive is at the end of the entry, and its beginning at the beginning.
        gap = place.length - len(entry)
        shard[place.offset : place.offset + place.length] = entry + bytes(gap)
        (folder / name).write_bytes(shard)
    list_anew(folder)
    read = StoredCheckpoint if name == "meta.pt" else load
    with pytest.raises(Exception, match=r"it calls __builtin__.bytearray|not as torch|not a zip"):
        read(folder)


@pytest.mark.parametrize("mmap", [False, True])
def test_tensors_of_a_file_are_held_to_its_checksums(mmap: bool, tmp_path: Path) -> None:
    """At which torch does not look."""
    path = tmp_path / "one.ckpt"
    torch.save({"state_dict": {"w": torch.arange(500_000.0)}}, path)
    assert load_state(path, mmap=mmap)["state_dict"]["w"].shape == (500_000,)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x10
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"one/data/0 is not what was written"):
        load_state(path, mmap=mmap)


@pytest.mark.parametrize("mmap", [False, True])
def test_what_was_looked_at_is_read(mmap: bool, tmp_path: Path, monkeypatch) -> None:
    path, read = tmp_path / "a.ckpt", torch.load
    torch.save({"a": torch.ones(2)}, path)

    def exchanged(*given: Any, **options: Any) -> Any:
        torch.save({"a": torch.zeros(2)}, tmp_path / "b.ckpt")
        (tmp_path / "b.ckpt").replace(path)
        return read(*given, **options)

    monkeypatch.setattr(torch, "load", exchanged)
    assert load_state(path, mmap=mmap)["a"].equal(torch.ones(2))
