"""LMCache itself, where it is installed: `make test-integrations` brings an environment
that has it.
"""

import os
import warnings
from importlib.util import find_spec

import pytest

os.environ["LMCACHE_TRACK_USAGE"] = "false"  # a test tells nobody that it ran
if find_spec("lmcache") is not None:
    with warnings.catch_warnings():  # what LMCache and its dependencies warn of while they are imported
        warnings.simplefilter("ignore")
        import lmcache.v1.cache_engine
        import lmcache.v1.distributed.storage_manager  # noqa: F401

        import infinistore.integrations.lmcache
        import infinistore.integrations.lmcache_l2  # noqa: F401


@pytest.fixture
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ask a server that was down again at once, where the next call would wait for a
    second.
    """
    monkeypatch.setattr("infinistore.client.connection.circuit_breaker.FIRST_PAUSE_S", 0.0)
