"""Where the shards of a server are, as its hello tells it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infinistore.errors import ProtocolError
from infinistore.protocol.codec import encode_head, unstructure_for
from infinistore.protocol.messages import MOST_SHARDS, HelloReply, Keys, Shard, shards_from_texts
from infinistore.protocol.versions import LAST_RELEASE

paths = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=50).map(
    lambda path: "/" + path
)
shards = st.builds(Shard, st.integers(1, 65535), st.just("") | paths)


@given(st.lists(shards, max_size=20, unique_by=lambda shard: shard.port))
def test_shards_come_back_as_they_were(given: list[Shard]) -> None:
    assert shards_from_texts([str(shard) for shard in given]) == tuple(given)


@pytest.mark.parametrize(
    "text", ["", " ", "0", "65536", "-1", "+1", "1.0", "\u0663", "host:1", "1 relative", "1  /two", "9" * 5000]
)
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(ProtocolError, match="no address of a shard"):
        shards_from_texts(["22345", text])


def test_two_shards_have_two_ports() -> None:
    with pytest.raises(ProtocolError, match="same port"):
        shards_from_texts(["22345 /a", "22345 /b"])


def test_more_than_a_server_can_have_are_refused() -> None:
    texts = [str(1 + number) for number in range(MOST_SHARDS + 1)]
    assert len(shards_from_texts(texts[:-1])) == MOST_SHARDS
    with pytest.raises(ProtocolError, match="at most 256"):
        shards_from_texts(texts)


@given(st.lists(st.text(max_size=20), max_size=3))
def test_any_texts_are_shards_or_one_error(texts: list[str]) -> None:
    try:
        found = shards_from_texts(texts)
    except ProtocolError:
        return
    assert all(0 < shard.port < 65536 for shard in found)


def test_a_client_of_the_last_release_is_not_told_of_shards() -> None:
    hello = HelloReply("i", "1", 1, 1, 1, 1)
    sharded = HelloReply("i", "1", 1, 1, 1, 1, shards=Keys(["1", "2"]))
    of_last_release = unstructure_for(LAST_RELEASE)
    frames = [encode_head(one, request_id=1, unstructure=of_last_release) for one in (hello, sharded)]
    assert frames[0] == frames[1]
    assert encode_head(sharded, request_id=1) != frames[0] == encode_head(hello, request_id=1)
