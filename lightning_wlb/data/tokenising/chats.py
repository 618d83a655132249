"""Token numbers and masks of chats, by the chat template of a Hugging Face tokenizer.

A chat is a list of messages, ``[{"role": ..., "content": ...}, ...]``. The template renders its
text, and only the assistant's text may be a target:

* A template with ``{% generation %}`` marks that text itself. It is refused if the mark is where
  transformers counts characters from another beginning, as in a macro.
* Else an assistant's turn is found by rendering the chat twice: up to the turn, with the generation
  prompt, and including the turn. The turn is the part of the second text after the first text: it
  begins after the prompt's header and ends with the end-of-turn token. Both texts must be
  beginnings of the whole chat's text: a template that rewrites earlier turns is refused.

A message of the assistant with ``"weight": 0`` is not learned: none of its tokens is a target.
Everything else that a row says must be in the text: the chat is rendered once more with a unique
word after each message, thought, tool and call, and refused if a word is missing. Calls and parts
that the template does not write as JSON are refused too.

A token that spans a border belongs to the text after the border. Nothing is added to the rendered
text, not even an end-of-document token. Rows may have ``tools``, which the template gets.

Cost: two renderings of the template; without ``{% generation %}`` two more per assistant's turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from os.path import commonprefix
from typing import Any

import numpy as np

from lightning_wlb.data.tokenising.chat_checks import (
    check_beside,
    check_nulls,
    check_written,
    marks_speech,
    messages_of,
    with_words,
)
from lightning_wlb.data.tokenising.sources import Row
from lightning_wlb.data.tokenising.texts import (
    Document,
    check_encodable,
    digest_of,
    explained,
    hugging_face_tokenizer,
    plain_vocabulary,
    tokenizer_file,
)
from lightning_wlb.file_checks import parse_json

Span = tuple[int, int]

MOST_COMPARED, MOST_MARKED, MOST_WRITTEN = 4_000, 40_000, 1 << 31
"""Most messages of a chat under a template without and with ``{% generation %}``: the time in which
the assistant's parts are found grows by their square. Most messages times letters without it."""


class ChatEncoder:
    """Makes documents from rows with chats, in any process; attributes as for ``TextEncoder``.

    Args:
        name: folder or name of a Hugging Face tokenizer with a chat template.
        column: the rows' column that holds the messages.

    Raises:
        ValueError: no such tokenizer, a tokenizer without a chat template, or too old a Jinja.
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
        self._marks = marks_speech(self._template)
        self._backend = self._tokenizer.backend_tokenizer
        if self._backend.encode_special_tokens:
            raise ValueError(
                f"The tokenizer {name!r} divides special tokens (split_special_tokens), those that"
                " its chat template writes among them. Set it to false in tokenizer_config.json."
            )
        definition = self._backend.to_str().encode()
        self.vocab_size, self.vocabulary = plain_vocabulary(self._backend, name)
        special = sorted(self._tokenizer.special_tokens_map.items())
        added = self._backend.get_added_tokens_decoder()
        self._stripping = [number for number, token in added.items() if token.rstrip]
        # Changes the digest, so that folders of versions that passed empty tools are not continued.
        self.digest = digest_of(
            definition, self._tokenizer.chat_template, special, "no empty tools"
        )

    def documents(self, rows: Sequence[Row]) -> list[Document | None]:
        """Tokens and mask of each chat; None for a chat in which the assistant says nothing."""
        rendered = [self._rendered(row) for row in rows]
        with explained("The tokenizer fails at these chats"):
            encoded = self._backend.encode_batch(
                [text for text, _ in rendered], add_special_tokens=False
            )
        result: list[Document | None] = []
        for (text, spans), each in zip(rendered, encoded, strict=True):
            offsets = each.offsets
            # A token that absorbs following white space, as <|end|> may, counts without it.
            for at in np.flatnonzero(np.isin(each.ids, self._stripping)).tolist():
                start, stop = offsets[at]
                offsets[at] = start, start + len(text[start:stop].rstrip())
            mask = _mask(spans, offsets)
            result.append(Document(np.array(each.ids, np.int32), mask) if mask.any() else None)
        return result

    def describe(self) -> str:
        """A description of how the assistant's part is found."""
        how = "as the difference between the chat with and without each of its turns"
        if self._marks:
            how = "as the chat template marks it"
        end = ""
        if not self._ends_turns():
            end = (
                f" It {'marks' if self._marks else 'writes'} nothing behind an answer that comes"
                " last: no token that ends a turn is learned. To have one learned use a template"
                " that always writes it, inside {% generation %} if that has it."
            )
        return (
            f"Targets are what the assistant says, {how}. Documents begin and end as the template"
            f" writes them.{end}"
        )

    def _ends_turns(self) -> bool:
        """Whether a short chat shows that more than white space is learned after an answer."""
        answer = "zq0qz"
        chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": answer}]
        try:
            if self._marks:
                text, spans = self._marked(chat, None, self._template)
            else:
                text = self._render(chat, None)
                spans = self._differences(chat, None, text)
        except Exception:  # the first such chat raises it too
            return True
        said = "".join(text[start:stop] for start, stop in spans)
        _, found, end = said.partition(answer)
        return not found or bool(end.strip())

    def _rendered(self, row: Row) -> tuple[str, list[Span]]:
        """The text of a chat, and the character ranges of the assistant's text."""
        messages, learned = messages_of(row, self._column)
        tools = row.record.get("tools")
        try:
            if isinstance(tools, str):  # JSON text, common if the fields of tools differ
                tools = parse_json(tools) if tools.strip() else None
            tools = tools or None  # templates only test whether tools are defined
            check_nulls(messages, tools)
            # A tokenizer may have a separate template for chats with tools.
            template = self._tokenizer.get_chat_template(tools=tools)
            marks = marks_speech(template)
            if len(messages) > (most := MOST_MARKED if marks else MOST_COMPARED):
                remedy = "it" if marks else "it, or use a template with {% generation %}"
                raise ValueError(
                    f"it has {len(messages):,} messages, of which more than {most:,} would take"
                    f" minutes. Divide {remedy}."
                )
            if marks:
                text, spans = self._marked(messages, tools, template)
            else:
                text, spans = self._render(messages, tools), []
                if len(messages) * len(text) > MOST_WRITTEN:
                    raise ValueError(
                        f"{len(text):,} letters for each of {len(messages):,} messages would take"
                        " minutes. Divide it, or use a template with {% generation %}."
                    )
            *marked, words = with_words(messages, tools, template, text)
            check_written(marked[0], words, self._render(*marked))
            check_beside(row, text)
            spans = spans if marks else self._differences(messages, tools, text)
            if not all(learned):
                spans = _learned(spans, learned)
        except Exception as error:  # A template can raise anything.
            raise ValueError(
                f"{row.place()}: the chat template refuses the chat: {error}"
            ) from error
        check_encodable(row, text)
        return text, spans

    def _marked(
        self, messages: list[dict[str, Any]], tools: Any, template: str
    ) -> tuple[str, list[Span]]:
        # apply_chat_template makes masks of these spans, but drops all spans from the first one
        # that begins with a space outside the tokenizer's offsets.
        from transformers.utils.chat_template_utils import render_jinja_template

        texts, spans = render_jinja_template(
            conversations=[messages],
            tools=tools,
            chat_template=template,
            return_assistant_tokens_mask=True,
            **self._tokenizer.special_tokens_map,
        )
        return texts[0], [(start, stop) for start, stop in spans[0]]

    def _render(self, messages: list[dict[str, Any]], tools: Any, prompt: bool = False) -> str:
        return self._tokenizer.apply_chat_template(
            messages, tools=tools, tokenize=False, add_generation_prompt=prompt
        )

    def _differences(self, messages: list[dict[str, Any]], tools: Any, text: str) -> list[Span]:
        spans = []
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            if number == 0:
                raise ValueError(
                    "it begins with the assistant, so that there is no prompt to tell the"
                    " assistant's part from. Put a message of the system or the user before it, or"
                    " use a template with {% generation %}."
                )
            before = self._render(messages[:number], tools, prompt=True)
            after = self._render(messages[: number + 1], tools)
            if not text.startswith(after):
                raise ValueError(
                    f"with more messages it writes the first {number + 1} otherwise than alone, so"
                    " that what the assistant said cannot be found. Use a template with"
                    " {% generation %} around it."
                )
            if not after.startswith(before):
                shared = commonprefix([before, after])  # noqa: RUF071 characters are meant
                same = max(0, len(shared) - 10)
                raise ValueError(
                    f"its generation prompt ends in {before[same:]!r:.60}, where message {number}"
                    f" goes on with {after[same:]!r:.60}, so that no model is ever asked for that."
                    " If a variable of the template decides whether a thought stands there, as"
                    " enable_thinking, set it in its first line: {%- set enable_thinking = false"
                    " -%} (or true). If the prompt begins a thought give the message one. Else use"
                    " a template with {% generation %}."
                )
            spans.append((len(before), len(after)))
        return spans


def _check_sandbox() -> None:
    """Refuse versions of Jinja whose sandbox lets a template run any code."""
    from transformers.utils.versions import require_version

    try:
        require_version("jinja2>=3.1.6")
    except ImportError as error:
        raise ValueError(
            f"Chat templates are not rendered: {str(error).partition(chr(10))[0]} In older ones a"
            " template can run any code: pip install 'jinja2>=3.1.6'."
        ) from error


def _mask(spans: list[Span], offsets: list[Span]) -> np.ndarray:
    """Whether each token is part of the assistant's text, bool [tokens].

    Spans and tokens (``offsets``) are ranges of characters of the chat's text.
    """
    # The end of a token decides, since tokenizers may or may not include the space before a word.
    ends = np.array([stop for _, stop in offsets], np.int64)
    starts, stops = np.sort(np.array(spans, np.int64).reshape(-1, 2), axis=0).T
    return np.searchsorted(starts, ends) > np.searchsorted(stops, ends)


def _learned(spans: list[Span], learned: list[bool]) -> list[Span]:
    """The spans of the assistant's messages that are learned."""
    if len(spans) != len(learned):
        raise ValueError(
            f"it marks {len(spans)} parts for {len(learned)} messages of the assistant, so that"
            " those of weight 0 cannot be told from the others. A template must mark each once."
        )
    return [span for span, counts in zip(spans, learned, strict=True) if counts]
