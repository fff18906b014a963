"""A file that lists the nodes, replaced as people and Kubernetes do it."""

import json
import logging
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio

from infinistore.cluster.locate import FilePlace
from infinistore.cluster.membership import View
from infinistore.cluster_io.memberships import FileMembership
from tests.server.running import until


def listing(*names: str) -> str:
    return json.dumps({"nodes": [{"id": name, "address": f"{name}:1"} for name in names]})


class Views:
    """The views of a membership, as they come."""

    def __init__(self, membership: FileMembership) -> None:
        self.membership = membership
        self._send, self._receive = trio.open_memory_channel[View](100)
        membership.add_listener(self._send.send_nowait)

    async def next(self) -> str:
        view = await self._receive.receive()
        assert self.membership.view == view
        return " ".join(node.id for node in view.nodes)


@asynccontextmanager
async def watching(path: Path) -> AsyncIterator[Views]:
    views = Views(FileMembership(FilePlace(path)))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(views.membership.run)
        yield views
        nursery.cancel_scope.cancel()


def replace(path: Path, text: str) -> None:
    new = path.with_suffix(".new")
    new.write_text(text)
    new.replace(path)


async def test_a_file_is_read_again_when_it_is_replaced_or_written(tmp_path: Path) -> None:
    path = tmp_path / "nodes.json"
    path.write_text(listing("a"))
    async with watching(path) as views:
        assert await views.next() == "a"
        replace(path, listing("a", "b"))
        assert await views.next() == "a b"
        path.write_text(listing("c"))
        assert await views.next() == "c"
        assert views.membership.view.epoch == 2
        assert views.membership.age_s < 60


async def test_a_file_that_kubernetes_projects_is_read_again_when_its_link_moves(tmp_path: Path) -> None:
    for version in ("1", "2"):
        (tmp_path / version).mkdir()
        (tmp_path / version / "nodes.json").write_text(listing("v" + version))
    (tmp_path / "..data").symlink_to("1")
    (tmp_path / "nodes.json").symlink_to("..data/nodes.json")
    async with watching(tmp_path / "nodes.json") as views:
        assert await views.next() == "v1"
        (tmp_path / "..data_tmp").symlink_to("2")
        os.replace(tmp_path / "..data_tmp", tmp_path / "..data")
        assert await views.next() == "v2"


async def test_a_link_into_another_folder_is_followed(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "here").mkdir()
    (tmp_path / "there" / "nodes.json").write_text(listing("a"))
    (tmp_path / "here" / "nodes.json").symlink_to(tmp_path / "there" / "nodes.json")
    async with watching(tmp_path / "here" / "nodes.json") as views:
        assert await views.next() == "a"
        replace(tmp_path / "there" / "nodes.json", listing("b"))
        assert await views.next() == "b"


@pytest.mark.parametrize("broken", ['{"nodes"', "[]", None])
async def test_a_broken_file_keeps_the_view_and_is_told_once(
    tmp_path: Path, broken: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "infinistore.cluster")
    path = tmp_path / "nodes.json"
    path.write_text(listing("a"))
    async with watching(path) as views:
        assert await views.next() == "a"
        if broken is None:
            path.unlink()
        else:
            replace(path, broken)
        await until(lambda: caplog.records)
        (tmp_path / "another").touch()  # the folder changes, and the file does not
        replace(path, listing("b"))
        assert await views.next() == "b"
        assert views.membership.problem == ""
    assert len(caplog.records) == 1
    assert str(path) in caplog.records[0].getMessage()


async def test_a_file_that_is_not_there_yet_is_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "nodes.json"
    async with watching(path) as views:
        await trio.testing.wait_all_tasks_blocked()
        replace(path, listing("a"))
        assert await views.next() == "a"
