"""Names of token blocks: equal exactly when what they name is interchangeable."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infinistore.integrations.internal.prefix_keys import PrefixChain, fingerprint, fingerprint_of_config

TOKENS = st.lists(st.integers(min_value=0, max_value=5), max_size=40)
SIZES = st.integers(min_value=1, max_value=5)


def hashes(tokens: list[int], size: int = 4, salt: str = "") -> list[str]:
    return PrefixChain(size, salt).extend(tokens)


@given(TOKENS, TOKENS, SIZES)
def test_two_sequences_share_exactly_the_hashes_of_the_full_blocks_that_they_share(
    one: list[int], other: list[int], size: int
) -> None:
    blocks = min(len(one), len(other)) // size
    shared = next((b for b in range(blocks) if one[: (b + 1) * size] != other[: (b + 1) * size]), blocks)

    ours, theirs = hashes(one, size), hashes(other, size)

    assert (len(ours), len(theirs)) == (len(one) // size, len(other) // size)
    assert ours[:shared] == theirs[:shared]
    assert set(ours[shared:]).isdisjoint(theirs[shared:])


@given(TOKENS, SIZES, st.data())
def test_a_sequence_that_grows_has_the_hashes_that_it_has_as_a_whole(
    tokens: list[int], size: int, data: st.DataObject
) -> None:
    chain = PrefixChain(size)
    for end in sorted(data.draw(st.lists(st.integers(0, len(tokens)), max_size=5))):
        chain.extend(tokens[:end])

    assert chain.extend(tokens) == hashes(tokens, size)


def test_another_salt_shares_nothing() -> None:
    assert set(hashes([1] * 40, salt="a")).isdisjoint(hashes([1] * 40, salt="b"))


def test_what_a_block_depends_on_besides_tokens_counts_from_there_on() -> None:
    plain = PrefixChain(2).extend([1] * 8)
    pictured = PrefixChain(2, extra=lambda first, end: b"picture" if (first, end) == (2, 4) else b"").extend([1] * 8)

    assert pictured[0] == plain[0]
    assert set(pictured[1:]).isdisjoint(plain)


@given(TOKENS, SIZES, st.integers(1, 4), st.data())
def test_groups_of_blocks_begin_with_the_hash_of_their_first(
    tokens: list[int], size: int, group: int, data: st.DataObject
) -> None:
    chain = PrefixChain(size, group_blocks=group)
    for end in sorted(data.draw(st.lists(st.integers(0, len(tokens)), max_size=5))):
        chain.extend(tokens[:end])
    plain = hashes(tokens, size)
    assert chain.extend(tokens) == [
        f"{{{plain[number - number % group][:16]}}}{text}" for number, text in enumerate(plain)
    ]


@given(TOKENS, SIZES, st.integers(0, 4), st.sampled_from(["", "salt"]), st.data())
def test_a_chain_that_goes_on_from_known_hashes_has_those_of_one_from_the_start(
    tokens: list[int], size: int, group: int, salt: str, data: st.DataObject
) -> None:
    def chain(known: Sequence[str] = ()) -> PrefixChain:
        return PrefixChain(size, salt, lambda first, end: bytes([first]), group_blocks=group, known=known)

    whole = chain().extend(tokens)
    cut = data.draw(st.integers(0, len(whole)))
    known = whole[:cut]

    assert chain(known).hashes == known
    assert chain(known).extend(tokens) == whole
    assert known == whole[:cut]  # what was given does not grow


def test_known_hashes_are_not_computed_again() -> None:
    computed: list[int] = []

    def note(first: int, end: int) -> bytes:
        computed.append(first)
        return b""

    PrefixChain(2, extra=note, known=hashes([1] * 6, 2)).extend([1] * 8)

    assert computed == [6]


def test_a_block_without_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one token"):
        PrefixChain(0)


def test_names_are_the_same_in_every_process_and_version() -> None:
    assert fingerprint({"a": None, "b": 1}) == fingerprint({"b": 1, "a": None}) == "8470183a5e913703"
    assert hashes([7, 8, 9], 2, "salt") == ["c53b4b248f259f0bd070f92c56f238df"]


def test_a_configuration_counts_but_for_where_the_model_lies_and_what_runs_it() -> None:
    config = {"hidden_size": 32, "rope_theta": 1e4}

    assert fingerprint_of_config({**config, "_name_or_path": "/models/x"}) == fingerprint_of_config(config)
    assert fingerprint_of_config({**config, "rope_theta": 1e6}) != fingerprint_of_config(config)
