"""The command says what it did, and what to type next."""

import pytest

from lightning_wlb.cli import tokenize
from lightning_wlb.cli.main import main
from tests.data.tokenising.support import (
    MARKED,
    columns,
    saved,
    saved_chat_tokenizer,
    write_lines,
)


def test_it_says_what_it_did(tmp_path, capsys, monkeypatch) -> None:
    texts = [{"text": "a" * length} for length in (2, 3, 3, 100)] + [{"text": ""}]
    source = write_lines(tmp_path / "texts" / "a.jsonl", texts)
    (tmp_path / "texts" / "README.md").write_text("about")
    monkeypatch.chdir(tmp_path)
    out, tokenizer = tmp_path / "my out", saved(tmp_path)
    command = ["tokenize", str(source.parent), str(out), "--tokenizer", tokenizer, "--workers", "1"]
    assert main([*command, "--eos", "</s>"]) == 0
    assert [len(tokens) for tokens in columns(out)["input_ids"]] == [3, 4, 4, 101]
    printed = capsys.readouterr().out
    begin, _, end = printed.partition("In ")
    assert begin == (
        "Documents end in '</s>' (token 1).\n"
        "Left out: 1 other file, such as README.md.\n"
        "4 documents with 112 tokens, 28 on average, 101 the longest; vocabulary 300.\n"
        "Skipped: 1 row in which the text is empty.\n"
        "\n"
        "               tokens      documents  share of tokens\n"
        "               2 to 3              1  █ 2.7%\n"
        "               4 to 7              2  ███ 7.1%\n"
        "              8 to 15              0   0.0%\n"
        "             16 to 31              0   0.0%\n"
        "             32 to 63              0   0.0%\n"
        "            64 to 127              1  ████████████████████████████████████ 90.2%\n"
        "\n"
    )
    assert end.split("Next:\n\n")[1] == (
        f"  lightning-wlb plan --lengths '{out}' --model tiny,vocab_size=300 --mesh auto"
        " --devices 2 \\\n"
        "      --micro-batches 4 --context-window 128 --profile cpu\n"
    )
    assert main([*command, "--no-eos"]) == 2
    assert "was made for another request: eos '</s>' there, False here" in capsys.readouterr().err


def test_long_documents_that_are_rare_do_not_set_the_window(tmp_path, capsys) -> None:
    texts = [{"text": "a" * 30}] * 400 + [{"text": "a" * 100}]
    source = write_lines(tmp_path / "a.jsonl", texts)
    out = tmp_path / "out"
    assert main(["tokenize", str(source), str(out), "--tokenizer", saved(tmp_path)]) == 0
    assert "--context-window 32 --profile" in capsys.readouterr().out


def test_what_is_next_fits_the_machine_and_the_files_at_hand(tmp_path, monkeypatch) -> None:
    made = {"by_length": [(0, 0)] * 17 + [(1, 200_000)], "tokens": 200_000, "vocab_size": 300}
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    assert "--context-window 4096 --profile cpu" in tokenize.next_command(tmp_path, made)
    (tmp_path / "examples").mkdir()
    (tmp_path / "examples" / "pretrain.yaml").touch()
    command = tokenize.next_command(tmp_path, made)
    assert "--model examples/pretrain.yaml,vocab_size=300 --mesh auto --devices 2 " in command
    monkeypatch.setattr("torch.cuda.device_count", lambda: 8)
    command = tokenize.next_command(tmp_path, made)
    assert "--model 7b,vocab_size=300 --mesh auto --devices 8 " in command
    assert "--context-window 262144 --profile h100" in command


def test_a_picture_is_no_wider_than_it_may_be() -> None:
    """Whatever the record of a folder that was handed over says."""
    made = {"documents": 1, "tokens": 1, "longest": 1, "vocab_size": 9, "skipped": 0}
    assert max(map(len, tokenize.summary(made | {"by_length": [[1, 30_000_000]]}, "texts"))) < 100


def test_after_a_wrong_first_try_the_same_folder_is_made(tmp_path, capsys) -> None:
    source = write_lines(tmp_path / "a.jsonl", [{"content": "a"}])
    command = ["tokenize", str(source), str(tmp_path / "out"), "--tokenizer", saved(tmp_path)]
    assert main(command) == 2
    assert "has no 'text', only 'content'. Name the column" in capsys.readouterr().err
    assert main([*command, "--column", "content"]) == 0


def test_chats_say_what_may_be_a_target(tmp_path, capsys) -> None:
    pytest.importorskip("transformers")
    tokenizer = saved_chat_tokenizer(tmp_path / "model", MARKED)
    asked = {"role": "user", "content": "a"}
    chats = [{"talk": [asked, {"role": "assistant", "content": "b"}]}, {"talk": [asked]}]
    source = write_lines(tmp_path / "a.jsonl", chats)
    command = ["tokenize", str(source), str(tmp_path / "out"), "--tokenizer", tokenizer]
    assert main([*command, "--chats", "--column", "talk"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("Targets are what the assistant says, as the chat template marks it.")
    assert "1 document with 7 tokens" in printed
    assert "Of the tokens 28.6% may be targets." in printed
    assert "Skipped: 1 row in which nothing is learned." in printed


@pytest.mark.parametrize(
    ("error", "message"),
    [(KeyboardInterrupt(), "Interrupted. What is done lies in "), (OSError("full"), "full. What")],
)
def test_a_command_that_was_ended_says_how_to_go_on(tmp_path, capsys, monkeypatch, error, message):
    def ended(*given: object) -> None:
        raise error

    monkeypatch.setattr(tokenize, "tokenise", ended)
    source = write_lines(tmp_path / "a.jsonl", [{"text": "a"}])
    command = ["tokenize", str(source), str(tmp_path / "out"), "--tokenizer", saved(tmp_path)]
    assert main(command) == 2
    assert f"tokenize: {message}" in capsys.readouterr().err
