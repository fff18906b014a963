"""`docs/protocol.md` says what the code does: every message, field, number and limit,
and none that does not exist.
"""

import re
from pathlib import Path
from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from infinistore import errors
from infinistore.core.limits import CoreLimits
from infinistore.errors import InfiniStoreException
from infinistore.keys import MAX_JOINED_KEYS, MAX_KEY_BYTES
from infinistore.protocol import client_connection, codec, server_connection, shared_tables
from infinistore.protocol.messages import (
    KINDS,
    MISSING,
    MOST_SHARDS,
    NO_CHECKSUM,
    ONE_WAY,
    REPLIES,
    ErrorReply,
    Hello,
    HelloReply,
    Keys,
    Message,
    Numbers,
    Request,
    Tree,
)
from infinistore.protocol.packed_offsets import pack_offset
from infinistore.protocol.states import CLIENT, SERVER, Event, State
from infinistore.protocol.versions import LAST_RELEASE, MAJOR, MINOR, OFFER, Capability, NewerFields
from infinistore.server import connection as conversation
from infinistore.server.composition import MAX_BODY_BYTES
from infinistore.server.connection import SessionLimits
from infinistore.server.session import session
from tests.tables import for_each

from .annotated import worked_example

DOCUMENT = (Path(__file__).parents[2] / "docs" / "protocol.md").read_text(encoding="utf-8")
MIB = 1024 * 1024
TYPES: dict[Any, str] = {
    int: "count",
    float: "ratio",
    bool: "flag",
    str: "text",
    bytes: "bytes",
    Numbers: "numbers",
    Keys: "keys",
    Tree: "tree",
}
ERRORS = {cls.__name__: cls for cls in vars(errors).values() if isinstance(cls, type) and issubclass(cls, Exception)}

every_message = for_each(cls=KINDS.values())


def section(heading: str) -> str:
    """What stands under a heading, up to the next one of the same or a higher level."""
    level = heading.partition(" ")[0]
    assert DOCUMENT.count(f"\n{heading}\n") == 1, heading
    rest = DOCUMENT.partition(f"\n{heading}\n")[2]
    return re.split(rf"\n#{{1,{len(level)}}} ", rest, maxsplit=1)[0]


def layout(text: str) -> list[list[str]]:
    """The rows of the first layout in a text: cells are at least two blanks apart."""
    lines = re.search(r"```text\n(.*?)```", text, flags=re.DOTALL)
    assert lines
    return [re.split(r" {2,}", line.strip()) for line in lines[1].splitlines() if not line.startswith("   ")]


def prose(text: str) -> str:
    """A text as one line."""
    return " ".join(text.split())


def items(text: str) -> list[str]:
    """The items of the lists in a text, each as one line."""
    lines = re.findall(r"^(?:-|\d+\.) (.*(?:\n  .*)*)", text, flags=re.MULTILINE)
    return [prose(line) for line in lines]


HEADINGS = re.findall(r"^### `.*` \(0x.*\)$", DOCUMENT, flags=re.MULTILINE)
"""The headings of messages: each names a request, its reply, or both."""


def named(heading: str) -> list[tuple[str, int]]:
    """The messages in a heading, with their kinds."""
    assert re.fullmatch(r"### `\w+` \(0x[0-9a-f]{2}\)(, `\w+` \(0x[0-9a-f]{2}\))?", heading), heading
    return [(name, int(kind, 16)) for name, kind in re.findall(r"`(\w+)` \(0x(..)\)", heading)]


def section_of(cls: type[Message]) -> str:
    (heading,) = (one for one in HEADINGS if f"`{cls.__name__}`" in one)
    return section(heading)


def lists_of_fields(text: str) -> list[list[tuple[str, str, str]]]:
    """The lists of fields in a text: each field's name, type and default."""
    field = re.compile(r"- `(\w+)` \((\w+)(?:, (\w+))?\)(?:$|: )")
    found = []
    for paragraph in text.split("\n\n"):
        if paragraph.lstrip("\n").startswith("- `"):
            matches = [field.match(f"- {item}") for item in items(paragraph)]
            assert all(matches), paragraph
            found.append([(one[1], one[2], one[3] or "") for one in matches if one])
    return found


def shown(default: Any) -> str:
    if default is attrs.NOTHING:
        return ""
    if not isinstance(default, str | int | float):  # what makes an empty list
        assert default.factory() == []
        return "empty"
    return {"": "empty", True: "true", False: "false"}[default] if isinstance(default, str | bool) else str(default)


# Messages


def test_the_messages_of_the_document_are_those_of_the_code() -> None:
    described = [one for heading in HEADINGS for one in named(heading)]
    assert sorted(described) == sorted((cls.__name__, kind) for kind, cls in KINDS.items())


@pytest.mark.parametrize("heading", HEADINGS)
def test_the_fields_of_messages_are_described_with_type_and_default(heading: str) -> None:
    expected = [
        [(field.name, TYPES[field.type], shown(field.default)) for field in attrs.fields(KINDS[kind])]
        for _, kind in named(heading)
    ]
    if "The reply has the same fields" in prose(section(heading)):
        request, reply = expected
        assert request == reply
        expected = [request]
    assert lists_of_fields(section(heading)) == [fields for fields in expected if fields]


@pytest.mark.parametrize("heading", HEADINGS)
def test_a_field_that_came_later_says_so(heading: str) -> None:
    marked = [re.match(r"`(\w+)` \(.*?\): \*1\.1\*;", item) for item in items(section(heading))]
    assert [one[1] for one in marked if one] == [
        field.name for _, kind in named(heading) for field in attrs.fields(KINDS[kind]) if field.metadata.get("since")
    ]


@every_message
def test_a_request_names_its_reply(cls: type[Message]) -> None:
    text = prose(section_of(cls))
    assert ("It has no reply." in text) == (cls in ONE_WAY)
    if issubclass(cls, Request) and cls in REPLIES:
        reply = REPLIES[cls]
        (heading,) = (one for one in HEADINGS if f"`{cls.__name__}`" in one)
        is_beside = [name for name, _ in named(heading)] == [cls.__name__, reply.__name__]
        assert is_beside != (f"Answered by `{reply.__name__}`" in text)
        if reply.CAPABILITY:  # what needs none may answer any request
            assert reply.CAPABILITY == cls.CAPABILITY


def test_a_message_without_fields_says_so() -> None:
    without = {cls for cls in KINDS.values() if not attrs.fields(cls)}
    requests = {cls for cls in KINDS.values() if issubclass(cls, Request)}
    assert {cls for cls in requests if "It has no fields." in prose(section_of(cls))} == without


def test_the_types_are_those_that_fields_have() -> None:
    assert [item.split("`")[1] for item in items(section("### Types"))] == list(TYPES.values())
    assert {TYPES[field.type] for cls in KINDS.values() for field in attrs.fields(cls)} == set(TYPES.values())


def test_the_special_numbers_are_those_of_the_code() -> None:
    assert MISSING == 2**64 - 1
    assert "2^64 - 1 for a key that is not there" in prose(section_of(KINDS[0x83]))
    assert NO_CHECKSUM == 0
    assert "0 means that the block has none" in prose(section("### Checksums"))


# Frames and the conversation


def test_the_header_is_laid_out_as_described() -> None:
    fields = layout(section("## Frames"))
    lengths = [int(row[1]) for row in fields]
    assert [int(row[0]) for row in fields] == [sum(lengths[:index]) for index in range(len(lengths))]
    assert sum(lengths) == codec.HEADER_BYTES
    named = dict(zip([row[2] for row in fields], lengths, strict=True))
    frame = codec.encode_head(ErrorReply(1, ""), request_id=0x01020304, payload_bytes=2**40 + 5, deadline_us=2**50 + 6)
    found: dict[str, bytes] = {}
    for name, length in named.items():
        found[name], frame = frame[:length], frame[length:]
    assert found["magic"] == codec.MAGIC == b"INFS"
    assert found["version"] == bytes([MAJOR])
    assert found["kind"] == bytes([ErrorReply.KIND])
    assert found["flags"] == bytes(2)
    assert found["request_id"] == (0x01020304).to_bytes(4, "little")
    assert frame[int.from_bytes(found["body_bytes"], "little") :].strip(b"\0") == b""
    assert found["payload_bytes"] == (2**40 + 5).to_bytes(8, "little")
    assert found["deadline_us"] == (2**50 + 6).to_bytes(8, "little")


def test_the_header_and_the_padding_are_as_long_as_described() -> None:
    text = section("## Frames")
    assert f"a header of {codec.HEADER_BYTES} bytes" in text
    assert f"the next multiple of {codec.ALIGNMENT_BYTES} bytes" in text


def test_there_are_at_most_as_many_shards_as_described() -> None:
    assert f"There are at most {MOST_SHARDS}." in prose(section_of(HelloReply))


# Versions


def test_the_version_and_the_offer_are_as_described() -> None:
    text = section("## Versions")
    assert f"This is version {MAJOR}.{MINOR}: major version {MAJOR}, minor version {MINOR}." in prose(text)
    assert "\n    2^63 + capabilities * 2^16 + minor version\n" in text
    assert OFFER.to_number() == 2**63 + OFFER.capabilities.value * 2**16 + MINOR
    assert f"the last release, {MAJOR}.{LAST_RELEASE.minor}," in prose(text)
    assert f"the capabilities 1 to {max(one.value for one in LAST_RELEASE.capabilities)}, and" in prose(text)


def test_the_capabilities_are_those_of_the_code() -> None:
    described = [
        re.fullmatch(r"(\d+) `(\w+)`: (.*)", item) for item in items(section("## Versions").partition("\n### ")[0])
    ]
    requests = [cls for _, cls in sorted(KINDS.items()) if issubclass(cls, Request)]
    assert [(int(one[1]), one[2]) for one in described if one] == [(one.value, one.name) for one in Capability]
    for capability, one in zip(Capability, described, strict=True):
        assert one is not None
        names = set(re.findall(r"`(\w+)`", one[3])) - {"MapArenasReply"}
        assert names == {cls.__name__ for cls in requests if capability in cls.CAPABILITY}


def test_the_messages_that_ignore_newer_fields_are_those_of_the_code() -> None:
    text = prose(section("## Versions"))
    refusing = text.partition("and in every reply except ")[2].partition(".")[0]
    assert "Newer fields are ignored in `Hello`," in text
    for cls in KINDS.values():
        is_exception = f"`{cls.__name__}`" in refusing
        ignores = cls is Hello or (not issubclass(cls, Request) and not is_exception)
        assert (cls.NEWER_FIELDS is NewerFields.IGNORED) == ignores, cls


@pytest.mark.parametrize(
    ("heading", "table"),
    [("### A server's states", SERVER), ("### A client's states", CLIENT)],
    ids=["server", "client"],
)
def test_the_tables_of_states_are_those_that_the_code_runs_on(
    heading: str, table: dict[State, dict[Event, State]]
) -> None:
    text = section(heading)
    described: dict[str, dict[str, str]] = {}
    for name, _, events in (item.partition(": ") for item in items(text)):
        pairs = [event.replace("`", "").split(" → ") for event in events.split("; ")]
        described[name] = dict(pairs)
    everywhere = Event.FATAL if table is SERVER else Event.END
    assert prose(text).startswith(
        "A fatal error leads from every state to CLOSED."
        if table is SERVER
        else "The end of the stream, or closing it, leads from every state to CLOSED."
    )
    assert all(follows[everywhere] is State.CLOSED for follows in table.values())
    expected = {
        state.name: {
            event.value.replace("`", ""): after.name for event, after in follows.items() if event is not everywhere
        }
        for state, follows in table.items()
    }
    assert described == {name: follows for name, follows in expected.items() if follows}
    for state in State:
        attribute = state.server if table is SERVER else state.client
        assert attribute == table.get(state, {})


# Errors


def errors_described() -> list[str]:
    """The list of errors, each with its code first."""
    return re.findall(r"^\d+\. `(?:.|\n  +)*", section("### Errors"), flags=re.MULTILINE)


def test_every_error_code_is_in_the_list_and_no_other() -> None:
    travelling = {name: cls.code for name, cls in ERRORS.items() if issubclass(cls, InfiniStoreException)}
    described = [re.match(r"(\d+)\. `(\w+)`: ", one) for one in errors_described()]
    assert {one[2]: int(one[1]) for one in described if one} == travelling


def test_an_error_that_is_a_protocol_error_says_so() -> None:
    for one in errors_described():
        name = one.split("`")[1]
        derived = issubclass(ERRORS[name], errors.ProtocolError) and name != "ProtocolError"
        assert one.strip().endswith("a `ProtocolError`") == derived


# Limits


def test_the_limits_are_those_of_the_code() -> None:
    assert dict(item.replace("`", "").rsplit(": ", 1) for item in items(section("### Limits"))) == {
        "one key": f"1 to {MAX_KEY_BYTES} bytes of UTF-8",
        "keys in one message": f"{MAX_JOINED_KEYS:,}",
        "any other text": f"{MAX_KEY_BYTES} characters",
        "entries in one map; only a StatisticsReply has maps inside a map": f"{codec.MAX_FIELDS}",
        "in a StatisticsReply: maps and lists, items in one list": (
            f"{codec.MAX_STATISTICS_NODES}, {codec.MAX_LIST_ITEMS}"
        ),
        "the body of a Hello": f"{server_connection.MAX_HELLO_BYTES:,} bytes",
        "the body of another request": f"max_body_bytes, {MAX_BODY_BYTES // MIB} MiB",
        "the body of a reply, for the clients here": f"{client_connection.MAX_REPLY_BODY_BYTES // MIB} MiB",
        "the payload of a Put, a GetReply, a LeaseReply or an RdmaGetReply": (
            "the larger of max_batch_bytes and max_value_bytes, and 8 bytes for each of max_batch_keys"
        ),
        "the payload that a server drops to keep a connection": f"{session.DISCARDED_BYTES // MIB} MiB",
        "the keys of one KeysReply": f"{CoreLimits().max_page_keys:,}",
        "the text of an error": "1000 characters",
    }


def test_the_times_are_those_of_the_code() -> None:
    limits = SessionLimits(max_body_bytes=0, max_payload_bytes=0)
    deadlines = prose(section("### Deadlines"))
    rate = f"{limits.least_bytes_per_s / MIB:g} MiB/s"
    assert f"{limits.grace_s:g} s and then as long as the bytes take at {rate}" in deadlines
    assert f"A `Hello` has to come within {limits.grace_s:g} s" in deadlines
    assert f"any other reply may take {limits.transfer_s(MAX_BODY_BYTES, 0):g} s" in deadlines
    assert f"or for {limits.grace_s:g} s if there is none" in deadlines
    assert conversation.LINGER_S == 1
    assert "reads and drops what still arrives for at most a second" in prose(section("### Errors"))
    assert f"If at most {session.DISCARDED_BYTES // MIB} MiB of it have not arrived" in prose(section("### Errors"))
    assert f"Over {CoreLimits().max_hold_s:g} s" in prose(section_of(KINDS[0x05]))


# Tables in shared memory


def test_the_tables_in_shared_memory_are_laid_out_as_described() -> None:
    removals, own = section("### Tables in shared memory").split("**The connection's own table.**")
    columns = [
        f"{8 + shared_tables.HAZARD_SLOTS * column} to {7 + shared_tables.HAZARD_SLOTS * (column + 1)}"
        for column in range(4)
    ]
    assert [row[0] for row in layout(removals)] == ["0", "1 to 7", "8 and on"]
    assert [row[0] for row in layout(own)] == ["0", "1", "2", "3", "4", "5", "6 and 7", *columns]
    log_bytes = shared_tables.LOG_BYTES
    assert f"The file has {shared_tables.READER_BYTES:,} bytes" in prose(own)
    assert f"{shared_tables.HAZARD_SLOTS} slots" in prose(own)
    assert f"the {log_bytes:,} bytes from byte {shared_tables.HAZARD_BYTES:,} of" in prose(own)
    assert f"is at *n* mod {log_bytes:,}." in prose(own)


@pytest.mark.parametrize("pool_bytes", [2**20, 2**36])
@given(data=st.data())
def test_the_entry_of_a_place_is_found_as_described(pool_bytes: int, data: st.DataObject) -> None:
    formula = "(((a * 2^48 + offset + a * 0x9e3779b97f4a7c15) mod 2^64) / granule_bytes) mod entries"
    assert formula in prose(section("### Tables in shared memory"))
    granule_bytes = shared_tables.granule_bytes_for(pool_bytes)
    memory = memoryview(bytearray(shared_tables.removal_table_bytes(pool_bytes)))
    numbers = memory.cast("Q")
    entries = 1 << (len(numbers) - 8).bit_length() - 1
    table = shared_tables.RemovalTable(memory, granule_bytes)
    for _ in range(3):
        a, offset = data.draw(st.integers(0, 2**16 - 1)), data.draw(st.integers(0, 2**48 - 1))
        table.note([pack_offset(a, offset)])
        entry = (((a * 2**48 + offset + a * 0x9E3779B97F4A7C15) % 2**64) // granule_bytes) % entries
        assert numbers[8 + entry] == numbers[0] == table.count


# The whole


def test_every_name_in_the_document_exists() -> None:
    fields = {field.name for cls in KINDS.values() for field in attrs.fields(cls)}
    header = {row[2] for row in layout(section("## Frames"))}
    known = {cls.__name__ for cls in KINDS.values()} | set(ERRORS) | fields | header | set(TYPES.values())
    elsewhere = {
        "INFS",
        "infinistore/protocol/",
        "stats()",
        "server",
        "store",
        "disk",
        "drain",
        "quarantined_bytes",
        "--shm-writes off",
    }
    elsewhere |= {"InfiniBand", "Ethernet", "--disk-wait"}  # values of a field, and a setting
    elsewhere |= {str(one.name) for one in Capability}
    used = set(re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", DOCUMENT, flags=re.DOTALL)))
    assert used - known - elsewhere == set()
    assert (Path(__file__).parents[2] / "infinistore/protocol/").is_dir()


def test_the_worked_example_is_what_the_code_sends() -> None:
    example = section("## Worked example").partition("```text\n")[2].partition("\n```")[0]
    assert example == worked_example()
