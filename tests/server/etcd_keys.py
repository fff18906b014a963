"""What stands in etcd, read and written as by an operator with `etcdctl`, but without a
process: by etcd's gateway for JSON.
"""

import json
from base64 import b64decode, b64encode
from collections.abc import Callable
from typing import Any
from urllib.request import urlopen

import pytest
import trio

from tests.cluster_io.etcd import Etcd
from tests.cluster_io.etcd import needs_etcd as installed

__all__ = ["delete", "needs_etcd", "put", "read"]


def needs_etcd(test: Callable[..., Any]) -> Callable[..., Any]:
    """For tests with the fixture `etcd`, which is a process."""
    marked: Callable[..., Any] = pytest.mark.process(installed(test))
    return marked


async def put(etcd: Etcd, key: str, value: str = "") -> None:
    await _call(etcd, "put", key, value=value)


async def delete(etcd: Etcd, key: str) -> None:
    await _call(etcd, "deleterange", key)


async def read(etcd: Etcd, prefix: str) -> dict[str, bytes]:
    """The values of all keys that begin like this."""
    found = await _call(etcd, "range", prefix, range_end=prefix[:-1] + chr(ord(prefix[-1]) + 1))
    return {b64decode(one["key"]).decode(): b64decode(one.get("value", "")) for one in found.get("kvs", [])}


async def _call(etcd: Etcd, what: str, key: str, **more: str) -> Any:
    fields = {name: b64encode(text.encode()).decode() for name, text in {"key": key, **more}.items()}
    url = f"http://127.0.0.1:{etcd.ports[0]}/v3/kv/{what}"

    def ask() -> Any:
        with urlopen(url, json.dumps(fields).encode()) as answer:
            return json.load(answer)

    return await trio.to_thread.run_sync(ask)
