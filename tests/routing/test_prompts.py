"""What a request says of its prompt, and how the tokens of a chat are put together."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infinistore.routing.prompts import Known, Prompt, TokenMemory, joined, read_prompt

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
FIELDS = st.sampled_from(["model", "prompt", "messages", "stream", "cache_salt", "content", "type", "tools"])


def chat(*texts: str, **more: object) -> Prompt:
    """A chat of these messages, by the user and the assistant in turns."""
    roles = ("user", "assistant")
    messages = [{"role": roles[number % 2], "content": text} for number, text in enumerate(texts)]
    return read_prompt(CHAT, {"model": "m", "messages": messages, **more})


def tokens_of(memory: TokenMemory, prompt: Prompt) -> tuple[int, list[int] | None]:
    """What is known of a prompt."""
    count, known = memory.find(prompt)
    return count, None if known is None else list(known.tokens)


@given(path=st.sampled_from([COMPLETIONS, CHAT]), body=JSON | st.dictionaries(FIELDS, JSON))
def test_no_body_is_refused_and_every_prompt_has_a_length(path: str, body: object) -> None:
    prompt = read_prompt(path, body)
    assert prompt.length >= 1
    assert prompt.question is None or prompt.marks
    assert prompt.question is None or json.dumps(prompt.question)


@pytest.mark.parametrize("given_as", [[5, 6, 7], [[5, 6, 7]]])
def test_tokens_in_a_request_need_not_be_asked_for(given_as: object) -> None:
    prompt = read_prompt(COMPLETIONS, {"model": "m", "prompt": given_as})
    assert (prompt.tokens, prompt.question, prompt.length) == ([5, 6, 7], None, 3)


def test_of_several_prompts_the_sum_of_their_lengths_is_known() -> None:
    assert read_prompt(COMPLETIONS, {"prompt": [[1, 2], [3]]}).length == 3
    assert read_prompt(COMPLETIONS, {"prompt": ["a" * 40, "b" * 80]}).length == 30


def test_a_text_is_tokenized_as_the_engine_will_do_it() -> None:
    prompt = read_prompt(COMPLETIONS, {"model": "m", "prompt": "hello", "add_special_tokens": False})
    assert prompt.question == {"model": "m", "prompt": "hello", "add_special_tokens": False}


def test_a_chat_with_an_image_is_judged_by_its_length() -> None:
    parts = [{"type": "text", "text": "x" * 40}, {"type": "image_url", "image_url": {"url": "http://a"}}]
    prompt = read_prompt(CHAT, {"messages": [{"role": "user", "content": parts}]})
    assert (prompt.question, prompt.length) == (None, 10)


def test_the_tools_of_a_chat_are_a_part_of_what_is_asked_and_of_what_is_remembered() -> None:
    plain, with_tools = chat("hello"), chat("hello", tools=[{"type": "function"}])
    assert with_tools.question is not None
    assert with_tools.question["tools"] == [{"type": "function"}]
    assert plain.marks != with_tools.marks


def test_a_turn_more_has_the_marks_of_the_turns_before() -> None:
    assert chat("a", "b", "c").marks[:2] == chat("a", "b").marks
    assert chat("a", "x", "c").marks[1:] != chat("a", "b", "c").marks[1:]


def test_the_longest_known_beginning_is_found() -> None:
    memory = TokenMemory()
    memory.add(chat("a"), Known([1]))
    memory.add(chat("a", "b", "c"), Known([1, 2, 3]))
    assert tokens_of(memory, chat("a", "b", "c", "d", "e")) == (3, [1, 2, 3])
    assert tokens_of(memory, chat("a", "other")) == (1, [1])
    assert tokens_of(memory, chat("another")) == (0, None)


@given(lengths=st.lists(st.integers(min_value=0, max_value=60), max_size=30))
def test_the_memory_holds_no_more_tokens_than_it_may(lengths: list[int]) -> None:
    memory, most = TokenMemory(most_tokens=100), 100
    for number, length in enumerate(lengths):
        memory.add(chat(str(number % 7)), Known([number] * length))
    kept = [known for number in range(7) if (known := memory.find(chat(str(number)))[1]) is not None]
    assert sum(len(known.tokens) for known in kept) <= most
    if lengths:
        assert tokens_of(memory, chat(str((len(lengths) - 1) % 7)))[1] == [len(lengths) - 1] * lengths[-1]


@given(
    head=st.text("abc", max_size=80),
    last=st.text("abcdefghij", min_size=24, max_size=60),
    more=st.text("abcdefghij", max_size=80),
    default=st.text("xyz", max_size=30),
)
def test_the_end_of_a_chat_is_joined_to_its_beginning(head: str, last: str, more: str, default: str) -> None:
    """A template may put something before the first message, whichever it is, and
    something behind the last one.
    """
    known, rest = f"<{default}>{head}|{last}|?", f"<{default}>{last}|{more}|?"
    found = joined([ord(one) for one in known], [ord(one) for one in rest])
    if found is not None and rest.count(last[-16:]) == 1:
        tokens, shared = found
        text = "".join(map(chr, tokens))
        assert text[:shared] == known[:shared]
        assert text == f"<{default}>{head}|{last}|{more}|?"


def test_a_beginning_that_is_not_found_again_is_not_joined() -> None:
    assert joined([1] * 100, [2] * 100) is None
    assert joined([1, 2, 3], [1, 2, 3]) is None


def test_numbers_are_found_at_whole_numbers_only() -> None:
    """The bytes of these are found one byte further, too, where no number begins."""
    assert joined([1 << 8] * 40, [1] * 40) is None
