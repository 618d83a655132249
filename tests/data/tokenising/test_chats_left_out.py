"""What a template leaves out of a chat, or writes wrongly, is refused; and nothing else."""

from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from lightning_wlb.data.tokenising import chats
from lightning_wlb.data.tokenising.chats import ChatEncoder
from lightning_wlb.data.tokenising.sources import Row
from tests.data.tokenising.support import MARKED, PLAIN, messages_of, row, saved_chat_tokenizer

pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("chats")


FORGETS = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] }}"
    "{{ '!' if loop.last else '' }}{% endfor %}"
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


@pytest.mark.parametrize(("template", "most"), [(PLAIN, "COMPARED"), (MARKED, "MARKED")])
def test_a_chat_of_too_many_messages_is_refused(folder, monkeypatch, template, most) -> None:
    """A kilobyte of compressed text may hold thousands, and take minutes."""
    encoder = ChatEncoder(saved_chat_tokenizer(folder, template), "messages")
    monkeypatch.setattr(chats, f"MOST_{most}", 4)
    long = messages_of([("user", "a"), ("assistant", "the")] * 2)
    assert encoder.documents([row(long)])[0] is not None
    with pytest.raises(ValueError, match=r"it has 6 messages, of which more than 4 would take min"):
        encoder.documents([row([*long, *long[:2]])])


def called(arguments: Any) -> list[dict[str, Any]]:
    call = {"type": "function", "function": {"name": "weather_at", "arguments": arguments}}
    return [*messages_of([("user", "a")]), {"role": "assistant", "tool_calls": [call]}]


CALLER = {"role": "assistant", "content": ""}
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


@pytest.mark.parametrize("name", ["function_calls", "functions", "tools", "tool_plan"])
def test_what_a_message_says_by_another_name_is_written_or_refused(folder, name) -> None:
    """As OLMo's and Phi's templates have calls and tools, as a text or as objects."""
    knows = PLAIN.replace("m['content'] +", f"m['{name}'] | string +")
    for value in ("weather_at()", [{"name": "weather_at"}]):
        chat = [*messages_of([("user", "a")]), CALLER | {name: value}]
        for template in (PLAIN, knows):
            encoder = ChatEncoder(saved_chat_tokenizer(folder / "names", template), "messages")
            if template == knows:
                assert encoder.documents([row(chat)])[0].mask.any()
                continue
            with pytest.raises(
                ValueError, match=f"leaves out '{name}' of message 1, of 'assistant'"
            ):
                encoder.documents([row(chat)])


def test_calls_without_a_name_are_not_left_out(folder) -> None:
    encoder = ChatEncoder(saved_chat_tokenizer(folder / "nameless", PLAIN), "messages")
    call = {"id": "1", "type": "custom", "custom": {"input": "Oslo"}}
    for where in ({"tool_calls": [call]}, {"function_call": {"fn": "weather_at"}}):
        with pytest.raises(ValueError, match="leaves out the call of in message 1"):
            encoder.documents([row([*messages_of([("user", "a")]), CALLER | where])])


@pytest.mark.parametrize(
    "said",
    [{"system": "Be brief."}, {"functions": [{"name": "fox"}]}, {"images": ["cat.png"]}],
)
def test_what_a_row_says_beside_its_messages_is_not_left_out(folder, said) -> None:
    encoder = ChatEncoder(saved_chat_tokenizer(folder / "beside", PLAIN), "messages")
    messages = messages_of([("system", "Be brief."), ("user", "a"), ("assistant", "b")])
    if "system" in said:  # which is there
        assert encoder.documents([Row({"messages": messages} | said, Path("a.txt"), 0, 1)])[0]
    for empty in ([], "[]", "{}", {"enable_thinking": None}):
        nothing = {"messages": messages, "chat_template_kwargs": empty, next(iter(said)): empty}
        assert encoder.documents([Row(nothing, Path("a.txt"), 0, 1)])[0]
    with pytest.raises(ValueError, match=rf"is not given the row's '{next(iter(said))}'"):
        encoder.documents([Row({"messages": messages[1:]} | said, Path("a.txt"), 0, 1)])


READS_PARTS = PLAIN.replace(
    "{{ m['content'] }}",
    "{% for p in m['content'] %}{{ '<s>' if p['type'] != 'text' else p['text'] }}{% endfor %}",
)


@pytest.mark.parametrize(
    "part", [{"type": "image"}, {"type": "audio", "text": None}, {"type": "image", "index": 0}]
)
def test_parts_that_are_no_text_are_refused(folder, part) -> None:
    """Gemma 3's template writes a sign where an image would be, and nothing for sounds."""
    encoder = ChatEncoder(saved_chat_tokenizer(folder / "parts", READS_PARTS), "messages")
    text, answer = {"type": "text", "text": "the fox"}, {"role": "assistant", "content": "a"}
    assert encoder.documents([row([{"role": "user", "content": [text]}, answer])])[0].mask.any()
    with pytest.raises(ValueError, match="message 0, of 'user', has a part that is no text: "):
        encoder.documents([row([{"role": "user", "content": [part, text]}, answer])])


def test_nulls_that_a_table_puts_into_calls_and_tools_are_refused(folder) -> None:
    """As the datasets library fills rows whose tools and arguments differ."""
    tools = "{{ tools | tojson if tools }}"
    encoder = ChatEncoder(saved_chat_tokenizer(folder / "nulls", tools + CALLS), "messages")

    def documents(arguments: dict[str, Any], **properties: Any) -> Any:
        parameters = {"type": "object", "properties": properties}
        tool = {"type": "function", "function": {"name": "weather_at", "parameters": parameters}}
        record = {"messages": called(arguments), "tools": [tool] if properties else None}
        return encoder.documents([Row(record, Path("a.txt"), 0, 1)])[0]

    text = {"type": "string"}
    may = {"type": ["string", "null"], "default": None}
    assert documents({"city": "Oslo", "tz": None}, city=text, tz=may).mask.any()
    for properties in ({}, {"city": text}, {"city": text, "tz": text}):
        with pytest.raises(ValueError, match="null as the argument 'tz' of the call of 'weather_a"):
            documents({"city": "Oslo", "tz": None}, **properties)
    with pytest.raises(ValueError, match="null as the argument 'at' of the call"):
        documents({"city": {"at": None}}, city={"type": "object"})
    with pytest.raises(ValueError, match="null as tz of the tool "):
        documents({"city": "Oslo"}, city=text, tz=None)


def test_many_parts_take_time_in_proportion(folder) -> None:
    """Each was looked for in the whole text: 40,000 took 22 s, and a row of 256 MB days."""
    encoder = ChatEncoder(saved_chat_tokenizer(folder / "parts", READS_PARTS), "messages")
    searches = []

    class Text(str):
        def __contains__(self, part: object) -> bool:
            searches.append(part)
            return super().__contains__(part)

    with mock.patch.object(
        encoder, "_render", lambda *given, made=encoder._render, **more: Text(made(*given, **more))
    ):
        parts = [{"type": "text", "text": f"fox {number}"} for number in range(100)]
        chat = [{"role": "user", "content": parts}, {"role": "assistant", "content": "a"}]
        assert encoder.documents([row(chat)])[0].mask.any()
    assert len(searches) < 10


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
        *(
            (
                CALLS,
                [CALLER | {name: calls}],
                f"message 0, of 'assistant', has calls that no .*{at}",
            )
            for name, calls, at in (
                ("tool_calls", '[{"name": "f", "arguments": {}}]', "'.*f.*'"),
                ("tool_calls", {"name": "f"}, "{'name': 'f'}"),
                ("tool_calls", ["f"], r"\['f'\]"),
                ("function_call", '{"name": "f"}', "f"),
            )
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
            PLAIN,
            [{"role": "user", "content": "a"}, CALLER | {"is_masked": True}],
            r"message 1, of 'assistant', has is_masked=True",
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
