"""The connector in a cluster: vLLM's scheduler, both halves, and three servers."""

from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.cluster_client.clusters import Cluster
from tests.integrations.owners import Owners

from .marks import NEEDS_VLLM

pytestmark = NEEDS_VLLM

BLOCK = 16
GROUP = 2 * BLOCK
GROUPS = 8
PROMPT = [(7 * i * i + 3 * i) % 1999 + 2 for i in range(GROUPS * GROUP + 3)]


def test_a_group_is_on_one_server_and_a_lost_one_leaves_what_is_before_its_groups(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from .made_engine import MadeEngine, answer_to, open_engine

    owners = Owners(cluster, "{")  # what an engine tells of itself has no tag
    with ExitStack() as stack:

        def open_one(group_tokens: int = GROUP) -> MadeEngine:
            options = {"caching": False, "group_tokens": group_tokens}
            return stack.enter_context(open_engine(cluster.url(), tmp_path, monkeypatch, **options))

        writer = open_one()
        for end in range(GROUP, GROUPS * GROUP + 1, GROUP):
            writer.ask(PROMPT[: end + 3])
            writer.settle()
            assert len(owners.note()) == 4  # two blocks of two layers

        reader, other = open_one(), open_one(2 * GROUP)
        assert reader.ask(PROMPT) == [answer_to(PROMPT)]
        assert reader.external()[1] == GROUPS * GROUP
        assert other.ask(PROMPT) == [answer_to(PROMPT)]
        assert other.external()[1] == 0

        lost = owners.stop_one()
        for times in (1, 2):
            assert reader.ask(PROMPT) == [answer_to(PROMPT)]
            assert reader.external()[1] == GROUPS * GROUP + times * lost[0] * GROUP
            reader.settle()
