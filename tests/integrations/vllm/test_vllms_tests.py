"""vLLM's own tests of schedulers with connectors, unchanged, with this connector.

`vllms_tests.py` gets them, and `substitution.py` puts the connector in the place of
vLLM's stand-ins. docs/testing.md says which tests are left out, and why.
"""

import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.bad_days.servers import running_server_process

HERE = Path(__file__).parent
FOLDER = Path(sys.prefix) / "vllms-tests"

pytestmark = [
    pytest.mark.skipif(not FOLDER.is_dir(), reason="needs vLLM's tests: make test-integrations gets them"),
    pytest.mark.process,
    pytest.mark.nightly,
    pytest.mark.timeout(900),
]

_FAILURES = "100-99-invalid_block_idxs"
TESTS = {
    "v1/kv_connector/unit/test_kv_load_failure_recovery.py": (
        "test_failed_receive_completion_honors_failure_policy[recompute]",
        *(f"test_async_load_failure[{_FAILURES}{number}]" for number in range(3)),
        *(f"test_async_progressive_load_failure[{_FAILURES}{number}]" for number in range(2)),
    ),
    "v1/kv_connector/unit/test_invalid_blocks_correctness.py": ("test_async_recompute_blocks_not_cached_when_invalid",),
    "v1/kv_connector/unit/test_remote_prefill_lifecycle.py": (
        "test_interleaved_lifecycle",
        "test_full_block_prompt",
        "test_cannot_schedule_after_recv",
        "test_cannot_recv",
        "test_kv_fetch_stages_cleared_on_abort",
    ),
    "v1/core/test_scheduler.py": (
        "test_throttle_prefills_excludes_fully_transferred_remote_kv",
        "test_throttle_prefills_defers_remote_kv_resume_with_local_prefill",
        "test_pause_new_drains_async_kv_loads[load-in-flight]",
        "test_pause_new_drains_async_kv_loads[load-done]",
        "test_kv_connector_records_external_cache_hit_sources[True]",
        "test_kv_connector_basic[True]",
        "test_external_prefix_cache_metrics[True-True]",
        "test_kv_connector_handles_preemption[False-None-True-False]",
        "test_kv_connector_handles_preemption[False-None-True-True]",
        "test_kv_connector_handles_preemption[True-ec_consumer-True-False]",
        "test_kv_connector_handles_preemption[True-ec_consumer-True-True]",
        "test_async_load_reservation_prevents_wedge_e2e",
    ),
}
"""By file, those in which a connector loads in the background. `True` is that."""


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What became of each, in one process: what pytest wrote, or nothing if it
    passed.
    """
    report = tmp_path_factory.mktemp("vllms-tests") / "report.xml"
    tests = [f"tests/{module}::{name}" for module, names in TESTS.items() for name in names]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "substitution", "-p", "no:cacheprovider", "-W", "ignore"]
    with running_server_process("--prealloc-size", "64MiB") as server:
        environment = {
            **os.environ,
            "PYTHONPATH": str(HERE),
            "INFINISTORE_URL": server.url,
            "HF_HUB_OFFLINE": "1",
            "HF_HUB_CACHE": str(FOLDER / "hub"),
        }
        command += [f"--junit-xml={report}", *tests]
        done = subprocess.run(command, check=False, cwd=FOLDER, env=environment, capture_output=True, text=True)
    assert report.exists(), done.stdout + done.stderr
    told: dict[str, str] = defaultdict(str)
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        told[case.attrib["name"]] += "".join(f"{part.tag}: {part.text}" for part in case)
    assert set(told).issuperset(name for names in TESTS.values() for name in names), done.stdout + done.stderr
    return dict(told)


@pytest.mark.parametrize("name", [name for names in TESTS.values() for name in names])
def test_vllms_test_passes_with_this_connector(outcomes: dict[str, str], name: str) -> None:
    assert outcomes.get(name, "it did not run") == ""
