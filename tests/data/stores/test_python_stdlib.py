import pickle
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from lightning_wlb.data import cache as cached
from lightning_wlb.data.stores import python_stdlib as stdlib
from lightning_wlb.data.stores.document_store import DocumentStore
from lightning_wlb.data.stores.python_stdlib import StdlibDocuments

SOURCE_A = b"""import os

@decorated
@twice(
    1)
def first():
    return 1

x = 2


class Second:
    def method(self):
        pass
"""
SOURCE_B = "async def third(): return '\u00e9'\n".encode()


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setattr(cached, "user_cache_dir", lambda name: str(folder / name))
    monkeypatch.setattr(cached.tempfile, "tempdir", str(tmp_path))
    return folder / "lightning_wlb"


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    folder = tmp_path / "sources"
    (folder / "package").mkdir(parents=True)
    (folder / "site-packages").mkdir()
    (folder / "package" / "a.py").write_bytes(SOURCE_A)
    (folder / "b.py").write_bytes(SOURCE_B)
    (folder / "empty.py").write_bytes(b"")
    (folder / "wrong.py").write_bytes(b"def (:\n")
    (folder / "note.txt").write_bytes(b"def no(): ...\n")
    (folder / "site-packages" / "c.py").write_bytes(b"def no(): ...\n")
    return folder


def texts(store: StdlibDocuments, model: Tokenizer | None = None) -> list[str]:
    """The documents, of bytes or by a tokenizer."""
    found = [store.read(each, 0, length).tolist() for each, length in enumerate(store.lengths)]
    return [bytes(each).decode() if model is None else model.decode(each) for each in found]


def model_of(tokenizer: str, cache: Path) -> Tokenizer | None:
    """What the only folder of the cache was tokenised by."""
    paths = list(cache.glob("*/tokenizer.json"))
    assert len(paths) == (tokenizer == "bpe")
    return Tokenizer.from_file(str(paths[0])) if paths else None


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe"])
def test_definitions_with_decorators_by_path_and_line(sources, cache, tokenizer) -> None:
    store = StdlibDocuments(tokenizer, directory=sources)  # type: ignore[arg-type]
    assert isinstance(store, DocumentStore)
    assert texts(store, model_of(tokenizer, cache)) == [
        SOURCE_B.decode(),
        "@decorated\n@twice(\n    1)\ndef first():\n    return 1\n",
        "class Second:\n    def method(self):\n        pass\n",
    ]
    assert store.vocab_size >= 256


def test_bytes_are_tokens(sources: Path) -> None:
    store = StdlibDocuments(directory=sources)
    assert store.lengths.tolist() == [len(SOURCE_B), 52, 49]
    assert store.vocab_size == 256
    assert store.read(0, 3, 9).tolist() == list(SOURCE_B[3:9])
    assert store.read(0, 3, 9).dtype == np.int64
    assert store.mask(1, 0, 5) is None


def test_byte_pairs_are_fewer_and_the_same_each_time(sources, cache, tmp_path, monkeypatch):
    store = StdlibDocuments("bpe", 300, directory=sources)
    assert 256 < store.vocab_size <= 300
    assert store.lengths[0] < len(SOURCE_B)
    assert store.read(0, 0, int(store.lengths[0])).max() < store.vocab_size
    monkeypatch.setattr(cached, "user_cache_dir", lambda name: str(tmp_path / "other"))
    again = StdlibDocuments("bpe", 300, directory=sources)
    for number, length in enumerate(store.lengths.tolist()):
        assert again.read(number, 0, length).tolist() == store.read(number, 0, length).tolist()


def test_the_cache_is_used_and_follows_the_sources(sources, cache, monkeypatch):
    builds = []
    build = stdlib._build
    monkeypatch.setattr(stdlib, "_build", lambda *args: (builds.append(1), build(*args)))
    StdlibDocuments(directory=sources)
    StdlibDocuments(directory=sources)
    assert len(builds) == 1
    (sources / "b.py").write_bytes(b"def third(): return 4\n")
    assert texts(StdlibDocuments(directory=sources))[0] == "def third(): return 4\n"
    assert len(builds) == 2
    assert len(list(cache.iterdir())) == 2, "nothing is left behind aside"


def test_a_cache_that_cannot_be_written(sources: Path, cache: Path) -> None:
    cache.parent.mkdir(exist_ok=True)
    cache.write_bytes(b"a file where the folder should be")
    assert len(StdlibDocuments(directory=sources)) == 3
    assert cache.is_file()


def test_a_pickled_store_opens_the_files_itself(sources: Path) -> None:
    store = StdlibDocuments(directory=sources)
    pickled = pickle.dumps(store)
    assert SOURCE_B[:20] not in pickled
    assert texts(pickle.loads(pickled)) == texts(store)


def test_bad_input_is_answered(sources: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="tokenizer='words'"):
        StdlibDocuments("words")  # type: ignore[arg-type]
    for wrong in (("bytes", 300), ("bpe", 255)):
        with pytest.raises(ValueError, match=f"vocab_size={wrong[1]}"):
            StdlibDocuments(*wrong)
    with pytest.raises(ValueError, match="holds no documents"):
        StdlibDocuments(directory=tmp_path / "nowhere")
