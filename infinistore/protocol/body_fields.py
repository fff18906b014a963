"""Functions, made by cattrs, that turn a message into a map of fields and back.

`STRUCTURE` and `UNSTRUCTURE` are for a peer of this release. If a field is newer than
the first minor version, its metadata says so with `since`. A sender leaves such a field
out if it has its default, so every release understands a message that does not use it.
"""

import sys
from array import array
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import attrs
from cattrs import Converter
from cattrs.fns import identity
from cattrs.gen import make_dict_unstructure_fn, override

from infinistore.errors import InvalidRequest, VersionMismatch
from infinistore.keys import join_keys, split_keys
from infinistore.protocol.fields import Keys, Numbers, Tree
from infinistore.protocol.messages import KINDS, Exists, Get, Message, Put
from infinistore.protocol.versions import MINOR, OFFER, Capability, NewerFields, Offer

__all__ = [
    "STRUCTURE",
    "UNSTRUCTURE",
    "Structure",
    "Unstructure",
    "structure_for",
    "structure_function",
    "unstructure_for",
    "unstructure_function",
]

_REMEDY = "install the same release of infinistore on both"

Structure: TypeAlias = Mapping[type[Message], Callable[[Any, Any], Any]]
"""Maps each message to the function that makes it from a map of fields."""


class Unstructure(dict[type[Message], Callable[[Any], Any]]):
    """Maps each message that a peer understands to the function that unstructures it.

    Raises:
        VersionMismatch: the peer does not understand the message.
    """

    def __missing__(self, cls: type[Message]) -> Callable[[Any], Any]:
        raise VersionMismatch(f"the peer does not understand {cls.__name__}; {_REMEDY}")


def structure_for(peer: Offer) -> Structure:
    """Return the functions that decode what this peer sends.

    They ignore fields that are newer than this release where the message allows that.
    """
    return STRUCTURE if peer.minor <= MINOR else _STRUCTURE_OF_NEWER


def unstructure_for(peer: Offer) -> Unstructure:
    """Return the functions that encode what is sent to this peer."""
    if peer.minor >= MINOR and peer.capabilities == OFFER.capabilities:
        return UNSTRUCTURE
    understood = [cls for cls in KINDS.values() if _understands(peer, cls)]
    return Unstructure({cls: unstructure_function(cls, peer.minor) for cls in understood})


def _understands(peer: Offer, cls: type[Message]) -> bool:
    needed: Capability | None = getattr(cls, "CAPABILITY", None)
    return needed is None or bool(needed & peer.capabilities)


def structure_function(cls: type[Any], *, of_newer: bool = False) -> Callable[[Any, Any], Any]:
    """Return the function that makes a message from a map of fields.

    `of_newer`: the map comes from a peer of a newer release.
    """
    strict: Callable[[Any, Any], Any] = _converter.get_structure_hook(cls)
    if not of_newer or cls.NEWER_FIELDS is NewerFields.REFUSED:
        return strict
    known = [field.name for field in attrs.fields(cls)]

    def structure(fields: Any, cls: Any) -> Any:
        if bytes in map(type, fields):  # msgpack allows names of bytes, too
            raise TypeError("a name that is no text")
        return strict({name: fields[name] for name in known if name in fields}, cls)

    return structure


def unstructure_function(cls: type[Any], minor: int = MINOR) -> Callable[[Any], Any]:
    """Return the function that makes a map of fields for a peer of this minor
    version.
    """
    since = {field.name: field.metadata.get("since", 0) for field in attrs.fields(cls)}
    optional: Any = {name: override(omit_if_default=True) for name, version in since.items() if version}
    if not optional:
        return _converter.get_unstructure_hook(cls)
    plain = make_dict_unstructure_fn(cls, _converter, **optional)
    unknown = [name for name, version in since.items() if version > minor]
    may_go = cls.NEWER_FIELDS is NewerFields.IGNORED

    def unstructure(message: Any) -> Any:
        fields = plain(message)
        for name in unknown:
            if name in fields and not may_go:
                raise VersionMismatch(f"the peer does not know the field {name!r} of {cls.__name__}; {_REMEDY}")
            fields.pop(name, None)
        return fields

    return unstructure if unknown else plain


def _exact(expected: type) -> Callable[[Any, Any], Any]:
    """Refuse what cattrs would convert, such as the text "5" to a number."""

    def structure(value: Any, _: Any) -> Any:
        if type(value) is not expected:
            raise TypeError(f"expected {expected.__name__}, got {type(value).__name__}")
        return value

    return structure


def _structure_keys(value: Any, _: Any) -> Any:
    if type(value) is not str:
        raise TypeError(f"expected joined keys, got {type(value).__name__}")
    try:
        return split_keys(value)
    except ValueError as error:
        raise InvalidRequest(str(error)) from None


def _structure_numbers(value: Any, _: Any) -> Any:
    if type(value) is not bytes:
        raise TypeError(f"expected packed numbers, got {type(value).__name__}")
    packed = array("Q")
    packed.frombytes(value)  # ValueError unless a multiple of eight
    if sys.byteorder == "big":
        packed.byteswap()
    return packed


def _unstructure_numbers(value: Any) -> bytes:
    packed: array[int] = value
    if sys.byteorder == "big":
        packed = packed[:]
        packed.byteswap()
    return packed.tobytes()


def _quick_exists(fields: Any, cls: Any) -> Any:
    if len(fields) == 2:
        keys, touch = fields.get("keys"), fields.get("touch")
        if type(keys) is str and type(touch) is bool:
            return Exists(_structure_keys(keys, None), touch)
    return _GENERATED[Exists](fields, cls)


def _quick_get(fields: Any, cls: Any) -> Any:
    if len(fields) == 3:
        keys, capacities, checksums = fields.get("keys"), fields.get("capacities"), fields.get("checksums")
        if type(keys) is str and type(capacities) is bytes and type(checksums) is bool:
            return Get(_structure_keys(keys, None), _structure_numbers(capacities, None), checksums)
    return _GENERATED[Get](fields, cls)


def _quick_put(fields: Any, cls: Any) -> Any:
    if len(fields) == 4:
        keys, sizes = fields.get("keys"), fields.get("sizes")
        checksums, replace = fields.get("checksums"), fields.get("replace")
        if type(keys) is str and type(sizes) is bytes and type(checksums) is bool and type(replace) is bool:
            return Put(_structure_keys(keys, None), _structure_numbers(sizes, None), checksums, replace)
    return _GENERATED[Put](fields, cls)


def _make_converter() -> Converter:
    converter = Converter(detailed_validation=False, forbid_extra_keys=True)
    for plain in (int, float, str, bytes, bool):
        converter.register_structure_hook(plain, _exact(plain))
        converter.register_unstructure_hook(plain, identity)  # which is not even called
    converter.register_structure_hook(Tree, _exact(dict))
    converter.register_unstructure_hook(Tree, identity)
    # One hook for the whole batch: structuring a thousand keys one by one costs 200 us.
    converter.register_structure_hook(Keys, _structure_keys)
    converter.register_unstructure_hook(Keys, join_keys)
    converter.register_structure_hook(Numbers, _structure_numbers)
    converter.register_unstructure_hook(Numbers, _unstructure_numbers)
    return converter


_converter = _make_converter()
# Looked up once: the converter's own lookup takes as long as decoding a short message.
_GENERATED: dict[type[Message], Callable[[Any, Any], Any]] = {cls: structure_function(cls) for cls in KINDS.values()}
# What cattrs generates takes twice as long; what is not quite as usual is left to it.
STRUCTURE: dict[type[Message], Callable[[Any, Any], Any]] = {
    **_GENERATED,
    Exists: _quick_exists,
    Get: _quick_get,
    Put: _quick_put,
}
_STRUCTURE_OF_NEWER: Structure = {cls: structure_function(cls, of_newer=True) for cls in KINDS.values()}
UNSTRUCTURE = Unstructure({cls: unstructure_function(cls) for cls in KINDS.values()})
