"""A text becomes tokens, and a prompt gets a second one that begins alike.

The tokenizer is a stand-in for a model's own, which would have to be downloaded. It is
documented by its regular expression: a piece is up to eight letters, up to three
digits, or one other sign, each with the one space before it if there is one; what is
left of white space is a piece too. A piece's id is its BLAKE2b hash, modulo the size of
Qwen2.5's vocabulary. Two pieces may share an id, which is harmless here. No character
is lost: the pieces of a text, joined, are the text.
"""

import hashlib
import re
from functools import lru_cache
from importlib.resources import files
from importlib.resources.abc import Traversable

from attrs import frozen

VOCABULARY_SIZE = 151_643
INSERTED_SENTENCE = " (Here somebody inserted one sentence, and all that follows has another past.)"

_PIECE = re.compile(r" ?[^\W\d_]{1,8}| ?\d{1,3}| ?[^\s\w]| ?_|\s+(?= )|\s+")


@frozen
class Prompt:
    """One prompt: a short name, one line that explains it, and its token ids."""

    name: str
    about: str
    tokens: list[int]


def sample_text_file() -> Traversable:
    """Return the text that the package ships: what a KV cache is, in about 18 KB of
    plain English.
    """
    return files("infinistore.demo") / "how_a_kv_cache_works.txt"


def pieces(text: str) -> list[str]:
    """Cut `text` into pieces; joined again they are `text`."""
    return _PIECE.findall(text)


@lru_cache(maxsize=65536)
def _token_id(piece: str) -> int:
    digest = hashlib.blake2b(piece.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little") % VOCABULARY_SIZE


def token_ids(text: str) -> list[int]:
    """Return one id in `range(VOCABULARY_SIZE)` for each piece of `text`; the same text
    gives the same ids anywhere.
    """
    return [_token_id(piece) for piece in pieces(text)]


def insertion_place(tokens: int) -> int:
    """Return after how many of its tokens a text of `tokens` tokens gets the new
    sentence: two thirds.
    """
    return 2 * tokens // 3


def two_prompts(tokens: list[int]) -> tuple[Prompt, Prompt]:
    """Return prompt A, which is `tokens`, and prompt B, the same with one sentence put
    in after two thirds.

    What comes before the sentence can be taken from the store. What comes after it
    cannot, although its words are the same: every key and value depends on all the
    tokens before.
    """
    place = insertion_place(len(tokens))
    edited = tokens[:place] + token_ids(INSERTED_SENTENCE) + tokens[place:]
    return Prompt("A", "the text", tokens), Prompt("B", "the text with one sentence put in after two thirds", edited)
