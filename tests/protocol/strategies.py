"""Hypothesis strategies for everything that crosses the wire, derived from the
messages' fields.

A message that is added is covered at once; a field of a new type fails here, loudly.
"""

from typing import Any

import attrs
from hypothesis import strategies as st

from infinistore.keys import MAX_KEY_BYTES
from infinistore.protocol.codec import pack_u64
from infinistore.protocol.messages import KINDS, ONE_WAY, REPLIES, Keys, Message, Numbers, Put, Request, Tree
from infinistore.protocol.versions import OFFER, Capability, Offer

__all__ = [
    "counts",
    "keys",
    "lists_of_keys",
    "made_offers",
    "messages",
    "messages_of",
    "notices",
    "pieces",
    "puts",
    "requests",
    "texts",
]

_characters = st.characters(exclude_categories=["Cs"])
counts = st.integers(0, 2**64 - 1)
texts = st.text(_characters, max_size=40) | st.sampled_from(["x" * 1024, "\N{PILE OF POO}" * 1024, "\0"])
keys = (
    st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=40)
    | st.sampled_from(["k" * MAX_KEY_BYTES, "\N{PILE OF POO}" * (MAX_KEY_BYTES // 4)])
)  # fmt: skip
lists_of_keys = st.lists(keys, max_size=20).map(Keys)
lists_of_numbers = st.lists(counts, max_size=20).map(pack_u64)
_plain = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | texts


def _inner_trees(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.dictionaries(texts, inner, max_size=4) | st.lists(inner, max_size=4)


_trees: st.SearchStrategy[Any] = st.dictionaries(texts, st.recursive(_plain, _inner_trees, max_leaves=12), max_size=6)

_BY_TYPE: dict[Any, st.SearchStrategy[Any]] = {
    int: counts,
    float: st.floats(0, 1),
    bool: st.booleans(),
    str: texts,
    bytes: st.binary(max_size=40),
    Keys: lists_of_keys,
    Numbers: lists_of_numbers,
    Tree: _trees,
}


def messages_of(cls: type[Message]) -> st.SearchStrategy[Any]:
    """Messages of one class, whatever its fields may hold."""
    return st.builds(cls, **{field.name: _BY_TYPE[field.type] for field in attrs.fields(cls)})


messages: st.SearchStrategy[Message] = st.one_of([messages_of(cls) for cls in KINDS.values()])
requests: st.SearchStrategy[Request] = st.one_of([messages_of(cls) for cls in REPLIES if cls is not Put])
"""Any request that has a reply, but a Put, which has to fit its payload: `puts` has
those.
"""
notices: st.SearchStrategy[Request] = st.one_of([messages_of(cls) for cls in ONE_WAY])
"""Any request that has no reply."""


@st.composite
def puts(draw: st.DrawFn) -> tuple[Put, bytes]:
    """A Put and the payload that fits it."""
    blocks = draw(st.lists(st.tuples(keys, st.binary(max_size=200)), max_size=5))
    checksums = draw(st.booleans())
    trailer = pack_u64(draw(st.tuples(*(counts for _ in blocks)))) if checksums else pack_u64()
    put = Put(
        Keys([key for key, _ in blocks]),
        pack_u64(len(data) for _, data in blocks),
        checksums=checksums,
        replace=draw(st.booleans()),
    )
    return put, b"".join(data for _, data in blocks) + trailer.tobytes()


made_offers = st.builds(Offer, st.integers(1, 2**16 - 1), st.integers(0, OFFER.capabilities.value).map(Capability))
"""What an end may offer that makes an offer."""
pieces = st.lists(st.integers(1, 200) | st.sampled_from([1, 31, 32, 33, 64, 100_000]), min_size=1, max_size=20)
"""In which pieces a stream arrives: byte counts, over and over."""
