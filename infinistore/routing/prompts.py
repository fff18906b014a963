"""What the body of a request to generate says of its prompt, and the tokens of chats
that were seen before. No I/O.

A body is never checked here: whatever is unusual in it is left to the engine, which
refuses it in its own words. Such a prompt has no more than a length.
"""

import hashlib
import json
from array import array
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, Final

import attrs

GENERATING: Final = ("/v1/completions", "/v1/chat/completions")
"""The paths whose requests have a prompt."""
_CHARACTERS_PER_TOKEN: Final = 4
"""A guess, for a text that nobody has tokenized."""
_ASKED_OF_CHATS: Final = (
    *("add_generation_prompt", "continue_final_message", "add_special_tokens", "chat_template"),
    *("chat_template_kwargs", "tools"),
)
"""What `/tokenize` of vLLM takes beside the messages."""
_ANCHOR_TOKENS: Final = 16
_LONGEST_CLOSING: Final = 64
"""What a template may put behind the last message, in tokens."""


@attrs.frozen(kw_only=True)
class Prompt:
    """A prompt, as far as a request tells it."""

    model: str = ""
    """As the request calls it; empty if it does not."""
    streams: bool = False
    """Whether the answer comes token by token."""
    salt: str = ""
    """Its `cache_salt`: prompts with different ones share nothing."""
    tokens: Sequence[int] = ()
    """Its tokens, if the request has them."""
    question: Mapping[str, Any] | None = None
    """What to ask `/tokenize`; None if that does not help."""
    marks: Sequence[bytes] = ()
    """For each message of a chat, a hash of all messages up to it; one for a text."""
    length: int = 1
    """About how many tokens it has."""

    @property
    def is_chat(self) -> bool:
        """Whether it is a list of messages, to which later ones are added."""
        return self.question is not None and "messages" in self.question

    def rest(self, known: int) -> dict[str, Any]:
        """Return the question for a chat of which `known` leading messages were seen,
        two of which go with it, so that `joined` finds the place.
        """
        assert self.question is not None
        return {**self.question, "messages": self.question["messages"][max(0, known - 2) :]}


def read_prompt(path: str, body: object) -> Prompt:
    """Return what the body of a request, decoded from JSON, says of its prompt."""
    if not isinstance(body, dict):
        return Prompt()
    model, salt = _text(body.get("model")), _text(body.get("cache_salt"))
    about: dict[str, Any] = {"model": model, "salt": salt, "streams": body.get("stream") is True}
    if path.endswith("/chat/completions"):
        return _read_chat(body, about)
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and not isinstance(prompt[0], int):
        prompt = prompt[0]
    if isinstance(prompt, str):
        special = body.get("add_special_tokens", True)
        question = {"model": model, "prompt": prompt, "add_special_tokens": special} if prompt else None
        return Prompt(**about, question=question, marks=_marks(question, [prompt]), length=_guess(len(prompt)))
    if isinstance(prompt, list) and are_tokens(prompt):
        return Prompt(**about, tokens=prompt, length=len(prompt))
    lengths = [len(one) if are_tokens(one) else _guess(len(one)) for one in _sequences(prompt)]
    return Prompt(**about, length=max(1, sum(lengths)))


def _read_chat(body: Mapping[str, Any], about: Mapping[str, Any]) -> Prompt:
    messages = body.get("messages")
    if not isinstance(messages, list):
        return Prompt(**about)
    question = {name: body[name] for name in _ASKED_OF_CHATS if name in body}
    length = _guess(sum(len(text) for message in messages for text in _texts(message)))
    if not all(map(_is_plain, messages)):
        return Prompt(**about, length=length)
    question = {"model": about["model"], **question}
    marks = _marks(question, messages)
    return Prompt(**about, question={**question, "messages": messages}, marks=marks, length=length)


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""


def _guess(characters: int) -> int:
    return max(1, characters // _CHARACTERS_PER_TOKEN)


def are_tokens(value: object) -> bool:
    """Whether this is a list of tokens, and not an empty one."""
    return isinstance(value, list) and bool(value) and all(type(one) is int and 0 <= one < 2**63 for one in value)


def _sequences(value: object) -> list[Any]:
    return [one for one in value if isinstance(one, str | list)] if isinstance(value, list) else []


def _is_plain(message: object) -> bool:
    """Whether a message is text alone, whose tokens are all that it is."""
    content = message.get("content") if isinstance(message, dict) else 0
    if isinstance(content, list):
        return all(isinstance(part, dict) and part.get("type") == "text" for part in content)
    return content is None or isinstance(content, str)


def _texts(message: object) -> list[str]:
    content = message.get("content") if isinstance(message, dict) else None
    parts = content if isinstance(content, list) else [{"text": content}]
    return [_text(part.get("text")) for part in parts if isinstance(part, dict)]


def _marks(about: object, pieces: Sequence[object]) -> list[bytes]:
    marks = [_digest(b"", about)]
    for piece in pieces:
        marks.append(_digest(marks[-1], piece))
    return marks[1:]


def _digest(before: bytes, what: object) -> bytes:
    return hashlib.blake2b(before + json.dumps(what, sort_keys=True).encode(), digest_size=16).digest()


@attrs.frozen
class Known:
    """The tokens of a prompt, and the hashes of its blocks."""

    tokens: Sequence[int]
    hashes: Sequence[str] = ()
    chain: object = None
    """What the hashes were made with: others are of no use for another chain."""


class TokenMemory:
    """The prompts that were tokenized last, `most_tokens` tokens in all."""

    def __init__(self, most_tokens: int = 2_000_000) -> None:
        self._most_tokens = most_tokens
        self._tokens = 0
        self._known: OrderedDict[bytes, Known] = OrderedDict()

    def find(self, prompt: Prompt) -> tuple[int, Known | None]:
        """Return how many leading messages of a prompt make up one that is known, and
        what is known of that.
        """
        for count in range(len(prompt.marks), 0, -1):
            if (known := self._known.get(prompt.marks[count - 1])) is not None:
                self._known.move_to_end(prompt.marks[count - 1])
                return count, known
        return 0, None

    def add(self, prompt: Prompt, known: Known) -> None:
        """Remember a prompt. Those that were used longest ago are forgotten."""
        if not prompt.marks or len(known.tokens) > self._most_tokens:
            return
        known = attrs.evolve(known, tokens=array("q", known.tokens))  # eight bytes each
        before = self._known.pop(prompt.marks[-1], None)
        self._tokens += len(known.tokens) - (len(before.tokens) if before is not None else 0)
        self._known[prompt.marks[-1]] = known
        while self._tokens > self._most_tokens:
            self._tokens -= len(self._known.popitem(last=False)[1].tokens)


def joined(known: Sequence[int], rest: Sequence[int]) -> tuple[list[int], int] | None:
    """Return the tokens of a chat from those of its beginning, `known`, and those of
    its last messages, `rest`, the first of which `known` ends with; and how many of
    `known` these begin with. None if where they overlap is not beyond doubt.

    What a template puts behind the last message is passed over in `known`, and what it
    puts before the first one, in `rest`.
    """
    text, whole = array("q", known).tobytes(), array("q", rest).tobytes()
    for closing in range(min(_LONGEST_CLOSING, len(known) - _ANCHOR_TOKENS) + 1):
        end = len(known) - closing
        anchor = text[8 * (end - _ANCHOR_TOKENS) : 8 * end]
        at = _find(whole, anchor)
        if at >= 0:
            after = at + _ANCHOR_TOKENS
            return ([*known[:end], *rest[after:]], end) if _find(whole[8 * (at + 1) :], anchor) < 0 else None
    return None


def _find(numbers: bytes, wanted: bytes) -> int:
    """Return at which number of eight bytes these numbers are, or -1."""
    at = numbers.find(wanted)
    while at % 8 and at >= 0:
        at = numbers.find(wanted, at + 1)
    return at // 8 if at >= 0 else -1
