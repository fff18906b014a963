"""The bodies of messages about a single block, written and read without msgpack.

They look the same every time: the same names in the same order, one key of less than
256 bytes, one number in each list. So their bytes are those of msgpack, but put
together from constants, in a third of the time. Whatever looks different, in any byte,
is left to `codec`: each function returns None then, and never an error.
"""

import struct
import sys
from array import array
from collections.abc import Callable, Mapping
from typing import Any

from infinistore.protocol.fields import Keys, Numbers
from infinistore.protocol.messages import Get, GetReply, Message, Put, PutReply

__all__ = ["READ", "WRITE"]

_SHORT, _LONG = 32, 256  # from this length in bytes on, msgpack writes the length of a text otherwise
_FIXSTR, _STR8 = 0xA0, 0xD9
_NUMBER = struct.Struct("<Q")
_GET_REPLY = struct.Struct("<9sQ12sQ")

_PUT_KEYS = b"\x84\xa4keys"
_GET_KEYS = b"\x83\xa4keys"
_KEYS_BYTES = len(_PUT_KEYS)
_SIZE = b"\xa5sizes\xc4\x08"
_PUT_FLAGS = {
    (checksums, replace): b"\xa9checksums" + bytes((0xC2 + checksums,)) + b"\xa7replace" + bytes((0xC2 + replace,))
    for checksums in (False, True)
    for replace in (False, True)
}
_PUT_FLAGS_OF = {text: flags for flags, text in _PUT_FLAGS.items()}
_ANY_ROOM = b"\xaacapacities\xc4\x00"
_ROOM = b"\xaacapacities\xc4\x08"
_GET_FLAG = {checksums: b"\xa9checksums" + bytes((0xC2 + checksums,)) for checksums in (False, True)}
_GET_FLAG_OF = {text: flag for flag, text in _GET_FLAG.items()}
_ALL_STORED = b"\x81\xa7skipped\xc4\x00"
_ALL_STORED_REPLY = PutReply(Numbers(array("Q")))
_GET_REPLY_SIZES, _GET_REPLY_CHECKSUMS = b"\x82\xa5sizes\xc4\x08", b"\xa9checksums\xc4\x08"


def _text(key: str) -> bytes | None:
    """Return a key as msgpack writes it; None if it is long."""
    data = key.encode()
    length = len(data)
    if length < _SHORT:
        return bytes((_FIXSTR | length,)) + data
    return bytes((_STR8, length)) + data if length < _LONG else None


def _key_of(body: bytes) -> tuple[str, int] | None:
    """Return the one key of a request, and where what follows it begins."""
    mark = body[_KEYS_BYTES]
    if mark == _STR8:
        start = _KEYS_BYTES + 2
        end = start + body[_KEYS_BYTES + 1]
    else:
        start = _KEYS_BYTES + 1
        end = start + mark - _FIXSTR
        if not start < end < start + _SHORT:
            return None
    key = body[start:end].decode()
    return (key, end) if key and "\0" not in key else None


def _write_put(put: Any) -> bytes | None:
    if len(put.keys) != 1 or len(put.sizes) != 1 or put.ttl_us or put.since:
        return None
    key = _text(put.keys[0])
    return (
        None
        if key is None
        else b"".join((_PUT_KEYS, key, _SIZE, put.sizes.tobytes(), _PUT_FLAGS[put.checksums, put.replace]))
    )


def _read_put(body: bytes) -> Put | None:
    if not body.startswith(_PUT_KEYS) or (found := _key_of(body)) is None:
        return None
    key, at = found
    flags = _PUT_FLAGS_OF.get(body[at + 16 :])
    if flags is None or not body.startswith(_SIZE, at):
        return None
    return Put(Keys([key]), Numbers(array("Q", body[at + 8 : at + 16])), *flags)


def _write_get(get: Any) -> bytes | None:
    rooms = get.capacities
    if len(get.keys) != 1 or len(rooms) > 1:
        return None
    key = _text(get.keys[0])
    if key is None:
        return None
    flag = _GET_FLAG[get.checksums]
    if rooms:
        return b"".join((_GET_KEYS, key, _ROOM, rooms.tobytes(), flag))
    return b"".join((_GET_KEYS, key, _ANY_ROOM, flag))


def _read_get(body: bytes) -> Get | None:
    if not body.startswith(_GET_KEYS) or (found := _key_of(body)) is None:
        return None
    key, at = found
    at += len(_ROOM)
    if body.endswith(_ANY_ROOM, 0, at):
        rooms = b""
    elif body.endswith(_ROOM, 0, at):
        rooms = body[at : at + 8]
        at += 8
    else:
        return None
    flag = _GET_FLAG_OF.get(body[at:])
    return None if flag is None else Get(Keys([key]), Numbers(array("Q", rooms)), flag)


def _write_put_reply(reply: Any) -> bytes | None:
    return None if reply.skipped else _ALL_STORED


def _read_put_reply(body: bytes) -> PutReply | None:
    return _ALL_STORED_REPLY if body == _ALL_STORED else None


def _write_get_reply(reply: Any) -> bytes | None:
    sizes, checksums = reply.sizes, reply.checksums
    if len(sizes) != 1 or len(checksums) != 1:
        return None
    return _GET_REPLY.pack(_GET_REPLY_SIZES, sizes[0], _GET_REPLY_CHECKSUMS, checksums[0])


def _read_get_reply(body: bytes) -> GetReply | None:
    if len(body) != _GET_REPLY.size:
        return None
    first, size, second, checksum = _GET_REPLY.unpack(body)
    if first != _GET_REPLY_SIZES or second != _GET_REPLY_CHECKSUMS:
        return None
    return GetReply(Numbers(array("Q", (size,))), Numbers(array("Q", (checksum,))))


WRITE: Mapping[type[Message], Callable[[Any], bytes | None]]
READ: Mapping[int, Callable[[bytes], Message | None]]
if sys.byteorder == "little":  # as packed numbers are
    WRITE = {Put: _write_put, Get: _write_get, PutReply: _write_put_reply, GetReply: _write_get_reply}
    READ = {Put.KIND: _read_put, Get.KIND: _read_get, PutReply.KIND: _read_put_reply, GetReply.KIND: _read_get_reply}
else:
    WRITE, READ = {}, {}
