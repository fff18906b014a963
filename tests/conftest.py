"""What all tests share: how Hypothesis runs, that Ctrl-C reaches the programs they
start, what skips without PyTorch.

A failing example prints the blob that replays it (`@reproduce_failure`). Examples have
no deadline: on a shared machine the clock says nothing about the code. They are derived
from the test, so that one commit has one verdict, wherever it is tested. To look for
what they miss, HYPOTHESIS_PROFILE chooses: `explore` goes another way each run, and
`thorough` does so for longer. `quick` tries few examples and makes none smaller: it is
for mutants, of which each runs them all.

TEST_TORCH=none says that PyTorch is left out on purpose. Only then the modules that
import it skip, each by its name.
"""

import gc
import logging
import os
import signal
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from hypothesis import Phase, settings
from hypothesis.internal.conjecture import providers
from hypothesis.internal.constants_ast import Constants

from tests.cluster_io.etcd import etcd_of_all
from tests.levels import Levels
from tests.limits import Limits

__all__ = ["etcd_of_all"]

settings.register_profile(
    "repeatable", max_examples=60, deadline=None, print_blob=True, derandomize=True, database=None
)
settings.register_profile("explore", max_examples=100, deadline=None, print_blob=True)
settings.register_profile("thorough", settings.get_profile("explore"), max_examples=2000)
settings.register_profile(
    "quick", settings.get_profile("repeatable"), max_examples=100, phases=[Phase.explicit, Phase.generate]
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))
# Hypothesis draws constants of the modules that are loaded, too, and the tests that ran
# before decide which these are: the same commit would not get the same verdict.
if settings().derandomize:
    setattr(providers, "_get_local_constants", Constants)  # noqa: B010  # there is no setting for it

# A shell's job in the background ignores it, and so would every program that is started
# here.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


# The settings of whoever runs the tests, such as the URL of their store, are for nobody
# here.
for name in [name for name in os.environ if name.startswith("INFINISTORE_")]:
    if not name.startswith(("INFINISTORE_TEST_", "INFINISTORE_RDMA_")):
        del os.environ[name]


def pytest_configure(config: pytest.Config) -> None:
    """Give each test its level and its limit."""
    config.pluginmanager.register(Levels(Path(__file__).parent), "levels")
    config.pluginmanager.register(Limits(), "limits")


def pytest_collection_finish() -> None:
    """Keep what all tests share out of each collection of garbage: of 775,000 objects
    one took half a second, and there are hundreds.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _log_level() -> Iterator[None]:
    """Whoever sets the level of the package's log, as `log_level` of the drop-in does,
    sets it for one test.
    """
    log = logging.getLogger("infinistore")
    level = log.level
    yield
    log.setLevel(level)


@pytest.fixture
def caplog(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """Without the events of servers. pytest listens to loggers that pass nothing on,
    too, and a server that many tests share notes at any time who comes.
    """
    caplog.handler.addFilter(_is_no_event)
    return caplog


def _is_no_event(record: logging.LogRecord) -> bool:
    return record.name != "infinistore.audit"


class _SkipsWithoutTorch(pytest.Module):
    def collect(self) -> Iterable[pytest.Item | pytest.Collector]:
        try:
            return super().collect()
        except self.CollectError as error:
            if getattr(error.__cause__, "name", None) == "torch":
                pytest.skip(f"{self.nodeid} needs PyTorch", allow_module_level=True)
            raise


if os.environ.get("TEST_TORCH") == "none":
    collect_ignore = ["gpu"]  # whose conftest is loaded before there is a module to skip

    def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module:
        return _SkipsWithoutTorch.from_parent(parent, path=module_path)
