"""Only what the assistant says may be a target, by every way to find it."""

import json
from itertools import takewhile
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_wlb.data.tokenising.chats import ChatEncoder
from lightning_wlb.data.tokenising.sources import Row
from lightning_wlb.data.tokenising.texts import TextEncoder
from lightning_wlb.data.tokenising.tokenise import TokeniseRequest, tokenise
from tests.data.tokenising.support import (
    MARKED,
    PLAIN,
    columns,
    messages_of,
    row,
    saved,
    saved_chat_tokenizer,
    write_lines,
)

pytest.importorskip("transformers")

CONTENT = st.text(max_size=8) | st.sampled_from(["the fox", " jumps ", "\n", "  ", "</s>", "über"])
CHATS = st.lists(
    st.tuples(st.sampled_from(["user", "assistant", "system"]), CONTENT), min_size=1, max_size=6
).filter(lambda chat: chat[0][0] != "assistant")
SPOKEN = (
    "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
"""A template without special tokens, in which tokens span the borders of turns."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("chats")


def expected_mask(tokenizer: Any, messages: list[dict[str, str]]) -> list[bool]:
    """From token numbers alone: what each turn adds to the tokens of what was before it."""

    def ids(count: int, prompt: bool) -> list[int]:
        text = tokenizer.apply_chat_template(
            messages[:count], tokenize=False, add_generation_prompt=prompt
        )
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    def common(part: list[int]) -> int:
        pairs = zip(part, whole, strict=False)
        return len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))

    whole = ids(len(messages), False)
    mask = [False] * len(whole)
    for number, message in enumerate(messages):
        if message["role"] == "assistant":
            start, stop = common(ids(number, True)), common(ids(number + 1, False))
            mask[start:stop] = [True] * (stop - start)
    return mask


@pytest.mark.parametrize("trims", [False, True])
@pytest.mark.parametrize("template", [PLAIN, SPOKEN], ids=["plain", "spoken"])
def test_masks_are_the_differences_between_the_turns(folder, template, trims) -> None:
    encoder = ChatEncoder(saved_chat_tokenizer(folder / "plain", template, trims), "messages")

    @given(CHATS)
    def check(chat: list[tuple[str, str]]) -> None:
        messages = messages_of(chat)
        (document,) = encoder.documents([row(messages)])
        expected = expected_mask(encoder._tokenizer, messages)
        assert (document is None) == (not any(expected))
        if document is not None:
            text = encoder._tokenizer.apply_chat_template(messages, tokenize=False)
            ids = encoder._tokenizer(text, add_special_tokens=False)["input_ids"]
            assert document.tokens.tolist() == ids
            assert document.mask.tolist() == expected

    check()


@given(CHATS)
def test_marked_and_unmarked_templates_differ_by_the_line_end(tmp_path_factory, chat) -> None:
    """The marked part is without the line end that the template writes after each turn."""
    folder = tmp_path_factory.getbasetemp() / "both"
    if not folder.exists():
        saved_chat_tokenizer(folder / "marked", MARKED, trims=True)
        saved_chat_tokenizer(folder / "plain", PLAIN, trims=True)
    marked, plain = (
        ChatEncoder(str(folder / name), "messages").documents([row(messages_of(chat))])[0]
        for name in ("marked", "plain")
    )
    assert (marked is None) == (plain is None)
    if marked is not None and plain is not None:
        assert np.array_equal(marked.tokens, plain.tokens)
        turns = sum(role == "assistant" for role, _ in chat)
        assert not (marked.mask & ~plain.mask).any()
        assert int((plain.mask & ~marked.mask).sum()) == turns


def test_the_masks_of_a_marked_template_are_those_of_transformers(folder) -> None:
    encoder = ChatEncoder(saved_chat_tokenizer(folder / "marked", MARKED), "messages")
    messages = messages_of([("user", "the fox"), ("assistant", "jumps"), ("assistant", "over it")])
    theirs = encoder._tokenizer.apply_chat_template(
        messages, return_dict=True, return_assistant_tokens_mask=True
    )
    (document,) = encoder.documents([row(messages)])
    assert document.tokens.tolist() == theirs["input_ids"]
    assert document.mask.astype(int).tolist() == theirs["assistant_masks"]


@pytest.mark.parametrize("template", [PLAIN, MARKED], ids=["plain", "marked"])
def test_what_the_assistant_says_with_weight_0_is_read_and_not_learned(folder, template) -> None:
    encoder = ChatEncoder(saved_chat_tokenizer(folder / "weights", template), "messages")
    chat = [("user", "the fox"), ("assistant", "jumps"), ("user", "why"), ("assistant", "over it")]

    def made(*weights: int | None) -> Any:
        own = zip(messages_of(chat), weights, strict=True)
        messages = [each if weight is None else each | {"weight": weight} for each, weight in own]
        return encoder.documents([row(messages)])[0]

    both, first, last = made(*[None] * 4), made(0, 1, 0, 0), made(None, 0, None, None)
    for each in (first, last):
        assert each.tokens.tolist() == both.tokens.tolist()
    assert (first.mask | last.mask).tolist() == both.mask.tolist()
    assert not (first.mask & last.mask).any()
    assert first.mask.any()
    assert last.mask.any()
    assert int(first.mask.argmax()) < int(last.mask.argmax())
    assert made(0, 0, 0, 0) is None


def test_tools_and_missing_entries_reach_the_template(folder) -> None:
    template = "{% for t in tools or [] %}{{ t['name'] }}{% endfor %}" + PLAIN
    encoder = ChatEncoder(saved_chat_tokenizer(folder / "tools", template), "messages")
    messages = messages_of([("user", "a"), ("assistant", "b")])
    record = {"messages": [{**each, "name": None} for each in messages]}
    made = encoder.documents(
        [Row(record | {"tools": [{"name": "fox"}]}, Path("a.txt"), 0, 1), row(messages)]
    )
    with pytest.raises(ValueError, match="leaves out the tool 'wolf'"):
        ChatEncoder(saved_chat_tokenizer(folder / "toolless", PLAIN), "messages").documents(
            [Row(record | {"tools": [{"function": {"name": "wolf"}}]}, Path("a.txt"), 0, 1)]
        )
    fox = encoder._tokenizer("fox")["input_ids"]
    assert made[0].tokens.tolist() == fox + made[1].tokens.tolist()


def test_content_in_parts_is_for_the_template_to_read(folder) -> None:
    template = PLAIN.replace("m['content']", "m['content'][0]['text']")
    encoder = ChatEncoder(saved_chat_tokenizer(folder / "parts", template), "messages")
    plain = ChatEncoder(saved_chat_tokenizer(folder / "whole", PLAIN), "messages")
    chat = [("user", "the fox"), ("assistant", "jumps")]
    parts = [{"role": role, "content": [{"type": "text", "text": text}]} for role, text in chat]
    (found,), (wanted,) = encoder.documents([row(parts)]), plain.documents([row(messages_of(chat))])
    assert (found.tokens == wanted.tokens).all()
    assert (found.mask == wanted.mask).all()


def test_a_template_of_its_own_for_tools_is_marked_or_not_by_itself(folder) -> None:
    names = "{% for t in tools %}{{ t['name'] }}{% endfor %}"
    plain, marked = (
        ChatEncoder(saved_chat_tokenizer(folder / name, template), "messages")
        for name, template in (
            ("default", {"default": MARKED, "tool_use": names + PLAIN}),
            ("both", {"default": MARKED, "tool_use": names + MARKED}),
        )
    )
    messages = messages_of([("user", "the fox"), ("assistant", "jumps")])
    chat = Row({"messages": messages, "tools": [{"name": "fox"}]}, Path("a.txt"), 0, 1)
    (unmarked,), (by_marks,) = plain.documents([chat]), marked.documents([chat])
    # The line end that the template writes after the turn, which no mark spans.
    assert int(unmarked.mask.sum()) == int(by_marks.mask.sum()) + 1
    assert plain.digest != marked.digest


def test_a_folder_of_chats_has_masks(tmp_path) -> None:
    datasets = pytest.importorskip("datasets")
    tokenizer = saved_chat_tokenizer(tmp_path / "model", MARKED)
    chats = [{"messages": messages_of([("user", "a"), ("assistant", "b" * n)])} for n in range(40)]
    source = write_lines(tmp_path / "a.jsonl", chats)
    out = tmp_path / "out"
    made = tokenise(TokeniseRequest(source, tokenizer, "chats"), out, workers=2)
    documents = ChatEncoder(tokenizer, "messages").documents(
        [Row(each, source, 0, 1) for each in chats]
    )
    expected = {
        "input_ids": [each.tokens.tolist() for each in documents if each is not None],
        "loss_mask": [each.mask.tolist() for each in documents if each is not None],
    }
    assert columns(out) == expected
    files = {"data_files": str(out / "*.arrow"), "cache_dir": str(tmp_path / "cache")}
    assert datasets.load_dataset("arrow", split="train", **files).to_dict() == expected
    assert made["targets"] == sum(map(sum, expected["loss_mask"]))


def test_an_end_that_takes_the_line_end_after_it_is_learned(folder) -> None:
    """Phi-3's tokens do; the mark ends before the line's end."""
    path = Path(saved_chat_tokenizer(folder / "strips", MARKED), "tokenizer.json")
    made = json.loads(path.read_text())
    for token in made["added_tokens"]:
        token["rstrip"] = True
    path.write_text(json.dumps(made))
    encoder = ChatEncoder(str(path.parent), "messages")
    (document,) = encoder.documents([row(messages_of([("user", "a"), ("assistant", " b")]))])
    tokens = [encoder._tokenizer.convert_ids_to_tokens(int(each)) for each in document.tokens]
    assert tokens == ["<|user|>", "a", "\u010a", "<|assistant|>", "b", "</s>"]
    assert document.mask.tolist() == [False] * 4 + [True] * 2


def test_templates_are_rendered_in_no_sandbox_that_they_get_out_of(folder):
    name = saved_chat_tokenizer(folder / "old", PLAIN)
    with (
        mock.patch("importlib.metadata.version", return_value="3.1.5"),
        pytest.raises(ValueError, match=r"not rendered: jinja2>=3\.1\.6 is required.*3\.1\.5"),
    ):
        ChatEncoder(str(name), "messages")


def test_a_prompt_that_ends_in_a_thought_is_refused_with_the_way_round(folder) -> None:
    """As DeepSeek's R1 and Gemma 4, of which a model would learn what it is never asked for."""
    asks = "{{ '<|assistant|>' }}{% if not enable_thinking is defined %}{{ '<think>' }}{% endif %}"
    thinks = PLAIN.replace("{{ '<|assistant|>' }}", asks)
    assert thinks != PLAIN
    chat = [row(messages_of([("user", "a"), ("assistant", "fox")]))]
    encoder = ChatEncoder(saved_chat_tokenizer(folder / "thinks", thinks), "messages")
    with pytest.raises(
        ValueError, match=r"in 'ssistant\|><think>', where message 1 .* 'ssistant\|>fox"
    ):
        encoder.documents(chat)
    thinks = "{%- set enable_thinking = false -%}" + thinks
    encoder = ChatEncoder(saved_chat_tokenizer(folder / "set", thinks), "messages")
    plain = ChatEncoder(saved_chat_tokenizer(folder / "plain", PLAIN), "messages")
    for one, other in zip(encoder.documents(chat)[0], plain.documents(chat)[0], strict=True):
        assert np.array_equal(one, other)


APART = MARKED.replace(" + '</s>'", "}}{% endgeneration %}{% generation %}{{ '</s>'")


@pytest.mark.parametrize("template", [PLAIN, MARKED, APART])
def test_a_template_that_ends_no_turn_is_said_so(folder, template) -> None:
    """As GLM's, and Apertus's, which writes the end once another message follows."""
    for ends in (True, False):
        given = (
            template if ends else template.replace("'</s>'", "('</s>' if not loop.last else '')")
        )
        assert ends == (given == template)
        encoder = ChatEncoder(saved_chat_tokenizer(folder / "ends", given), "messages")
        assert ("no token that ends a turn is learned" in encoder.describe()) == (not ends)


@pytest.mark.parametrize("empty", [[], "[]", {}, "", None])
def test_empty_tools_and_calls_and_thoughts_are_none(folder, empty) -> None:
    """Llama 3's template writes a preamble for functions where tools are not none."""
    looks = "{% if tools is not none %}{{ 'You may call: ' }}{% endif %}" + PLAIN.replace(
        "m['content']",
        "('<think>' if m['reasoning'] is defined else '') + m['content']"
        " + ('calls' if m['tool_calls'] is defined else '')",
    )
    encoder = ChatEncoder(saved_chat_tokenizer(folder / "looks", looks), "messages")
    plain = messages_of([("user", "a"), ("assistant", "b")])
    none = None if empty == "[]" else empty
    given = [plain[0], plain[1] | {"tool_calls": none, "reasoning": none}]
    (wanted,) = encoder.documents([row(plain)])
    (found,) = encoder.documents([Row({"messages": given, "tools": empty}, Path("a.txt"), 0, 1)])
    for one, other in zip(found, wanted, strict=True):
        assert np.array_equal(one, other)


MACRO = (
    "{% macro turn(m) %}"
    + MARKED.partition("{% for m in messages %}")[2].partition("{% endfor %}")[0]
    + "{% endmacro %}{% for m in messages %}{{ turn(m) }}{% endfor %}"
)


def test_marks_of_which_transformers_would_find_others_places_are_refused(folder) -> None:
    """It counts from where a macro begins: the header would be learned, and not the end."""
    block = MARKED.replace("}}{% if m['role'] == 'a", "}}{% set t %}{% if m['role'] == 'a", 1)
    block = block.replace("{% endif %}{{ '\n' }}", "{% endif %}{% endset %}{{ t }}{{ '\n' }}")
    for template in (
        MACRO,
        block,
        block.replace("set t", "filter trim").replace("endset %}{{ t }}", "endfilter %}"),
        MARKED.replace("in messages %}", "in messages recursive %}"),
    ):
        assert template != MARKED
        with pytest.raises(ValueError, match="in line 1 of the chat template is in a macro, a"):
            ChatEncoder(saved_chat_tokenizer(folder / "macro", template), "messages")
    around = MACRO.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    around = around.replace(
        "{{ turn(m) }}", "{% generation %}{{ turn(m) }}{% endgeneration %}"
    )  # whose answers then have their headers, as the template says
    messages = messages_of([("user", "a"), ("assistant", "b")])
    for template, told in (
        (around, "as the chat template marks it"),
        ("{# {% generation %} #}" + PLAIN, "as the difference"),
    ):
        encoder = ChatEncoder(saved_chat_tokenizer(folder / "macro", template), "messages")
        assert told in encoder.describe()
        assert encoder.documents([row(messages)])[0].mask.any()
    with pytest.raises(ValueError, match="the chat template is none: line 1: "):
        ChatEncoder(saved_chat_tokenizer(folder / "none", "{% for %}"), "messages")


def test_a_tokenizer_that_divides_the_template_s_tokens_is_refused(folder) -> None:
    name = Path(saved_chat_tokenizer(folder / "split", PLAIN))
    config = json.loads((name / "tokenizer_config.json").read_text())
    (name / "tokenizer_config.json").write_text(json.dumps(config | {"split_special_tokens": True}))
    with pytest.raises(ValueError, match=r"divides special tokens .split_special_tokens"):
        ChatEncoder(str(name), "messages")
    # In texts, which may be a stranger's, that is what is wanted.
    (document,) = TextEncoder(str(name), "text").documents(
        [Row({"text": "a<|user|>"}, Path("a.txt"), 0, 1)]
    )
    assert len(document.tokens) > 3


def test_tokenizers_without_a_template_are_refused(tmp_path) -> None:
    with pytest.raises(ValueError, match="is a tokenizers file, which has no chat template"):
        ChatEncoder(saved(tmp_path), "messages")
    with pytest.raises(ValueError, match=r"has no chat template\. Give one that has"):
        ChatEncoder(saved_chat_tokenizer(tmp_path / "model", None), "messages")
