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
from lightning_wlb.data.tokenising.tokenise import TokeniseRequest, tokenise
from tests.data.tokenising.support import (
    MARKED,
    PLAIN,
    columns,
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


def messages_of(chat: list[tuple[str, str]]) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in chat]


def row(messages: Any) -> Row:
    return Row({"messages": messages}, Path("a.txt"), 0, 1)


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


FORGETS = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' + (m['content'] if loop.last else '') }}"
    "{% endfor %}"
)


TRIMS = PLAIN.replace("m['content']", "m['content'] | trim")
USERS = PLAIN.replace("in messages", "in messages if m['role'] != 'function'")
CALLS = PLAIN.replace(
    "m['content'] +",
    "(m['tool_calls'] or [{}])[0]['function'] and m['tool_calls'][0]['function']['name'] }}"
    "{{ m['tool_calls'][0]['function']['arguments'] | tojson }}{{",
)
INSTEAD = PLAIN.replace(
    "m['content'] +",
    "((m['tool_calls'][0]['function'] | tojson) if m['tool_calls'] else m['content']) +",
)
ANSWERS = PLAIN.replace("m['content']", "m['content'].split('</think>')[-1]")
"""Templates that write nothing of what is not there, no functions, the first call alone, a call in
place of what is said beside it, and nothing that was thought."""


def called(arguments: Any) -> list[dict[str, Any]]:
    call = {"type": "function", "function": {"name": "weather_at", "arguments": arguments}}
    return [*messages_of([("user", "a")]), {"role": "assistant", "tool_calls": [call]}]


WEATHER = {"name": "weather_at", "arguments": {"city": "Oslo"}}


@pytest.mark.parametrize(
    ("template", "said", "lost"),
    [
        (INSTEAD, {"content": "Let me look at the weather."}, r"message 1, of 'assistant'"),
        (PLAIN, {"content": "weather_at Oslo"}, "the call of 'weather_at' in message 1, of"),
        (PLAIN, {"content": "", "function_call": WEATHER}, "the call of 'weather_at' in message"),
        (
            PLAIN.replace("m['content']", "m['content'][0]['text']"),
            {"content": [{"type": "text", "text": each} for each in ("the fox", "the")]},
            "message 1, of 'assistant'",
        ),
        (
            PLAIN.replace(
                "m['content'] +", "(m['function_call'] or {'name': m['content']})['name'] +"
            ),
            {"content": "", "function_call": {"name": "weather_at", "arguments": {"n": 5}}},
            "the arguments of the call of 'weather_at' in message 1, of 'assistant'",
        ),
        (PLAIN, {"content": "a", "reasoning_details": [{"text": "the fox"}]}, "'reasoning_details"),
        (ANSWERS, {"content": "<think>the fox\n</think>a"}, r"what was thought \(up to </think>\)"),
        (ANSWERS, {"content": "the fox <think>\n</think>a"}, "message 1, of 'assistant'"),
        (ANSWERS, {"content": "The tag `</think>` ends it."}, "message 1, of 'assistant'"),
    ],
)
def test_what_is_also_said_elsewhere_is_not_left_out(folder, template, said, lost) -> None:
    """The question has all words of what the template leaves out."""
    encoder = ChatEncoder(saved_chat_tokenizer(folder / "elsewhere", template), "messages")
    question = {"role": "user", "content": "Let me look at the weather. weather_at Oslo the fox"}
    if template in (INSTEAD, PLAIN) and "function_call" not in said and "reason" not in lost:
        said = said | {"tool_calls": [{"type": "function", "function": WEATHER}]}
    if isinstance(said["content"], list):
        question["content"] = [{"type": "text", "text": question["content"]}]
    with pytest.raises(ValueError, match=f"leaves out {lost}"):
        encoder.documents([row([question, {"role": "assistant", **said}])])


NUMBERED = PLAIN.replace(
    "m['content'] +",
    "(m['tool_calls'][0]['id'] + (m['tool_calls'][0]['function']['arguments'] | tojson)"
    " if m['tool_calls'] else m['content']) +",
)


def test_what_looks_as_if_it_were_left_out_or_written_wrongly_is_taken(folder) -> None:
    """A call by its number, as Kimi K2 writes it, and a result that repeats it as Python does."""
    encoder = ChatEncoder(saved_chat_tokenizer(folder / "numbered", NUMBERED), "messages")
    numbers = WEATHER | {"arguments": {"city": "Oslo", "n": 5}}
    call = {"id": "functions.weather_at:0", "type": "function", "function": numbers}
    chat = [
        {"role": "user", "content": "the fox"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "called with {'city': 'Oslo', 'n': 5}"},
        {"role": "assistant", "content": "jumps"},
    ]
    tools = "{% for t in tools or [] %}{{ t['name'] }}{% endfor %}"
    (document,) = encoder.documents([row(chat)])
    said = encoder._tokenizer.decode(document.tokens[document.mask])
    assert said.startswith('functions.weather_at:0{"city": "Oslo", "n": 5}')
    for nothing in ("", " ", "null", "[]"):
        assert encoder.documents([Row({"messages": chat, "tools": nothing}, Path("a.txt"), 0, 1)])
    # Tools of rows that differ in their fields are one text each in Parquet and JSON lines.
    encoder = ChatEncoder(saved_chat_tokenizer(folder / "text", tools + NUMBERED), "messages")
    given = Row({"messages": chat, "tools": '[{"name": "fox"}]'}, Path("a.txt"), 0, 1)
    assert len(encoder.documents([given])[0].tokens) > len(document.tokens)


def test_what_was_thought_before_the_last_question_may_be_left_out(folder) -> None:
    """As by Qwen3's template; one that does not know the field has no such design."""
    known = MARKED.replace(
        "m['content']", "(m.reasoning_content if loop.last else '') + m['content']"
    )
    thinks = {"role": "assistant", "content": "a", "reasoning_content": "since"}
    user = {"role": "user", "content": "b", "reasoning_content": ""}
    for template, refused in ((known, False), (MARKED, True)):
        encoder = ChatEncoder(saved_chat_tokenizer(folder / "early", template), "messages")
        chat = [user, thinks, user, {**thinks, "content": "<think>\n</think>c"}][
            : 3 if refused else 4
        ]
        if refused:
            with pytest.raises(ValueError, match="'reasoning_content' of message 1"):
                encoder.documents([row(chat)])
        else:
            assert encoder.documents([row(chat)])[0].mask.any()


@pytest.mark.parametrize("said", [{"system": "Be brief."}, {"functions": [{"name": "fox"}]}])
def test_what_a_row_says_beside_its_messages_is_not_left_out(folder, said) -> None:
    encoder = ChatEncoder(saved_chat_tokenizer(folder / "beside", PLAIN), "messages")
    messages = messages_of([("system", "Be brief."), ("user", "a"), ("assistant", "b")])
    if "system" in said:  # which is there
        assert encoder.documents([Row({"messages": messages} | said, Path("a.txt"), 0, 1)])[0]
    with pytest.raises(ValueError, match=rf"is not given the row's '{next(iter(said))}'"):
        encoder.documents([Row({"messages": messages[1:]} | said, Path("a.txt"), 0, 1)])


def test_what_is_written_as_json_or_cut_is_not_left_out(folder) -> None:
    encoder = ChatEncoder(saved_chat_tokenizer(folder / "json", CALLS), "messages")
    (document,) = encoder.documents([row(called({"city": "Oslo"}))])
    assert encoder._tokenizer.decode(document.tokens[document.mask]).startswith(
        'weather_at{"city": "Oslo"}'
    )
    template = PLAIN.replace("else %}{{ m['content']", "else %}{{ m['content'] | trim | tojson")
    encoder = ChatEncoder(saved_chat_tokenizer(folder / "json", template), "messages")
    chat = [("user", ' say "the fox"\n'), ("assistant", "jumps"), ("user", " "), ("assistant", "")]
    assert encoder.documents([row(messages_of(chat))])[0]


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


@pytest.mark.parametrize(
    ("template", "messages", "message"),
    [
        (PLAIN, "hello", r"'messages' is no list of messages, as in"),
        (PLAIN, [], r"'messages' is no list of messages, as in"),
        (
            PLAIN,
            [{"from": "human", "value": "a"}],
            r"message 0 has no role, but \['from', 'value'\]",
        ),
        (PLAIN, messages_of([("assistant", "a")]), r"begins with the assistant"),
        (
            PLAIN,
            [{"role": "system", "content": ["a"]}, {"role": "assistant", "content": "b"}],
            r"a.txt: the chat template refuses the chat",
        ),
        (
            TRIMS,
            [{"role": "user", "text": "a"}, {"role": "assistant", "text": "b"}],
            r"message 0, of 'user', has no text as content: {'role': 'user', 'text': 'a'}",
        ),
        (
            TRIMS,
            [{"role": "user", "content": "a"}, {"role": "assistant", "content": None}],
            r"message 1, of 'assistant', has no text as content",
        ),
        (
            TRIMS,
            [{"role": "user", "content": 5}, {"role": "assistant", "content": "b"}],
            r"message 0, of 'user', has no text as content",
        ),
        (
            USERS,
            messages_of([("user", "a"), ("function", "lots of rain"), ("assistant", "b")]),
            r"leaves out message 1, of 'function'",
        ),
        (
            PLAIN,
            [
                {"role": "user", "content": "a"},
                {"role": "assistant", "content": "b", "reasoning_content": "since"},
            ],
            r"leaves out 'reasoning_content' of message 1, of 'assistant'",
        ),
        (CALLS, called('{"city": "Oslo"}'), r'learned as "{\\"city\\": \\"Oslo\\"}"\. Give them'),
        (
            CALLS.replace(" | tojson", ""),
            called({"city": "Oslo"}),
            r"learned as {'city': 'Oslo'}\. Give them",
        ),
        (PLAIN, messages_of([("user", "\ud800")]), "half of a surrogate pair"),
        (
            FORGETS,
            messages_of([("user", "a"), ("assistant", "b"), ("user", "c")]),
            r"writes the first 2 otherwise than alone",
        ),
        (
            PLAIN,
            [{"role": "user", "content": "a"}, {"role": "assistant", "weight": 0.5}],
            r"message 1, of 'assistant', has weight=0.5",
        ),
        (
            TRIMS,
            [
                {"role": "user", "content": [{"type": "text", "text": "a"}]},
                {"role": "assistant", "content": "b"},
            ],
            r"knows no content in parts, and would have \[\{'type': 'text', 'text': 'a'\}\]",
        ),
        (
            PLAIN.replace("else %}{{ m['content']", "else %}{{ m['content'] | first"),
            [
                {"role": "user", "content": [{"type": "text", "text": "a"}]},
                {"role": "assistant", "content": "b"},
            ],
            r"knows no content in parts, and would have \{'type': 'text', 'text': 'a'\}",
        ),
        (
            PLAIN,
            [
                {"role": "user", "content": "a"},
                {
                    "role": "assistant",
                    "content": "",
                    "tool_calls": [{"type": "function", "function": {"name": "weather_at"}}],
                },
            ],
            r"leaves out the call of 'weather_at' in message 1, of 'assistant'",
        ),
        (PLAIN, [{"role": "user", "weight": 1}], r"message 0, of 'user', has weight=1"),
        (
            PLAIN,
            [{"role": "user", "content": "a"}, {"role": "assistant", "train": False}],
            r"message 1, of 'assistant', has train=False",
        ),
        (
            MARKED.replace("== 'assistant'", "== 'assistant' and loop.last"),
            [
                {"role": "user", "content": "a"},
                {"role": "assistant", "content": "b", "weight": 0},
                {"role": "user", "content": "c"},
                {"role": "assistant", "content": "d"},
            ],
            r"marks 1 parts for 2 messages of the assistant",
        ),
    ],
)
def test_chats_that_cannot_be_read_are_named(folder, template, messages, message) -> None:
    encoder = ChatEncoder(saved_chat_tokenizer(folder / "bad", template), "messages")
    with pytest.raises(ValueError, match=message):
        encoder.documents([row(messages)])


def test_templates_are_rendered_in_no_sandbox_that_they_get_out_of(folder):
    name = saved_chat_tokenizer(folder / "old", PLAIN)
    with (
        mock.patch("importlib.metadata.version", return_value="3.1.5"),
        pytest.raises(ValueError, match=r"not rendered: jinja2>=3\.1\.6 is required.*3\.1\.5"),
    ):
        ChatEncoder(str(name), "messages")


def test_tokenizers_without_a_template_are_refused(tmp_path) -> None:
    with pytest.raises(ValueError, match="is a tokenizers file, which has no chat template"):
        ChatEncoder(saved(tmp_path), "messages")
    with pytest.raises(ValueError, match=r"has no chat template\. Give one that has"):
        ChatEncoder(saved_chat_tokenizer(tmp_path / "model", None), "messages")
