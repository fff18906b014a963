"""How a store is opened: the options of `open_store`, from its arguments and from the URL."""

import os
import socket
from collections.abc import Mapping
from typing import Any, Literal, TypedDict

import attrs

from infinistore.client.address import Address, near, parse_address, read_token_file
from infinistore.errors import ConfigError

__all__ = ["Options", "StoreOptions", "make_options"]


class StoreOptions(TypedDict, total=False):
    """The keyword arguments of every `open_store`. `infinistore.open_store` tells what they mean."""

    deadline_s: float
    verify: Literal["always", "never"]
    token: str
    max_connections: int
    spin_us: int
    inline_bytes: int
    copy_threads: int
    known_blocks: int
    name: str
    lazy: bool
    device: str
    ib_port: int
    gid_index: int
    staging_bytes: int
    pool_bytes: int
    minimal_allocate_bytes: int
    allocator: str
    huge_pages: bool


_LONGEST_DEADLINE_S = 1e9  # 31 years; the timeouts of sockets and locks cannot be much longer
_MAX_TEXT_BYTES = 1024
_EMBEDDED = ("pool_bytes", "minimal_allocate_bytes", "allocator", "huge_pages")


@attrs.frozen(kw_only=True)
class Options:
    """The options of `open_store`; see there."""

    deadline_s: float = 30.0
    verify: Literal["always", "never"] = "always"
    token: str = attrs.field(default="", repr=False)
    max_connections: int = 8
    spin_us: int = 400
    inline_bytes: int = 64 * 1024
    copy_threads: int = 2
    known_blocks: int = 65536
    name: str = attrs.field(factory=lambda: f"{socket.gethostname()}:{os.getpid()}")
    lazy: bool = False
    device: str = ""
    ib_port: int = 1
    gid_index: int = -1
    staging_bytes: int = 16 * 1024 * 1024
    pool_bytes: int = 256 * 1024 * 1024
    minimal_allocate_bytes: int = 64 * 1024
    allocator: str = "bitmap"
    huge_pages: bool = False

    def __attrs_post_init__(self) -> None:
        if not (isinstance(self.deadline_s, int | float) and 0 < self.deadline_s <= _LONGEST_DEADLINE_S):
            raise ConfigError(
                f"deadline_s must be a number of seconds above 0, at most {_LONGEST_DEADLINE_S:g}, not"
                f" {self.deadline_s!r}"
            )
        if self.verify not in ("always", "never"):
            raise ConfigError(f"verify must be 'always' or 'never', not {self.verify!r}")
        for name in ("spin_us", "inline_bytes", "known_blocks"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 0:
                raise ConfigError(f"{name} must be a whole number, 0 or more, not {value!r}")
        for name in (
            "max_connections",
            "copy_threads",
            "ib_port",
            "staging_bytes",
            "pool_bytes",
            "minimal_allocate_bytes",
        ):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ConfigError(f"{name} must be a whole number above 0, not {value!r}")
        if not isinstance(self.gid_index, int) or self.gid_index < -1:
            raise ConfigError(f"gid_index must be a whole number, -1 for none, not {self.gid_index!r}")
        for name in ("token", "name", "device"):
            value = getattr(self, name)
            if not isinstance(value, str):
                raise ConfigError(f"{name} must be a text, not {type(value).__name__}")
            if len(value.encode(errors="surrogatepass")) > _MAX_TEXT_BYTES:
                raise ConfigError(f"{name} must have at most {_MAX_TEXT_BYTES} bytes")


def make_options(url: str | None, given: StoreOptions) -> tuple[Address | None, Options]:
    """Put arguments and URL together; arguments win. Without a URL there is no address: the store is embedded.

    Raises:
        ConfigError: a URL or an option that cannot be used, or one that means nothing here.
    """
    if url is None:
        return None, _options(given)
    for name in _EMBEDDED:
        if name in given:
            raise ConfigError(f"{name} is for an embedded store; that of {url} was chosen when its server was started")
    address = parse_address(url)
    texts = dict(address.options)
    options: dict[str, Any] = {}
    if "token_file" in texts:
        options["token"] = read_token_file(texts.pop("token_file"))
    elif "INFINISTORE_TOKEN" in os.environ:
        options["token"] = os.environ["INFINISTORE_TOKEN"]
    for name, text in texts.items():
        try:
            options[name] = _FROM_TEXT[name](text)
        except ValueError:
            raise ConfigError(f"the option {name}={text} in {url} is no number") from None
    return address, _options({**options, **given})


_FROM_TEXT: dict[str, Any] = {
    "deadline_s": float,
    "max_connections": int,
    "spin_us": int,
    "verify": str,
    "name": str,
    "inline_bytes": int,
    "copy_threads": int,
    "known_blocks": int,
    "device": str,
    "ib_port": int,
    "gid_index": int,
    "staging_bytes": int,
}


def _options(given: Mapping[str, Any]) -> Options:
    known = attrs.fields_dict(Options)
    for name in given:
        if name not in known:
            raise ConfigError(f"unknown option {name!r}{near(name, tuple(known))}")
    return Options(**given)
