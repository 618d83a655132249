"""Chats that a stranger has written take no more time and memory than their size accounts for."""

import pytest

from lightning_wlb.data.tokenising import chats
from lightning_wlb.data.tokenising.chat_checks import check_nulls, with_words
from lightning_wlb.data.tokenising.chats import ChatEncoder
from tests.data.tokenising.support import MARKED, PLAIN, messages_of, row, saved_chat_tokenizer

pytest.importorskip("transformers")
CALL = {"name": "f", "id": "functions.f:0", "arguments": {"a": 1}}


def test_a_long_role_is_not_noted_for_each_call() -> None:
    """3 kB of compressed text took 16 GB."""
    said = [{"role": "r" * 10_000, "content": "b", "tool_calls": [CALL] * 9}]
    _, _, words = with_words(said, None, "", "")
    assert len(words) == 1 + 9 * 2
    assert max(map(len, words.values())) < 300


@pytest.mark.parametrize(
    ("text", "names"),
    [("<|call|>functions.f:0<|argument|>", 0), ('"id": "functions.f:0"', 0), ("functions.f:01", 1)],
)
def test_a_name_within_a_call_s_id_needs_no_word(text: str, names: int) -> None:
    """Kimi K2's template writes the id in place of the name."""
    said = [{"role": "assistant", "content": "", "tool_calls": [CALL]}]
    _, _, words = with_words(said, None, "", text)
    assert sum(what.startswith("the call of") for what in words.values()) == names


@pytest.mark.parametrize("properties", [["a"], "a", 5, {"a": {"type": ["string", "null"]}}])
def test_nulls_are_looked_up_where_tools_say_what_may_be(properties) -> None:
    tools = [{"name": "f", "parameters": {"properties": properties}}]
    calls = [{"tool_calls": [{"name": "f", "arguments": {"a": None}}]}]
    check_nulls([{}], tools)
    if isinstance(properties, dict):
        check_nulls(calls, tools)
        return
    with pytest.raises(ValueError, match="write null as the argument 'a' of the call of 'f'"):
        check_nulls(calls, tools)


@pytest.mark.parametrize("template", [PLAIN, MARKED])
def test_a_long_chat_of_many_messages_is_refused(tmp_path, monkeypatch, template) -> None:
    """Its text is written once for each message; tools in it took minutes."""
    encoder = ChatEncoder(saved_chat_tokenizer(tmp_path, template), "messages")
    long = messages_of([("user", "a"), ("assistant", "the" * 50)])
    monkeypatch.setattr(chats, "MOST_WRITTEN", 300)
    assert encoder.documents([row(messages_of([("user", "a"), ("assistant", "the")]))])
    if template == MARKED:
        assert encoder.documents([row(long)])
        return
    with pytest.raises(ValueError, match="letters for each of 2 messages would take min"):
        encoder.documents([row(long)])
