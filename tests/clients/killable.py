"""A client in a process of its own that does what it is told, and can be told to stop
anywhere inside, to be killed.

    python tests/clients/killable.py URL

Each line on standard input is a command in JSON, each line on standard output what
became of it. A command with `halt` stops at that step of it for ever, and says so:
before bytes move on the socket, in the middle of what is sent, between two blocks that
are copied or hashed, on both sides of a commit word, and inside the block of a lease or
a reservation.
"""

import json
import os
import random
import signal
import sys
import warnings
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from xxhash import xxh3_64_hexdigest

from infinistore import InfiniStoreException, blocking
from infinistore.blocking import BlockingStore
from infinistore.client.memory import copying as copy_threads
from infinistore.client.memory.copying import copy_blocks, hash_blocks
from infinistore.client.movers.shm import mover as shared_memory
from infinistore.client.movers.shm.known_blocks import KnownReads
from infinistore.protocol.messages import Numbers
from infinistore.transports.sockets.blocking_streams import BlockingSocketStream

__all__ = ["digest_of", "value_of"]


def value_of(seed: int, size: int) -> bytes:
    """The bytes that this seed stands for."""
    return random.Random(seed).randbytes(size)


def digest_of(seed: int, size: int) -> str:
    """What `get` and `look` tell of them."""
    return xxh3_64_hexdigest(value_of(seed, size))


def say(what: dict[str, Any]) -> None:
    """Answer a command."""
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


class Steps:
    """Counts the steps of a command, and stops at the one that was chosen: the first of
    a name, or one by its number.
    """

    def __init__(self) -> None:
        self.halt: int | str | None = None

    def step(self, name: str = "") -> None:
        if self.halt is None or (isinstance(self.halt, str) and self.halt != name):
            return
        if isinstance(self.halt, str) or not self.halt:
            say({"halted": True})
            while True:
                signal.pause()
        self.halt -= 1


steps = Steps()


def with_steps() -> None:
    """Have the client count its steps."""
    send_all, receive_into = BlockingSocketStream.send_all, BlockingSocketStream.receive_into

    def sending(stream: BlockingSocketStream, views: Sequence[memoryview]) -> None:
        steps.step()
        if steps.halt == 0:
            stream.socket.send(views[0][: len(views[0]) // 2])
        steps.step()
        send_all(stream, views)

    def receiving(stream: BlockingSocketStream, views: Sequence[memoryview]) -> int:
        steps.step()
        return receive_into(stream, views)

    async def copying(sources: Sequence[memoryview], targets: Sequence[memoryview], *, hash_targets: bool) -> list[int]:
        checksums: list[int] = []
        for source, target in zip(sources, targets, strict=True):
            steps.step("copy")
            checksums += await copy_blocks([source], [target], hash_targets=hash_targets)
        steps.step()
        return checksums

    async def hashing(views: Sequence[memoryview]) -> list[int]:
        checksums: list[int] = []
        for view in views:
            steps.step()
            checksums += await hash_blocks([view])
        return checksums

    commit = KnownReads.commit

    def committing(own_reads: KnownReads, reservation: int, checksums: Numbers) -> None:
        steps.step()
        commit(own_reads, reservation, checksums)
        steps.step()

    for owner, name, replacement in (
        (BlockingSocketStream, "send_all", sending),
        (BlockingSocketStream, "receive_into", receiving),
        (copy_threads, "copy_blocks", copying),
        (shared_memory, "hash_blocks", hashing),
        (KnownReads, "commit", committing),
    ):
        setattr(owner, name, replacement)


class Client:
    """The commands. `kept` has slices of leases whose blocks were left, by name: they
    keep the lease.
    """

    def __init__(self, store: BlockingStore) -> None:
        self.store = store
        self.kept: dict[str, list[memoryview | None]] = {}

    def put(self, items: dict[str, list[int]]) -> None:
        self.store.put_many({key: value_of(*what) for key, what in items.items()})

    def reserve(self, items: dict[str, list[int]], fail: bool = False) -> bool:
        try:
            with self.store.reserve({key: size for key, (_, size) in items.items()}) as views:
                for index, what in enumerate(items.values()):
                    steps.step()
                    views[index][:] = value_of(*what)
                steps.step()
                if fail:
                    raise KeyError
        except KeyError:
            return False
        return True

    def get(self, keys: list[str]) -> list[str | None]:
        return [None if value is None else xxh3_64_hexdigest(value) for value in self.store.get_many(keys)]

    def lease(self, keys: list[str], name: str) -> list[str | None]:
        with self.store.lease(keys, verify=True) as views:
            steps.step()
            self.kept[name] = [None if view is None else view[:] for view in views]
        return self.look(name)

    def look(self, name: str) -> list[str | None]:
        return [None if view is None else xxh3_64_hexdigest(view) for view in self.kept[name]]

    def drop(self, name: str) -> None:
        del self.kept[name]
        self.store.exists("anything")

    def delete(self, keys: list[str]) -> int:
        return self.store.delete(keys)

    def fork(self) -> None:
        """A child that dies like a good one, with all it inherited."""
        if not os.fork():
            self.kept.clear()
            sys.exit(0)
        os.wait()


def main(url: str) -> None:
    """Do what standard input says, until it ends."""
    warnings.simplefilter("ignore")
    with_steps()
    with ExitStack() as stack:
        client = Client(stack.enter_context(blocking.open_store(url, inline_bytes=1000)))
        say({"result": "open"})
        for line in sys.stdin:
            command: dict[str, Any] = json.loads(line)
            steps.halt = command.pop("halt", None)
            method = getattr(client, command.pop("do"))
            try:
                say({"result": method(**command)})
            except InfiniStoreException as error:
                say({"error": type(error).__name__})
            steps.halt = None


if __name__ == "__main__":
    main(sys.argv[1])
