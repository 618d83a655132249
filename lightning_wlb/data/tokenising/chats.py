"""Token numbers and masks of chats, by the chat template of a Hugging Face tokenizer.

A chat is a list of messages, ``[{"role": ..., "content": ...}, ...]``. Its text is what the
template makes of it, and only what the assistant said may be a target:

* A template with ``{% generation %}`` marks that by itself.
* Else an assistant's turn is found by rendering the chat twice: up to the turn, with the generation
  prompt, and including the turn. The turn is the text that the second has beyond the first: it
  begins after the prompt's header and ends with the end-of-turn token. Both texts must be
  beginnings of the whole chat's text: a template that writes earlier turns otherwise (leaving out
  what was thought, say) is refused.

A message of the assistant with ``"weight": 0`` is read and not learned: none of it is a target.
Whatever else a row says must be in the text: the chat is rendered once more with a word of its own
behind each message, thought, tool and call, and refused if one of them is not there. What the
template writes otherwise than JSON does is refused, too.

A token that spans a border belongs to what follows it. Nothing is added to what the template
writes, no end-of-document token either. Rows may have ``tools``, which the template is given.

Cost: two renderings of the template; without ``{% generation %}`` two more for each turn of the
assistant. The text is tokenised once.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from lightning_wlb.data.tokenising.sources import Row
from lightning_wlb.data.tokenising.texts import (
    Document,
    check_encodable,
    column_of,
    digest_of,
    explained,
    hugging_face_tokenizer,
    plain_vocabulary,
    tokenizer_file,
)
from lightning_wlb.file_checks import parse_json

Span = tuple[int, int]

_MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")
_WORD = re.compile(r", 'zq': 'zqzq\d+qz'|zq\d+qz")
_OTHER_WEIGHTS = (
    *("loss", "loss_mask", "loss_weight", "mask", "masked", "train", "trainable", "training"),
    *("train_on_turn", "train_detail", "training_detail"),
)
"""Names by which other programs' messages say whether they are learned."""
_THOUGHTS = (
    *("reasoning_content", "reasoning", "reasoning_details", "thinking", "thinking_blocks"),
    *("thought", "refusal"),
)
"""Names by which messages have more of the assistant's than its content, as what it thought."""
# transformers gives three of them as one another.
_KNOWS_THOUGHTS = re.compile(rf"['\".]({'|'.join(_THOUGHTS)})\b")
_BESIDE = "system", "system_prompt", "functions", "documents", "chat_template_kwargs"
"""Columns by which other programs' rows say more of a chat than its messages do."""


class ChatEncoder:
    """Makes documents of rows with chats, in any process; attributes as for ``TextEncoder``.

    Args:
        name: folder or name of a Hugging Face tokenizer with a chat template.
        column: the rows' column that holds the messages.

    Raises:
        ValueError: no such tokenizer, one without a chat template, or too old a Jinja.
    """

    masked = True

    def __init__(self, name: str, column: str) -> None:
        if tokenizer_file(name) is not None:
            raise ValueError(
                f"The tokenizer {name!r} is a tokenizers file, which has no chat template. Give the"
                " folder or name of a Hugging Face tokenizer that has one."
            )
        self._column, self._tokenizer = column, hugging_face_tokenizer(name)
        _check_sandbox()
        try:
            self._template = self._tokenizer.get_chat_template()
        except ValueError as error:
            raise ValueError(
                f"The tokenizer {name!r} has no chat template. Give one that has, such as that of"
                " an instruction-tuned model, or set its chat_template and save it."
            ) from error
        self._backend = self._tokenizer.backend_tokenizer
        definition = self._backend.to_str().encode()
        self.vocab_size, self.vocabulary = plain_vocabulary(self._backend, name)
        special = sorted(self._tokenizer.special_tokens_map.items())
        added = self._backend.get_added_tokens_decoder()
        self._stripping = [number for number, token in added.items() if token.rstrip]
        # Folders that were made without a look at what is left out are not gone on with.
        self.digest = digest_of(definition, self._tokenizer.chat_template, special, "marked")

    def documents(self, rows: Sequence[Row]) -> list[Document | None]:
        """Tokens and mask of each chat; None for one in which the assistant says nothing."""
        rendered = [self._rendered(row) for row in rows]
        with explained("The tokenizer fails at these chats"):
            encoded = self._backend.encode_batch(
                [text for text, _ in rendered], add_special_tokens=False
            )
        result: list[Document | None] = []
        for (text, spans), each in zip(rendered, encoded, strict=True):
            offsets = each.offsets
            # A token that takes the white space after it, as <|end|> may, ends before that.
            for at in np.flatnonzero(np.isin(each.ids, self._stripping)).tolist():
                start, stop = offsets[at]
                offsets[at] = start, start + len(text[start:stop].rstrip())
            mask = _mask(spans, offsets)
            result.append(Document(np.array(each.ids, np.int32), mask) if mask.any() else None)
        return result

    def describe(self) -> str:
        """How the assistant's part is found, in words."""
        how = "as the difference between the chat with and without each of its turns"
        if _MARKS.search(self._template):
            how = "as the chat template marks it"
        return (
            f"Targets are what the assistant says, {how}. Documents begin and end as the template"
            " writes them."
        )

    def _rendered(self, row: Row) -> tuple[str, list[Span]]:
        """The text of a chat, and the ranges of characters that the assistant said."""
        messages, learned = _messages(row, self._column)
        tools = row.record.get("tools")
        try:
            if isinstance(tools, str):  # as many rows have them, whose tools differ in their fields
                tools = parse_json(tools) if tools.strip() else None
            # A tokenizer may have a template of its own for chats with tools.
            template = self._tokenizer.get_chat_template(tools=tools)
            if _MARKS.search(template):
                text, spans = self._marked(messages, tools, template)
            else:
                text, spans = self._differences(messages, tools)
            if not all(learned):
                spans = _learned(spans, learned)
            self._check_written(messages, tools, template, text)
            _check_beside(row, text)
        except Exception as error:  # A template raises what it likes.
            raise ValueError(
                f"{row.place()}: the chat template refuses the chat: {error}"
            ) from error
        check_encodable(row, text)
        return text, spans

    def _check_written(
        self, messages: list[dict[str, Any]], tools: Any, template: str, text: str
    ) -> None:
        """Refuse a chat of which the template leaves something out, or writes it as no JSON."""
        messages, tools, words = _with_words(messages, tools, template, text)
        text = self._tokenizer.apply_chat_template(messages, tools=tools, tokenize=False)
        _check_in_json(messages, text)
        if lost := next((what for word, what in words.items() if word not in text), None):
            raise ValueError(
                f"it leaves out {lost}. Use a template that writes it; or put it where this one"
                " writes it (into the content, or into a message of another role), or remove it."
            )

    def _marked(
        self, messages: list[dict[str, Any]], tools: Any, template: str
    ) -> tuple[str, list[Span]]:
        # apply_chat_template makes masks of these spans, but leaves them out from the first one on
        # that begins with a space which the tokenizer's offsets do not count.
        from transformers.utils.chat_template_utils import render_jinja_template

        texts, spans = render_jinja_template(
            conversations=[messages],
            tools=tools,
            chat_template=template,
            return_assistant_tokens_mask=True,
            **self._tokenizer.special_tokens_map,
        )
        return texts[0], [(start, stop) for start, stop in spans[0]]

    def _differences(self, messages: list[dict[str, Any]], tools: Any) -> tuple[str, list[Span]]:
        def render(count: int, prompt: bool = False) -> str:
            return self._tokenizer.apply_chat_template(
                messages[:count], tools=tools, tokenize=False, add_generation_prompt=prompt
            )

        text, spans = render(len(messages)), []
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            if number == 0:
                raise ValueError(
                    "it begins with the assistant, so that there is no prompt to tell the"
                    " assistant's part from. Put a message of the system or the user before it, or"
                    " use a template with {% generation %}."
                )
            before, after = render(number, prompt=True), render(number + 1)
            if not (text.startswith(after) and after.startswith(before)):
                raise ValueError(
                    f"with more messages it writes the first {number + 1} otherwise than alone, so"
                    " that what the assistant said cannot be found. Use a template with"
                    " {% generation %} around it."
                )
            spans.append((len(before), len(after)))
        return text, spans


def _check_sandbox() -> None:
    """Refuse versions of Jinja out of whose sandbox a template gets, to run what it likes."""
    from transformers.utils.versions import require_version

    try:
        require_version("jinja2>=3.1.6")
    except ImportError as error:
        raise ValueError(
            f"Chat templates are not rendered: {str(error).partition(chr(10))[0]} In older ones a"
            " template can run any code: pip install 'jinja2>=3.1.6'."
        ) from error


def _mask(spans: list[Span], offsets: list[Span]) -> np.ndarray:
    """Whether each token is part of what the assistant said, bool [tokens].

    Spans and tokens (``offsets``) are ranges of characters of the chat's text.
    """
    # The end of a token decides: tokenizers may count the space before a word to it or not.
    ends = np.array([stop for _, stop in offsets], np.int64)
    starts, stops = np.sort(np.array(spans, np.int64).reshape(-1, 2), axis=0).T
    return np.searchsorted(starts, ends) > np.searchsorted(stops, ends)


def _check_in_json(messages: list[dict[str, Any]], text: str) -> None:
    """Refuse content, or arguments of a call, that the template has not written as JSON does.

    Both are with words (:func:`_with_words`), so that it is they, and nothing like them elsewhere.
    """
    calls = []
    for message in messages:
        content = message.get("content")
        parts = [content, *content] if isinstance(content, list) else [content]
        for part in parts:
            if part and isinstance(part, list | dict) and str(part) in text:
                raise ValueError(
                    f"it knows no content in parts, and would have {_WORD.sub('', str(part))[:80]}"
                    " learned. Put the text itself there, or use a template that reads parts."
                )
        calls += [*(message.get("tool_calls") or ()), message.get("function_call")]
    for each in calls:
        function = each.get("function", each) if isinstance(each, dict) else None
        arguments = function.get("arguments") if isinstance(function, dict) else None
        if isinstance(arguments, str):  # as OpenAI writes them
            wrong = {json.dumps(arguments, ensure_ascii=ascii) for ascii in (True, False)}
        else:
            wrong = {str(arguments)} - {json.dumps(arguments)}
        if found := [written for written in wrong if arguments and written in text]:
            raise ValueError(
                f"it would have the arguments of a call learned as {_WORD.sub('', found[0])[:80]}."
                " Give them as an object if it is a text that is encoded twice, and as a text if it"
                " is Python's."
            )


def _with_words(
    messages: list[dict[str, Any]], tools: Any, template: str, text: str
) -> tuple[list[dict[str, Any]], Any, dict[str, str]]:
    """A chat with a word of its own behind each of its texts, by which to see what is written.

    What was thought before the last question, which many templates leave out by design, has none
    if the template knows of it; nor has a tool's name that is in the ``text`` by its call's number.

    Returns:
        The messages and tools with the words, and word -> what it stands behind.
    """
    words: dict[str, str] = {}

    def mark(value: Any, what: str) -> Any:
        if isinstance(value, list):
            return [mark(each, what) for each in value]
        if isinstance(value, dict):
            return {key: each if key == "type" else mark(each, what) for key, each in value.items()}
        if not isinstance(value, str) or not value.strip():
            return value
        word = f"zq{len(words)}qz"
        words[word] = what
        return value + word

    def mark_function(given: Any, what: str, where: str = "", number: Any = None) -> Any:
        if not isinstance(given, dict):
            return given
        number = str(given.get("id") or number or "")
        if "function" in given:
            return given | {"function": mark_function(given["function"], what, where, number)}
        what = f"{what} {given.get('name')!r:.80}{where}"
        inside = {"name": what, "arguments": f"the arguments of {what}"}
        if isinstance(given.get("arguments"), dict) and given["arguments"]:
            # Numbers take no word: one more argument does, which is written with them.
            given = given | {"arguments": given["arguments"] | {"zq": "zq"}}
        if number and str(given.get("name")) in number and number in text:  # Kimi K2's
            del inside["name"]
        return given | {key: mark(given[key], inside[key]) for key in inside if key in given}

    asked = max((n for n, each in enumerate(messages) if each["role"] == "user"), default=-1)
    marked = []
    for number, message in enumerate(messages):
        where, each = f"message {number}, of {message['role']!r}", dict(message)
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
                each[name] = mark(each[name], f"{name!r} of {where}")
        place = "the call of", f" in {where}"
        if isinstance(calls := each.get("tool_calls"), list):
            each["tool_calls"] = [mark_function(one, *place) for one in calls]
        if "function_call" in each:
            each["function_call"] = mark_function(each["function_call"], *place)
        marked.append(each)
    if isinstance(tools, list):
        tools = [mark_function(each, "the tool") for each in tools]
    return marked, tools, words


def _check_beside(row: Row, text: str) -> None:
    """Refuse a row that says more of a chat in columns which no template is given."""
    for name in _BESIDE:
        said = row.record.get(name)
        if said and not (isinstance(said, str) and said.strip() in text):
            raise ValueError(
                f"it is not given the row's {name!r}. Put that into the messages (functions into"
                " 'tools'), or remove the column."
            )


def _learned(spans: list[Span], learned: list[bool]) -> list[Span]:
    """The spans of the assistant's messages that are learned."""
    if len(spans) != len(learned):
        raise ValueError(
            f"it marks {len(spans)} parts for {len(learned)} messages of the assistant, so that"
            " those of weight 0 cannot be told from the others. Use a template that marks each"
            " message once."
        )
    return [span for span, counts in zip(spans, learned, strict=True) if counts]


def _messages(row: Row, column: str) -> tuple[list[dict[str, Any]], list[bool]]:
    """A chat's messages as templates are given them, and which of the assistant's are learned."""
    messages = column_of(row, column)
    wanted = '[{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]'
    if not isinstance(messages, list) or not messages:
        raise ValueError(f"{row.place()}: {column!r} is no list of messages, as in {wanted}.")
    plain, learned = [], []
    for number, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            keys = list(message) if isinstance(message, dict) else type(message).__name__
            raise ValueError(
                f"{row.place()}: message {number} has no role, but {keys}. Write the chat as"
                f" {wanted}."
            )
        given = {name: value for name, value in message.items() if value is not None}
        speaks = given["role"] == "assistant"
        weight = given.pop("weight", speaks)
        kinds = int | float | list | dict
        others = [name for name in _OTHER_WEIGHTS if isinstance(given.get(name), kinds)]
        if others or weight not in (0, 1) or (weight and not speaks):
            said = f"{others[0]}={given[others[0]]!r}" if others else f"weight={weight!r}"
            raise ValueError(
                f"{row.place()}: message {number}, of {given['role']!r}, has {said}. What the"
                ' assistant says is learned, unless it has "weight": 0; other roles are not, and'
                " nothing counts by another weight or name. Mend or remove it."
            )
        content, calls = given.get("content"), given.get("tool_calls", given.get("function_call"))
        if not (isinstance(content, str | list | dict) or (content is None and calls)):
            raise ValueError(
                f"{row.place()}: message {number}, of {given['role']!r}, has no text as content:"
                f" {str(given)[:80]}. Write the chat as {wanted}."
            )
        plain.append(given)
        learned += [bool(weight)] if speaks else []
    return plain, learned
