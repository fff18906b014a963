"""Watches the engines of a router: asks each once a second how many requests wait
there, and follows the file and the announcements that say which engines there are.
"""

import itertools
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import trio

from infinistore.client import AsyncStore
from infinistore.errors import ConfigError, InfiniStoreException
from infinistore.integrations.vllm.announcements import (
    ANNOUNCED_PREFIX,
    READER,
    AnnouncedBlocks,
    AnnouncedEngine,
)
from infinistore.routing.fleet import Fleet, Member, Role
from infinistore.routing.http import Address, Asked, Connect, EngineFailed, HttpLimits, InThread, asking

_log = logging.getLogger("infinistore.router")
_PROBE_S: Final = 1.0
_LIMITS: Final = HttpLimits(connect_s=2.0, first_byte_s=5.0, answer_s=5.0)
_MODELS_EACH: Final = 10
"""Every so many probes, an engine is asked what it serves."""
_ANNOUNCEMENTS_S: Final = 30.0
"""A listing takes a store with many keys a while."""
_MOST_ANNOUNCED: Final = 1000
_MOST_SAID_BYTES: Final = 16 * 1024 * 1024
"""What an engine may say to the router itself."""


class Watcher:
    """Keeps a `Fleet` up to date while it runs.

    `engines` are there from the start to the end. `key` is what engines are shown.
    """

    def __init__(
        self,
        engines: Mapping[str, tuple[Address, Role]],
        *,
        file: Path | None = None,
        store: AsyncStore | None = None,
        announced: bool = False,
        key: str | None = None,
        connect: Connect = Address.connect,
        in_thread: InThread = trio.to_thread.run_sync,
    ) -> None:
        self.fleet = Fleet()
        self._engines = engines
        self._file = file
        self._store = store
        self._uses_announced = announced
        self._key = key
        self._connect = connect
        self._in_thread = in_thread
        self._probing: dict[Member, trio.CancelScope] = {}
        self._from_file: Mapping[str, tuple[Address, Role]] = {}
        self._from_store: Mapping[str, tuple[Address, Role]] = {}
        self._announced: list[AnnouncedEngine] = []
        self._kinds: dict[str, AnnouncedBlocks] = {}
        self._told: set[str] = set()
        self._tasks: trio.Nursery

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Watch the engines until cancelled. It has started when each was asked once.

        Raises:
            ConfigError: the file of the engines cannot be used.
        """
        file = self._file
        if file is not None:
            self._from_file = await self._in_thread(read_engines, file)
        async with trio.open_nursery() as nursery:
            self._tasks = nursery
            await self._refresh()
            if file is not None:
                nursery.start_soon(self._follow_file, file)
            nursery.start_soon(self._follow_announcements)
            task_status.started()

    async def _update(self) -> None:
        """Watch the engines that there are now, and wait until new ones were asked."""
        new, gone = self.fleet.update({**self._from_store, **self._from_file, **self._engines})
        for member in gone:
            self._probing.pop(member).cancel()
            _log.info("an engine is no more", extra={"engine": member.address.url})
        async with trio.open_nursery() as first_probes:
            for member in new:
                self._probing[member] = scope = trio.CancelScope()
                first_probes.start_soon(self._tasks.start, self._watch, member, scope)

    async def _watch(
        self, member: Member, scope: trio.CancelScope, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        with scope:
            for number in itertools.count():
                await self._probe(member, also_models=number % _MODELS_EACH == 0 or not member.is_up)
                if not number:
                    task_status.started()
                await trio.sleep(_PROBE_S)

    async def _probe(self, member: Member, *, also_models: bool) -> None:
        try:
            if also_models:
                await self._ask_for_models(member)
            status, _ = await self.ask(member, b"GET", b"/health")
            if status >= 500:
                raise EngineFailed(f"{member.address.url}/health answers {status}")
            status, said = await self.ask(member, b"GET", b"/metrics")
        except EngineFailed as error:
            self.note_failure(member, error)
            return
        if status == 200:
            member.told_queue(said.decode(errors="replace"))
        if member.answered():
            _log.info("an engine is up", extra={"engine": member.address.url, "models": sorted(member.models)})
            self._learn()

    async def _ask_for_models(self, member: Member) -> None:
        status, said = await self.ask(member, b"GET", b"/v1/models")
        url = member.address.url
        if status in (401, 403):
            raise EngineFailed(f"{url} wants a key; start the router with --engine-key-file")
        try:
            found: Any = json.loads(said)["data"] if status == 200 else None
            cards = {str(one["id"]): one for one in found}
            member.models = {
                name: "" if one.get("parent") else str(one.get("root") or name) for name, one in cards.items()
            }
        except (ValueError, LookupError, TypeError, AttributeError):
            raise EngineFailed(f"{url} is no engine that speaks as OpenAI: /v1/models answers {status}") from None
        member.cards = cards

    async def ask(self, member: Member, method: bytes, target: bytes, body: bytes = b"") -> tuple[int, bytes]:
        """Ask an engine something on the router's own account.

        Raises:
            EngineFailed: it does not answer in time.
        """
        headers = [(b"content-type", b"application/json")] if body else []
        asked = Asked(method, target, headers, body)
        status, said = 0, b""
        with trio.move_on_after(_LIMITS.answer_s) as scope:
            async with asking(member.address, asked, _LIMITS, self._connect, key=self._key) as answer:
                status, said = answer.status, await answer.rest(_MOST_SAID_BYTES)
        if scope.cancelled_caught:
            raise EngineFailed(f"{member.address.url} has not answered within {_LIMITS.answer_s:g} s")
        return status, said

    def note_failure(self, member: Member, error: EngineFailed) -> None:
        """Note that an engine did not answer, and log it if it counts as down now."""
        if member.failed(str(error)):
            _log.warning("an engine is down", extra={"engine": member.address.url, "problem": str(error)})

    async def _follow_file(self, file: Path) -> None:
        problem = ""
        while True:
            await trio.sleep(_PROBE_S)
            try:
                found = await self._in_thread(read_engines, file)
            except ConfigError as error:
                if str(error) != problem:
                    problem = str(error)
                    _log.warning("the engines stay as they were", extra={"problem": problem})
                continue
            problem = ""
            if found != self._from_file:
                self._from_file = found
                await self._update()

    async def _follow_announcements(self) -> None:
        while self._store is not None:
            await trio.sleep(_ANNOUNCEMENTS_S)
            await self._refresh()

    async def _refresh(self) -> None:
        """Follow what engines have announced by now."""
        await self._read_announcements()
        await self._update()
        self._learn()

    async def _read_announcements(self) -> None:
        """Read what engines have announced in the store, if it answers."""
        if self._store is None:
            return
        try:
            keys = await self._store.keys(ANNOUNCED_PREFIX, _MOST_ANNOUNCED)
            values = await self._store.get_many(keys)
        except InfiniStoreException as error:
            self._tell(f"the store does not say which engines there are: {error}")
            return
        self._announced, self._kinds = [], {}
        for key, value in zip(keys, values, strict=True):
            if value is None:
                continue
            if (engine := AnnouncedEngine.read(key, bytes(value))) is not None:
                self._announced.append(engine)
            elif (blocks := AnnouncedBlocks.read(bytes(value))) is not None:
                self._kinds[key.removesuffix(READER)] = blocks
        if self._uses_announced:
            # One whose announcement was evicted stays while it answers.
            up = {member.address.url for member in self.fleet if member.is_up}
            addresses = [Address.of(one.url) for one in self._announced]
            self._from_store = {
                **{url: known for url, known in self._from_store.items() if url in up},
                **{address.url: (address, "both") for address in addresses},
            }

    def _learn(self) -> None:
        if self._store is not None:
            for problem in self.fleet.learn(self._announced, self._kinds):
                self._tell(problem)

    def _tell(self, problem: str) -> None:
        """Log a problem once."""
        if problem not in self._told and len(self._told) < _MOST_ANNOUNCED:
            self._told.add(problem)
            _log.warning("prompts are not looked up as they could be", extra={"problem": problem})


def read_engines(file: Path) -> dict[str, tuple[Address, Role]]:
    """Read a file with an engine in each line: `URL`, `URL prefill` or `URL decode`.

    Raises:
        ConfigError: it cannot be read, or a line is none of these.
    """
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise ConfigError(f"--engines-file {file}: {reason}; write a URL in each line") from None
    found: dict[str, tuple[Address, Role]] = {}
    for number, line in enumerate(text.splitlines(), 1):
        url, *words = line.partition("#")[0].split() or [""]
        if not url:
            continue
        role: Role = "both"
        match words:
            case []:
                pass
            case ["prefill"]:
                role = "prefill"
            case ["decode"]:
                role = "decode"
            case _:
                raise ConfigError(f"--engines-file {file}, line {number}: write URL, URL prefill or URL decode")
        address = Address.of(url, f"--engines-file {file}, line {number}:")
        found[address.url] = (address, role)
    return found
