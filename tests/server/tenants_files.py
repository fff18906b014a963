"""Tenants files, and the tokens of the tenants in them."""

import os
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import infinistore
from infinistore.access.tenants import digest_of, make_token
from infinistore.client.api.store import AsyncStore
from tests.server.running import RunningServer

__all__ = ["TOKENS", "Serving", "store_of", "text_of", "write"]

TOKENS = {name: make_token(name, os.urandom) for name in ("ann", "ben", "cleo", "ops")}
Serving = Callable[..., AbstractAsyncContextManager[RunningServer]]


def text_of(groups: str = "", **tenants: dict[str, str]) -> str:
    """A file with these tenants, who may do everything unless it says otherwise."""
    lines = [f"{groups}tenants:" if tenants else f"{groups}tenants: {{}}"]
    for name, given in tenants.items():
        keys = {"roles": "[read, write, monitor, admin]", **given}
        lines += [f"  {name}:", f"    tokens: [{digest_of(TOKENS[name])}]", *(f"    {k}: {v}" for k, v in keys.items())]
    return "\n".join(lines) + "\n"


def write(folder: Path, text: str) -> Path:
    """Write the tenants file of a folder, as only its owner may read it."""
    file = folder / "tenants.yaml"
    file.write_text(text)
    file.chmod(0o600)
    return file


def store_of(server: RunningServer, name: str) -> AbstractAsyncContextManager[AsyncStore]:
    """A client of a tenant, which takes the best way there is."""
    return infinistore.open_store(f"infinistore://127.0.0.1:{server.server.addresses.port}", token=TOKENS[name])
