"""Versions that meet: offers, and fields and messages that one of two ends does not
know.
"""

from typing import Any, ClassVar

import attrs
import msgpack
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from infinistore.errors import ProtocolError, VersionMismatch
from infinistore.protocol.codec import (
    HEADER_BYTES,
    STRUCTURE,
    decode_body,
    encode_head,
    parse_header,
    structure_for,
    structure_function,
    unstructure_for,
    unstructure_function,
    with_offer,
)
from infinistore.protocol.messages import KINDS, Hello, Keys, Message, Purge, Put, StatisticsReply
from infinistore.protocol.versions import LAST_RELEASE, MINOR, OFFER, Capability, NewerFields, Offer

from .strategies import counts, made_offers, messages

NEWER = Offer(MINOR + 1, OFFER.capabilities)
offers = made_offers | st.just(LAST_RELEASE)


def body_of(message: Message, peer: Offer = OFFER) -> bytes:
    head = encode_head(message, request_id=1, unstructure=unstructure_for(peer))
    header = parse_header(memoryview(head), max_body_bytes=2**32, max_payload_bytes=0)
    return head[HEADER_BYTES : HEADER_BYTES + header.body_bytes]


# Offers


@given(made_offers)
def test_an_offer_comes_back_as_it_was(offer: Offer) -> None:
    assert Offer.from_number(offer.to_number()) == offer
    assert 2**63 < offer.to_number() < 2**64


@given(counts)
@example(2**64 - 1)
@example(2**63)
@example(2**63 + 1)
@example(0)
def test_any_number_is_an_offer_and_no_deadline_is_more_than_that_of_the_last_release(number: int) -> None:
    offer = Offer.from_number(number)
    assert offer.capabilities in OFFER.capabilities
    assert (number > 2**63 and number % 2**16) or offer == LAST_RELEASE


@given(made_offers, made_offers)
def test_both_ends_share_what_each_can_do_in_words_of_the_peers_version(peer: Offer, own: Offer) -> None:
    shared = peer.shared_with(own)
    assert shared.minor == peer.minor
    assert [one for one in Capability if one in shared.capabilities] == [
        one for one in Capability if one in peer.capabilities and one in own.capabilities
    ]


def test_capabilities_that_this_release_does_not_know_are_left_out() -> None:
    assert Offer.from_number(OFFER.to_number() | 1 << 62) == OFFER


def test_the_longest_deadline_of_the_last_release_is_no_offer() -> None:
    head = encode_head(Hello(), request_id=1, deadline_us=2**64 - 1)
    header = parse_header(memoryview(head), max_body_bytes=2**32, max_payload_bytes=0)
    assert Offer.from_number(header.deadline_us) == LAST_RELEASE


@given(messages, made_offers)
def test_an_offer_changes_nothing_else_of_a_frame(message: Message, offer: Offer) -> None:
    head = encode_head(message, request_id=7)
    offering = with_offer(head, offer)
    assert (offering[:24], offering[32:]) == (head[:24], head[32:])
    header = parse_header(memoryview(offering), max_body_bytes=2**32, max_payload_bytes=0)
    assert Offer.from_number(header.deadline_us) == offer


# Fields that a newer minor version has added, as this release hears them


def test_every_message_says_what_becomes_of_newer_fields() -> None:
    assert [cls for cls in KINDS.values() if not isinstance(cls.NEWER_FIELDS, NewerFields)] == []


_plain_values = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary()
_names = st.text(max_size=10)


@given(messages, st.dictionaries(_names, _plain_values, min_size=1, max_size=4), st.booleans())
def test_a_field_of_a_newer_release_is_ignored_or_refused_as_the_message_says(
    message: Message, more: dict[str, Any], first: bool
) -> None:
    fields: dict[str, Any] = msgpack.unpackb(body_of(message))
    more = {name: value for name, value in more.items() if name not in fields}
    body = memoryview(msgpack.packb({**more, **fields} if first else {**fields, **more}))
    if message.NEWER_FIELDS is NewerFields.IGNORED or not more:
        assert decode_body(message.KIND, body, structure_for(NEWER)) == message
    else:
        with pytest.raises(ProtocolError, match=f"malformed {type(message).__name__}: unknown fields"):
            decode_body(message.KIND, body, structure_for(NEWER))


@given(messages, _names, _plain_values, offers.filter(lambda offer: offer.minor <= MINOR))
def test_a_field_that_no_release_up_to_the_peers_has_is_refused(
    message: Message, name: str, value: Any, peer: Offer
) -> None:
    fields: dict[str, Any] = msgpack.unpackb(body_of(message))
    if name not in fields:
        with pytest.raises(ProtocolError, match="unknown fields"):
            decode_body(message.KIND, memoryview(msgpack.packb(fields | {name: value})), structure_for(peer))


@given(messages, _names | st.binary(max_size=4), st.recursive(_plain_values, st.lists, max_leaves=4))
def test_whatever_a_newer_release_adds_it_is_a_message_or_a_protocol_error(
    message: Message, name: str | bytes, value: Any
) -> None:
    fields: dict[Any, Any] = msgpack.unpackb(body_of(message))
    body = memoryview(msgpack.packb(fields | {name: value}))
    try:
        decoded = decode_body(message.KIND, body, structure_for(NEWER))
    except ProtocolError:
        return
    assert name in fields or decoded == message
    assert isinstance(name, str)


def test_a_missing_field_of_a_newer_release_is_still_missing() -> None:
    with pytest.raises(ProtocolError, match="the field 'statistics' is missing"):
        decode_body(StatisticsReply.KIND, memoryview(msgpack.packb({"more": 1})), structure_for(NEWER))


# Fields that this release has added, as an older one hears them


@attrs.frozen
class Asked:
    """A request of a later release."""

    KIND: ClassVar[int] = 0x7E
    NEWER_FIELDS: ClassVar = NewerFields.REFUSED
    keys: Keys
    tenant: str = attrs.field(default="", metadata={"since": 2})


@attrs.frozen
class Answered:
    """A reply of a later release."""

    KIND: ClassVar[int] = 0xFE
    NEWER_FIELDS: ClassVar = NewerFields.IGNORED
    count: int
    waited_us: int = attrs.field(default=0, metadata={"since": 2})
    tier: str = attrs.field(default="", metadata={"since": 3})


@pytest.mark.parametrize("minor", [0, 1, 2, 3])
def test_a_new_field_that_has_its_default_is_sent_to_nobody(minor: int) -> None:
    assert unstructure_function(Asked, minor)(Asked(Keys(["k"]))) == {"keys": "k"}
    assert unstructure_function(Answered, minor)(Answered(3)) == {"count": 3}


@pytest.mark.parametrize("minor", [0, 1])
def test_a_new_field_without_which_a_request_means_something_else_is_not_sent_to_an_older_release(minor: int) -> None:
    with pytest.raises(VersionMismatch, match="the peer does not know the field 'tenant' of Asked; install the same"):
        unstructure_function(Asked, minor)(Asked(Keys(["k"]), tenant="blue"))


def test_a_release_that_knows_a_new_field_gets_it() -> None:
    assert unstructure_function(Asked, 2)(Asked(Keys(["k"]), tenant="blue")) == {"keys": "k", "tenant": "blue"}
    assert unstructure_function(Answered, 9)(Answered(3, 5, "disk")) == {"count": 3, "waited_us": 5, "tier": "disk"}


@pytest.mark.parametrize(("minor", "sent"), [(0, {}), (1, {}), (2, {"waited_us": 5})])
def test_an_older_release_gets_a_reply_without_the_new_fields_that_it_may_ignore(
    minor: int, sent: dict[str, int]
) -> None:
    assert unstructure_function(Answered, minor)(Answered(3, 5, "disk")) == {"count": 3} | sent


def test_a_new_field_is_decoded_or_takes_its_default() -> None:
    structure = structure_function(Asked)
    assert structure({"keys": "k"}, Asked) == Asked(Keys(["k"]))
    assert structure({"keys": "k", "tenant": "blue"}, Asked) == Asked(Keys(["k"]), "blue")


@given(messages, offers)
def test_what_an_older_release_understands_is_sent_to_it_byte_for_byte(message: Message, peer: Offer) -> None:
    try:
        body = body_of(message, peer)
    except VersionMismatch:
        return
    if decode_body(message.KIND, memoryview(body)) == message:  # a reply may lack what its receiver does not know
        assert body == body_of(message)


# Messages that need a capability


@given(offers)
def test_a_message_goes_only_to_a_peer_with_its_capability(peer: Offer) -> None:
    taken = unstructure_for(peer)
    for cls in KINDS.values():
        needed = cls.CAPABILITY
        assert (cls in taken) == (not needed or bool(needed & peer.capabilities)), cls.__name__


def test_the_error_for_a_message_that_the_peer_does_not_understand_names_it() -> None:
    peer = Offer(MINOR, OFFER.capabilities & ~Capability.COMMIT_WORD)
    prepare = KINDS[0x18](1, Keys(["k"]), b"")  # type: ignore[call-arg]
    with pytest.raises(VersionMismatch, match=r"does not understand Prepare; install the same release"):
        encode_head(prepare, request_id=1, unstructure=unstructure_for(peer))
    assert encode_head(Purge(), request_id=1, unstructure=unstructure_for(peer)) == encode_head(Purge(), request_id=1)


def test_a_peer_of_this_release_costs_no_table_of_its_own() -> None:
    assert unstructure_for(OFFER) is unstructure_for(NEWER)
    assert structure_for(OFFER) is structure_for(LAST_RELEASE) is STRUCTURE
    assert Put in unstructure_for(LAST_RELEASE)
