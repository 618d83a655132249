import glob
import json
import os
import shutil
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import numpy as np
import pyarrow as pa
import pytest
from lightning.pytorch.cli import LightningCLI

import lightning_wlb as wlb
from lightning_wlb.cost.flops import ModelShape
from lightning_wlb.data import open_documents
from lightning_wlb.data.loader import StepDataset
from lightning_wlb.data.open_documents import KINDS, check_documents, documents
from lightning_wlb.data.stores.arrow_and_parquet import ArrowDocuments
from lightning_wlb.data.stores.document_store import DocumentSubset
from lightning_wlb.data.stores.in_memory import InMemoryDocuments
from lightning_wlb.data.stores.python_stdlib import StdlibDocuments
from lightning_wlb.data.tokenising.sources import Source
from tests.data.stores.corpora import TOKENS, write_arrow
from tests.data.test_datamodule import Recorder

SHAPE = ModelShape(dim=8, layers=1, heads=1, kv_heads=1, head_dim=8, ffn_dim=8, vocab_size=9)


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    return write_arrow(tmp_path / "corpus.arrow", pa.table({"input_ids": TOKENS}))


def test_it_recognises_what_it_is_given(corpus: Path) -> None:
    assert wlb.documents is documents
    assert isinstance(documents(TOKENS), InMemoryDocuments)
    assert documents(TOKENS, vocab_size=50).vocab_size == 50
    store = documents(str(corpus))
    assert isinstance(store, ArrowDocuments)
    assert documents(store) is store
    assert documents({"path": corpus, "vocab_size": 7}, mask_column=None).vocab_size == 7
    stdlib = documents("stdlib", tokenizer="bytes")
    assert isinstance(stdlib, StdlibDocuments)
    assert "tokenizer='bytes'" in stdlib.name


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        ("no/such", {}, r"documents='no/such': no/such is no file or folder\. Give"),
        ("no/such*", {}, "no file fits this pattern"),
        (["a.arrow", "b.txt"], {}, "a.arrow is no file or folder"),
        (3, {}, "documents of type int: these are no documents that are known"),
        (np.ones((2, 3), int), {}, "documents of type ndarray: these .*; a list of sequences of t"),
        ({"paths": "a"}, {}, r"documents=\{'paths': 'a'\}: a mapping .* has one of path, texts"),
        ({"path": "a", "texts": "b"}, {}, "a mapping of documents has one of path, texts"),
        ({"path": "a", "column": "b"}, {"column": "b"}, "column given twice"),
        (TOKENS, {"column": "b"}, r"no option 'column'\. It takes masks, vocab_size"),
        (InMemoryDocuments(TOKENS), {"vocab_size": 9}, "open already and takes no options"),
    ],
)
def test_what_is_not_known_is_refused(source: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        documents(source, **options)


def test_texts_are_told_from_documents(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl.gz").write_bytes(b"")
    for source in (tmp_path, tmp_path / "a.jsonl.gz"):
        with pytest.raises(ValueError, match=rf"texts, which need a tok.*'texts': '{source}', "):
            documents(source)


def test_the_error_lists_what_is_known(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="these are no documents that are known") as info:
        documents(tmp_path)
    assert all(kind.description in str(info.value) for kind in KINDS)
    with pytest.raises(ValueError, match=r"test_documents='.*: these are no doc"):
        check_documents("test_documents", str(tmp_path))


def test_a_token_outside_the_models_vocabulary_is_named(corpus: Path) -> None:
    """By row and source, where the store does not know its vocabulary, also below a subset."""
    data = wlb.DataSettings(context_window=4, micro_batches=1, shuffle=False)
    whole = documents(corpus)
    assert whole.vocab_size is None
    for store in (whole, DocumentSubset(whole, [2])):
        dataset = StepDataset.for_model(
            store, data, SHAPE.__class__(**{**vars(SHAPE), "vocab_size": 6})
        )
        with pytest.raises(ValueError, match=r"document 2 of Arrow.*corpus.*token 6 .*\[0, 6\)"):
            list(dataset)
    assert sum(batch.tokens for batch in StepDataset.for_model(whole, data, SHAPE)) == 6


CONFIG = """
trainer:
  accelerator: cpu
  devices: 1
  max_steps: 2
  logger: false
  enable_checkpointing: false
  enable_progress_bar: false
  enable_model_summary: false
data:
  documents: {documents}
  validation_documents: {validation}
  test_documents: {documents}
  context_window: 4
  micro_batches: 1
  packing: {{method: wlb, queues: 1}}
"""


IN_MEMORY = (
    "{{class_path: lightning_wlb.data.stores.in_memory.InMemoryDocuments, "
    "init_args: {{sequences: [[1, 2, 3], [4], [5, 6]], vocab_size: 8}}}}"
)


@pytest.mark.parametrize(
    "how", ["{path}", "{{path: {path}, vocab_size: 8}}", "[{path}]", IN_MEMORY]
)
def test_lightning_cli_takes_paths_and_mappings(tmp_path: Path, corpus: Path, how: str) -> None:
    config = tmp_path / "config.yaml"
    given = how.format(path=corpus)
    config.write_text(CONFIG.format(documents=given, validation=given))
    arguments = ["fit", "--config", str(config), f"--trainer.default_root_dir={tmp_path}"]
    cli = LightningCLI(Recorder, wlb.WLBDataModule, save_config_callback=None, args=arguments)
    assert cli.model.steps == [0, 1]
    assert cli.datamodule.settings.packing_choice.options.queues == 1
    assert isinstance(cli.datamodule, L.LightningDataModule)
    store, validation, _ = cli.datamodule._stores()
    assert store.lengths.tolist() == validation.lengths.tolist() == [3, 1, 2]
    assert store.vocab_size == (8 if "vocab_size" in how else None)


@pytest.mark.parametrize(
    "given",
    [{"texts": None, "tokenizer": "a"}, {"chats": 3, "tokenizer": "a"}],
)
def test_what_is_no_path_is_refused_by_its_name(given) -> None:
    key = next(iter(given))
    with pytest.raises(ValueError, match=rf"documents: {key}={given[key]} is no path"):
        documents(given)


@pytest.mark.parametrize("pattern", ["**/*.arrow", "*/*.arrow"])
def test_a_pattern_leaves_no_folder_out_without_a_word(
    pattern: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("open", "closed"):
        (tmp_path / name).mkdir()
        write_arrow(tmp_path / name / "a.arrow", pa.table({"input_ids": TOKENS}))
    assert len(documents(str(tmp_path / pattern)).lengths) == 2 * len(TOKENS)
    assert len(documents(str(tmp_path / "**" / "**" / "*.arrow")).lengths) == 2 * len(TOKENS)
    list_folder = os.scandir

    def closed(path: Any = ".") -> Any:
        if Path(os.fspath(path)).name == "closed":
            raise PermissionError(13, "Permission denied", os.fspath(path))
        return list_folder(path)

    monkeypatch.setattr(os, "scandir", closed)
    with pytest.raises(ValueError, match=r"closed cannot be looked into .*left out without a word"):
        documents(str(tmp_path / pattern))


def test_a_link_does_not_bring_documents_twice(tmp_path: Path) -> None:
    (tmp_path / "v1").mkdir()
    write_arrow(tmp_path / "v1/a.arrow", pa.table({"input_ids": TOKENS}))
    (tmp_path / "latest").symlink_to("v1")
    with pytest.raises(ValueError, match="are the same by a link"):
        documents(str(tmp_path / "*/*.arrow"))
    (tmp_path / "v1/b.arrow").symlink_to("a.arrow")
    with pytest.raises(ValueError, match="are the same by a link"):
        documents(tmp_path / "v1")


def test_no_stranger_adds_documents_to_a_folder_of_ones_own(scratch: Path) -> None:
    """In an open folder his files, and his links to this user's own, were read like the others."""
    (scratch / "leads").unlink()
    for each in (scratch, scratch / "../home"):
        write_arrow(each / "mine.arrow", pa.table({"input_ids": TOKENS}))
        (each / "mine.txt").write_text("a text")
    (scratch / "notes.log").touch()
    os.chown(scratch / "notes.log", 65534, 65534)  # which nobody reads
    reads = (
        lambda: documents(scratch),
        lambda: documents(f"{scratch}/*.arrow"),
        lambda: Source.open(scratch),
    )
    for read in reads:
        read()
    for put in (shutil.copy, os.symlink):
        for end in ("arrow", "txt"):
            put(scratch.parent / "home" / f"mine.{end}", scratch / f"theirs.{end}")
            os.lchown(scratch / f"theirs.{end}", 65534, 65534)
        for read in reads:
            with pytest.raises(ValueError, match=r"theirs\.(arrow|txt) is another user's, where"):
                read()
        assert len(documents(scratch / "theirs.arrow").lengths) == len(TOKENS), "which was named"
        for end in ("arrow", "txt"):
            (scratch / f"theirs.{end}").unlink()
    away = (scratch / "mine.arrow").rename(scratch / "../away.arrow")
    (scratch / "state.json").write_text(json.dumps({"_data_files": [{"filename": "other"}]}))
    write_arrow(scratch / "other", pa.table({"input_ids": TOKENS}))
    assert len(documents(scratch).lengths) == len(TOKENS)
    os.chown(scratch / "state.json", 65534, 65534)
    with pytest.raises(ValueError, match=r"state\.json is another user's, where"):
        documents(scratch)
    for name in ("state.json", "other"):
        (scratch / name).unlink()
    write_arrow(scratch / "theirs/far.arrow", pa.table({"input_ids": TOKENS}))
    os.chown(scratch / "theirs/far.arrow", 65534, 65534)
    private = scratch / "../private"
    private.mkdir()
    (private / "link.arrow").symlink_to(scratch / "theirs/far.arrow")
    assert len(documents(private).lengths) == len(TOKENS), "this user's own link"
    (scratch / "theirs/far.arrow").unlink()
    away.rename(scratch / "mine.arrow")
    os.chown(scratch, 65534, 65534)  # whoever has made the folder may put files there
    os.chown(scratch / "mine.arrow", 65534, 65534)
    assert len(documents(scratch).lengths) == len(TOKENS)


@pytest.mark.parametrize("name", ["*.arrow", "**/*.arrow"])
def test_no_stranger_takes_the_place_of_a_pattern(scratch: Path, name: str) -> None:
    """A file of the pattern's very name was read in place of those that fit."""
    write_arrow(scratch / "mine.arrow", pa.table({"input_ids": TOKENS}))
    plain = scratch / name
    plain.parent.mkdir(exist_ok=True)
    write_arrow(plain, pa.table({"input_ids": TOKENS[:1]}))
    assert len(documents(str(plain)).lengths) == 1, "this user's own"
    os.chown(plain, 65534, 65534)
    os.chown(plain.parent, 0 if plain.parent == scratch else 65534, 0)
    with pytest.raises(ValueError, match=r"\*\.arrow is another user's, where others may put"):
        documents(str(plain))


def test_links_that_lead_upwards_end_a_pattern(tmp_path: Path, corpus: Path) -> None:
    """Glob would follow two of them for ever."""
    shutil.copy(corpus, tmp_path / "deep.arrow")
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep.arrow").rename(tmp_path / "deep/b.arrow")
    assert len(documents(f"{tmp_path}/**/*.arrow").lengths) == 2 * len(TOKENS)
    for name in "xy":
        (tmp_path / name).symlink_to(".")
    for pattern in ("**/*.arrow", "*/**", "*/*/*/*.none"):
        with pytest.raises(ValueError, match="are the same by a link, or named twice"):
            documents(f"{tmp_path}/{pattern}")
    # Folders that a walk leaves out are left out here too, or walked through when they are named.
    for name in ("lost+found", ".hidden"):
        (tmp_path / name).mkdir()
        for link in "xy":
            (tmp_path / link).rename(tmp_path / name / link)
        assert len(documents(f"{tmp_path}/**/*.arrow").lengths) == 2 * len(TOKENS)
        for pattern in (f"**/{name}/**/*.arrow", f"{name}/**/**/*.arrow"):
            with pytest.raises(ValueError, match="are the same by a link, or named twice"):
                documents(f"{tmp_path}/{pattern}")
        for link in "xy":
            (tmp_path / name / link).rename(tmp_path / link)


@pytest.mark.parametrize(
    "pattern",
    ["*", "*/b.txt", "**", "*/", "**/*.txt", "**/a/**/*.txt", "a/**/**/?.txt", ".*/*", "[[]b]/*"],
)
def test_patterns_find_what_glob_finds(pattern: str, tmp_path: Path, monkeypatch: Any) -> None:
    for name in ("b.txt", "a/b.txt", "a/c/a/b.txt", "a/a/d.txt", ".h/e.txt", "a/.f.txt", "[b]/g"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "a/broken.txt").symlink_to("missing")
    monkeypatch.chdir(tmp_path)
    for place in ("", f"{tmp_path}/", "a/../"):
        found = open_documents._fitting(place + pattern)
        assert found == sorted(set(map(Path, glob.glob(place + pattern, recursive=True)))), place


def test_patterns_pass_over_files_beside_folders(tmp_path: Path, corpus: Path, monkeypatch) -> None:
    (tmp_path / "a/b").mkdir(parents=True)
    corpus.rename(tmp_path / "a/b/c.arrow")
    (tmp_path / "README.md").touch()
    (tmp_path / "nowhere").symlink_to("missing")
    (tmp_path / "lost+found").mkdir()
    scan = os.scandir

    def closed(path: Any) -> Any:
        if Path(path).name == "lost+found":  # root's alone
            raise PermissionError(13, "Permission denied", str(path))
        return scan(path)

    monkeypatch.setattr(os, "scandir", closed)
    for pattern in ("*/**/*.arrow", "**/*.arrow", "*/*/*.arrow", "*/b/c.arrow"):
        assert len(documents(f"{tmp_path}/{pattern}").lengths) == len(TOKENS), pattern


def test_a_third_user_adds_nothing_to_ones_own_folder_in_a_colleagues(scratch: Path) -> None:
    """In a colleague's folder, where only his group writes, whatever they made is read."""
    mine = scratch / "theirs/mine"
    mine.mkdir()
    for folder in (mine, scratch / "theirs"):
        write_arrow(folder / "a.arrow", pa.table({"input_ids": TOKENS}))
        os.chown(folder / "a.arrow", 1234, 1234)
    (scratch / "theirs").chmod(0o2775)
    assert len(documents(f"{scratch}/theirs/*.arrow").lengths) == len(TOKENS)
    assert len(documents(mine).lengths) == len(TOKENS)
    mine.chmod(0o1777)
    for source in (mine, f"{mine}/*.arrow"):
        with pytest.raises(ValueError, match=r"a\.arrow is another user's, where others may"):
            documents(source)
    os.chown(mine / "a.arrow", 65534, 65534)  # whose folder leads there
    assert len(documents(mine).lengths) == len(TOKENS)


@pytest.mark.parametrize("depth", [1, 2])
def test_a_stranger_adds_nothing_behind_ones_own_link_to_a_folder(scratch: Path, depth) -> None:
    """Neither to that folder nor by a folder of his own in it."""
    home, web = scratch.parent / "home", scratch / "web"
    folder = web / "in" if depth == 2 else web
    folder.mkdir(parents=True)
    (home / "web").symlink_to(web)
    for each in (home, folder):
        write_arrow(each / "a.arrow", pa.table({"input_ids": TOKENS}))
        (each / "a.txt").write_text(each.name)
    reads = (
        lambda: documents(f"{home}/{'*/' * depth}*.arrow"),
        lambda: documents(f"{home}/**/*.arrow"),
        lambda: Source.open(home),
    )
    web.chmod(0o777)
    for read in reads:
        read()
    for end in ("arrow", "txt"):
        shutil.copy(folder / f"a.{end}", folder / f"theirs.{end}")
        os.chown(folder / f"theirs.{end}", 65534, 65534)
    if depth == 2:
        os.chown(folder, 65534, 65534)
    for read in reads:
        with pytest.raises(ValueError, match=r"/\w+\.(arrow|txt) is another user's, where others"):
            read()
    web.chmod(0o775)  # a group's
    for read in reads:
        read()


def test_who_owns_a_folder_may_add_to_open_folders_in_it(scratch: Path) -> None:
    home = scratch.parent / "home"
    write_arrow(home / "in/a.arrow", pa.table({"input_ids": TOKENS}))
    (home / "in").chmod(0o777)
    for each in (home, home / "in/a.arrow"):
        os.chown(each, 1234, 1234)
    assert len(documents(f"{home}/*/*.arrow").lengths) == len(TOKENS)
    os.chown(home, 0, 0)
    with pytest.raises(ValueError, match=r"in/a\.arrow is another user's, where others may"):
        documents(f"{home}/*/*.arrow")
