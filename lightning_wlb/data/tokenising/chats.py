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

A token that spans a border belongs to what follows it. Nothing is added to what the template
writes, no end-of-document token either. Rows may have ``tools``, which the template is given.

Cost: without ``{% generation %}`` two renderings of the template for each turn of the assistant;
the text is tokenised once.
"""

from __future__ import annotations

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

Span = tuple[int, int]

_MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")
_OTHER_WEIGHTS = "loss", "loss_weight", "mask", "train", "trainable", "training"
"""Names by which other programs' messages say whether they are learned."""


class ChatEncoder:
    """Makes documents of rows with chats, in any process; attributes as for ``TextEncoder``.

    Args:
        name: folder or name of a Hugging Face tokenizer with a chat template.
        column: the rows' column that holds the messages.

    Raises:
        ValueError: no such tokenizer, or one without a chat template.
    """

    masked = True

    def __init__(self, name: str, column: str) -> None:
        if tokenizer_file(name) is not None:
            raise ValueError(
                f"The tokenizer {name!r} is a tokenizers file, which has no chat template. Give the"
                " folder or name of a Hugging Face tokenizer that has one."
            )
        self._column, self._tokenizer = column, hugging_face_tokenizer(name)
        try:
            self._template = self._tokenizer.get_chat_template()
        except ValueError as error:
            raise ValueError(
                f"The tokenizer {name!r} has no chat template. Give one that has, such as that of"
                " an instruction-tuned model, or set its chat_template and save it."
            ) from error
        self._backend = self._tokenizer.backend_tokenizer
        definition = self._backend.to_str().encode()
        self.vocab_size = plain_vocabulary(self._backend, name)
        special = sorted(self._tokenizer.special_tokens_map.items())
        # Folders that were made without a look at weights are not gone on with.
        self.digest = digest_of(definition, self._tokenizer.chat_template, special, "weight")

    def documents(self, rows: Sequence[Row]) -> list[Document | None]:
        """Tokens and mask of each chat; None for one in which the assistant says nothing."""
        rendered = [self._rendered(row) for row in rows]
        with explained("The tokenizer fails at these chats"):
            encoded = self._backend.encode_batch(
                [text for text, _ in rendered], add_special_tokens=False
            )
        result: list[Document | None] = []
        for (_, spans), each in zip(rendered, encoded, strict=True):
            mask = _mask(spans, each.offsets)
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
            # A tokenizer may have a template of its own for chats with tools.
            if _MARKS.search(self._tokenizer.get_chat_template(tools=tools)):
                text, spans = self._marked(messages, tools)
            else:
                text, spans = self._differences(messages, tools)
            if not all(learned):
                spans = _learned(spans, learned)
            _check_written(messages, tools, text)
        except Exception as error:  # A template raises what it likes.
            raise ValueError(
                f"{row.place()}: the chat template refuses the chat: {error}"
            ) from error
        check_encodable(row, text)
        return text, spans

    def _marked(self, messages: list[dict[str, Any]], tools: Any) -> tuple[str, list[Span]]:
        # apply_chat_template makes masks of these spans, but leaves them out from the first one on
        # that begins with a space which the tokenizer's offsets do not count.
        from transformers.utils.chat_template_utils import render_jinja_template

        template = self._tokenizer.get_chat_template(tools=tools)
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


def _mask(spans: list[Span], offsets: list[Span]) -> np.ndarray:
    """Whether each token is part of what the assistant said, bool [tokens].

    Spans and tokens (``offsets``) are ranges of characters of the chat's text.
    """
    # The end of a token decides: tokenizers may count the space before a word to it or not.
    ends = np.array([stop for _, stop in offsets], np.int64)
    starts, stops = np.sort(np.array(spans, np.int64).reshape(-1, 2), axis=0).T
    return np.searchsorted(starts, ends) > np.searchsorted(stops, ends)


def _check_written(messages: list[dict[str, Any]], tools: Any, text: str) -> None:
    """Refuse what the template has left out, or has written as Python writes a list."""
    functions = list(tools or ())
    for message in messages:
        content = message.get("content")
        if content and isinstance(content, list | dict) and str(content) in text:
            raise ValueError(
                f"it knows no content in parts, and would have {str(content)[:80]} learned. Put the"
                " text itself there, or use a template that reads parts."
            )
        functions += [*(message.get("tool_calls") or ()), message.get("function_call")]
    for each in functions:
        function = each.get("function", each) if isinstance(each, dict) else each
        name = function.get("name") if isinstance(function, dict) else None
        if isinstance(name, str) and name not in text:
            raise ValueError(
                f"it leaves out the tool {name[:80]!r}, so that an answer which calls it would be"
                " learned without the call, or without its description. Use a template that knows"
                " tools (tool_calls, tools), or take them out of the chat."
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
        others = [name for name in _OTHER_WEIGHTS if isinstance(given.get(name), int | float)]
        if others or weight not in (0, 1) or (weight and not speaks):
            said = f"{others[0]}={given[others[0]]!r}" if others else f"weight={weight!r}"
            raise ValueError(
                f"{row.place()}: message {number}, of {given['role']!r}, has {said}. What the"
                ' assistant says is learned, unless it has "weight": 0; other roles are not, and'
                " nothing counts by another weight or name. Mend or remove it."
            )
        plain.append(given)
        learned += [bool(weight)] if speaks else []
    return plain, learned
