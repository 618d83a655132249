"""Checks that a chat template writes everything that a chat says, in valid JSON.

A template ignores the parts of a message that it does not know, so that a model would learn an
empty answer instead of a call, or an answer to something nobody said. So the chat is rendered once
more with a unique word after each of its texts (:func:`with_words`), and all words must be in the
result (:func:`check_written`). These rows are refused earlier: rows that are no chats, rows with
other fields that may say what is learned, and rows in which a table has put nulls
(:func:`messages_of`, :func:`check_nulls`). Templates that mark the learned text where it cannot be
located are refused too (:func:`marks_speech`).

Cost: one rendering of the template.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import cache
from itertools import chain
from typing import Any

from lightning_wlb.data.tokenising.sources import Row
from lightning_wlb.data.tokenising.texts import column_of

_PLAIN_WORD = re.compile(r"zq\d+qz")
_WORD = re.compile(r", 'zq': 'zqzq\d+qz'|zq\d+qz")
_MAY_BE_WEIGHT = re.compile(r"mask|loss|weight|(?<![a-z])train|learn|ignore", re.I)
"""Fields by which other programs' messages say whether they are learned."""
_MAY_BE_SAID = re.compile(
    r"(.*_)?(calls?|functions?|tools|plan|documents|context|attachments|images?|audios?|videos?)"
)
"""Fields with further text in other programs' messages; calls get their words separately."""
_THOUGHTS = (
    *("reasoning_content", "reasoning", "reasoning_details", "thinking", "thinking_blocks"),
    *("thought", "refusal"),
)
"""Fields with the assistant's thoughts, besides its content."""
# transformers treats three of them as the same.
_KNOWS_THOUGHTS = re.compile(rf"['\".]({'|'.join(_THOUGHTS)})\b")
_BESIDE = (
    *("system", "system_prompt", "functions", "documents", "chat_template_kwargs"),
    *("image", "images", "audio", "audios", "video", "videos"),
)
"""Columns with further data of a chat in other programs' rows."""


def messages_of(row: Row, column: str) -> tuple[list[dict[str, Any]], list[bool]]:
    """A chat's messages for the template, and which of the assistant's messages are learned."""
    messages = column_of(row, column)
    wanted = '[{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]'
    if not isinstance(messages, list) or not messages:
        raise ValueError(f"{row.place()}: {column!r} is no list of messages, as in {wanted}.")
    plain, learned = [], []
    for number, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            keys = list(message) if isinstance(message, dict) else type(message).__name__
            raise ValueError(
                f"{row.place()}: message {number} has no role, but {keys}. Write it as {wanted}."
            )
        given = {
            name: value
            for name, value in message.items()
            # Empty calls and thoughts are left out: templates test only whether a field exists.
            if value or (value is not None and name not in ("tool_calls", *_THOUGHTS))
        }
        speaks = given["role"] == "assistant"
        weight = given.pop("weight", speaks)
        where = f"{row.place()}: message {number}, of {given['role']!r:.80},"
        kinds = int | float | list | dict
        others = [
            name
            for name, value in given.items()
            if isinstance(value, kinds) and _MAY_BE_WEIGHT.search(name)
        ]
        if others or weight not in (0, 1) or (weight and not speaks):
            said = f"{others[0]}={given[others[0]]!r}" if others else f"weight={weight!r}"
            raise ValueError(
                f"{where} has {said}. What the assistant says is learned, unless it has"
                ' "weight": 0; other roles are not, and no other weights or fields decide that.'
                " Mend or remove it."
            )
        content, calls = given.get("content"), given.get("tool_calls", given.get("function_call"))
        if not (isinstance(content, str | list | dict) or (content is None and calls)):
            raise ValueError(
                f"{where} has no text as content: {str(given)[:80]}. Write the chat as {wanted}."
            )
        for part in content if isinstance(content, list) else ():
            if not isinstance(part, dict) or part.get("type", "text") == "text":
                continue
            values = [value for name, value in part.items() if name not in ("type", "id") and value]
            if not any(isinstance(value, str | list | dict) for value in values):
                raise ValueError(
                    f"{where} has a part that is no text: {part!r:.80}. Remove the row: models of"
                    " texts alone are trained."
                )
        several, one = given.get("tool_calls") or [], given.get("function_call") or {}
        if not (isinstance(several, list) and all(isinstance(c, dict) for c in [*several, one])):
            raise ValueError(
                f"{where} has calls that no template reads: {several or one!r:.80}. Write"
                ' "tool_calls": [{"function": {"name": "...", "arguments": {...}}}].'
            )
        plain.append(given)
        learned += [bool(weight)] if speaks else []
    return plain, learned


def check_nulls(messages: list[dict[str, Any]], tools: Any) -> None:
    """Refuse nulls in tools and calls, which tables put into rows without some field.

    Raises:
        ValueError: a null in a tool, or in an argument that the tool does not declare as nullable.
    """
    parameters: dict[Any, dict[str, bool]] = {}  # whether each may be null
    for tool in tools if isinstance(tools, list) else ():
        function = tool.get("function", tool) if isinstance(tool, dict) else None
        if null := next(_nulls(tool), None):
            raise ValueError(
                f"it would write null as {null} of the tool {str(tool)[:80]}. Remove it, or give"
                " the tools as one text of JSON: in a table all of them have all fields."
            )
        if isinstance(function, dict) and isinstance(function.get("parameters"), dict):
            known = function["parameters"].get("properties")
            known = known if isinstance(known, dict) else {}
            nullable = {name: "null" in json.dumps(each).lower() for name, each in known.items()}
            parameters[function.get("name")] = nullable
    calls = [[*(each.get("tool_calls") or ()), each.get("function_call")] for each in messages]
    for call in chain.from_iterable(calls):
        function = call.get("function", call) if isinstance(call, dict) else None
        function = function if isinstance(function, dict) else {}
        nullable, arguments = parameters.get(function.get("name"), {}), function.get("arguments")
        for name, value in arguments.items() if isinstance(arguments, dict) else ():
            null = name if value is None else next(_nulls(value), None)
            if null and not nullable.get(name):
                raise ValueError(
                    f"it would write null as the argument {null!r} of the call of"
                    f" {function.get('name')!r}. Remove it (in a table all calls have all"
                    ' arguments); or, if it is meant, let "tools" say that it may be: "type":'
                    ' ["string", "null"].'
                )


def _nulls(value: Any) -> Iterator[str]:
    """Keys of dictionaries whose value is null, except defaults."""
    if isinstance(value, dict):
        for name, each in value.items():
            if each is None and name not in ("default", "const"):
                yield str(name)
            yield from _nulls(each)
    elif isinstance(value, list):
        for each in value:
            yield from _nulls(each)


@cache
def marks_speech(template: str) -> bool:
    """Whether a template marks the learned text by ``{% generation %}``.

    Raises:
        ValueError: the mark is in a macro or similar block, or the text is not a template.
    """
    import jinja2
    from jinja2 import ext, nodes

    class Marks(ext.Extension):
        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body).set_lineno(line)

    try:
        tree = jinja2.Environment(extensions=[Marks, ext.loopcontrols]).parse(template)
    except jinja2.TemplateSyntaxError as error:
        raise ValueError(f"the chat template is none: line {error.lineno}: {error}") from error
    buffered = (nodes.Macro, nodes.CallBlock, nodes.AssignBlock, nodes.FilterBlock)
    for kind in (*buffered, nodes.For):
        for block in tree.find_all(kind):
            counts = block.recursive if isinstance(block, nodes.For) else True
            if counts and (marks := block.find(nodes.Scope)):
                raise ValueError(
                    f"{{% generation %}} in line {marks.lineno} of the chat template is in a"
                    " macro, a call, a filter, a {% set %} block or a recursive loop, where what"
                    " is learned would be sought elsewhere. Put it around what writes the answer:"
                    " {% generation %}{{ turn(message) }}{% endgeneration %}."
                )
    return tree.find(nodes.Scope) is not None


def with_words(
    messages: list[dict[str, Any]], tools: Any, template: str, text: str
) -> tuple[list[dict[str, Any]], Any, dict[str, str]]:
    """A chat with a unique word after each of its texts, to see which texts a template writes.

    Thoughts before the last question get no word if the template knows them, since many omit these.
    A tool's name gets none if ``text`` has its call's id, which contains the name.

    Returns:
        The messages and tools with the words, and for each word a description of its text.
    """
    words: dict[str, str] = {}

    def mark(value: Any, what: str) -> Any:
        if isinstance(value, list):
            return [mark(each, what) for each in value]
        if isinstance(value, dict):
            plain = "type", "id"
            return {key: each if key in plain else mark(each, what) for key, each in value.items()}
        if not isinstance(value, str) or not value.strip():
            return value
        word = f"zq{len(words)}qz"
        words[word] = what
        return value + word

    @cache
    def ids() -> set[str]:
        return set(re.findall(r"[^\s\"'<>|{}()\[\],=]+", text))

    def mark_function(given: Any, what: str, where: str = "", number: Any = None) -> Any:
        if not isinstance(given, dict):
            return given
        number = str(given.get("id") or number or "")
        if "function" in given:
            return given | {"function": mark_function(given["function"], what, where, number)}
        if "name" not in given:
            return mark(given, what + where)
        what = f"{what} {given.get('name')!r:.80}{where}"
        inside = {"name": what, "arguments": f"the arguments of {what}"}
        if isinstance(given.get("arguments"), dict) and given["arguments"]:
            # Numbers cannot have a word, so one more argument gets it, which is written with them.
            given = given | {"arguments": given["arguments"] | {"zq": "zq"}}
        if number and str(given.get("name")) in number and number in ids():  # Kimi K2's
            del inside["name"]
        return given | {key: mark(given[key], inside[key]) for key in inside if key in given}

    asked = max((n for n, each in enumerate(messages) if each["role"] == "user"), default=-1)
    marked = []
    for number, message in enumerate(messages):
        where, each = f"message {number}, of {message['role']!r:.80}", dict(message)
        content = each.get("content")
        if isinstance(content, str):
            head, end, after = content.rpartition("</think>")
            before, start, thought = head.partition("<think>")
            if number > asked:
                thought = mark(thought, f"what was thought (up to </think>) in {where}")
            each["content"] = mark(before, where) + start + thought + end + mark(after, where)
        elif content:
            each["content"] = mark(content, where)
        for name in _THOUGHTS:
            if name in each and (number > asked or not _KNOWS_THOUGHTS.search(template)):
                each[name] = mark(each[name], f"{name!r:.80} of {where}")
        for name in filter(_MAY_BE_SAID.fullmatch, each.keys() - {"tool_calls", "function_call"}):
            each[name] = mark(each[name], f"{name!r:.80} of {where}")
        place = "the call of", f" in {where}"
        if isinstance(calls := each.get("tool_calls"), list):
            each["tool_calls"] = [mark_function(one, *place) for one in calls]
        if "function_call" in each:
            each["function_call"] = mark_function(each["function_call"], *place)
        marked.append(each)
    if isinstance(tools, list):
        tools = [mark_function(each, "the tool") for each in tools]
    return marked, tools, words


def check_written(messages: list[dict[str, Any]], words: dict[str, str], text: str) -> None:
    """Refuse a chat if the template leaves a text out, or does not write it as JSON.

    ``messages`` and ``words`` are the results of :func:`with_words`; ``text`` is the rendered chat.

    Raises:
        ValueError: names the text that is left out or written differently, with the remedy.
    """
    places: dict[str, list[int]] = {}  # one pass: 10,000 separate searches would take hours
    for found in _PLAIN_WORD.finditer(text):
        places.setdefault(found[0], []).append(found.start())
    _check_in_json(messages, text, places)
    if lost := next((what for word, what in words.items() if word not in places), None):
        raise ValueError(
            f"it leaves out {lost}. Use a template that writes it; or put it where this one"
            " writes it (into the content, or into a message of another role), or remove it."
        )


def _check_in_json(messages: list[dict[str, Any]], text: str, places: dict[str, list[int]]) -> None:
    """Refuse content, or arguments of a call, that the template has not written as JSON.

    Both contain words (:func:`with_words`), so that similar text elsewhere is not mistaken for
    them; ``places`` has the positions of the words in ``text``.
    """

    def stands(written: str) -> bool:
        word = _PLAIN_WORD.search(written)
        found = places.get(word[0], ()) if word else ()
        return any(text.startswith(written, at - word.start()) for at in found if word)

    calls = []
    for message in messages:
        content = message.get("content")
        parts = [content, *content] if isinstance(content, list) else [content]
        for part in parts:
            if part and isinstance(part, list | dict) and stands(str(part)):
                raise ValueError(
                    f"it knows no content in parts, and would have {_WORD.sub('', str(part))[:80]}"
                    " learned. Put the text itself there, or use a template that reads parts."
                )
        calls += [*(message.get("tool_calls") or ()), message.get("function_call")]
    for each in calls:
        function = each.get("function", each) if isinstance(each, dict) else None
        arguments = function.get("arguments") if isinstance(function, dict) else None
        if isinstance(arguments, str):  # OpenAI's format
            wrong = {json.dumps(arguments, ensure_ascii=ascii) for ascii in (True, False)}
        else:
            wrong = {str(arguments)} - {json.dumps(arguments)}
        if found := [written for written in wrong if arguments and stands(written)]:
            raise ValueError(
                f"it would have the arguments of a call learned as {_WORD.sub('', found[0])[:80]}."
                " Give them as an object if it is a text that is encoded twice, and as a text if it"
                " is Python's."
            )


def check_beside(row: Row, text: str) -> None:
    """Refuse a row with further data of the chat in columns that templates do not get."""
    for name in _BESIDE:
        said = row.record.get(name)
        if isinstance(said, str):
            said = "" if said.strip() in ("[]", "{}") or said.strip() in text else said
        if said and not (isinstance(said, dict) and {*map(str, said.values())} <= {"None"}):
            raise ValueError(
                f"it is not given the row's {name!r}. Put that into the messages (functions into"
                " 'tools'), or remove the column."
            )
