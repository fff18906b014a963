"""`infinistore doctor` on a machine that has RDMA: the devices, the choice, and the way
to a server by RDMA.
"""

import json

import pytest
import trio

from infinistore.cli.root import run
from tests.rdma.conftest import Host
from tests.rdma.serving import serving


def test_the_devices_and_the_choice_are_shown_and_a_port_moves_bytes_to_itself(
    hosts: tuple[Host, Host], capsys: pytest.CaptureFixture[str]
) -> None:
    quickly = ["--seconds", "0.05", "--deadline", "300"]
    code = run(["doctor", "--json", "--dev-name", hosts[1].device, "--rdma-loopback", *quickly])

    told = json.loads(capsys.readouterr().out)
    found = {finding["subject"]: finding for finding in told["findings"]}
    assert code == any(finding["level"] == "bad" for finding in found.values())
    for host in hosts:
        assert found[host.device]["level"] == "good"
        assert "ACTIVE" in found[f"{host.device} port 1"]["text"]
        assert found[f"{host.device} port 1"]["details"]
    assert found["choice"]["level"] == "good"
    assert found["choice"]["text"].startswith(f"{hosts[1].device} port 1, GID ")

    loopback = {one["subject"]: one["level"] for one in told["findings"] if one["topic"] == "RDMA loopback"}
    assert list(loopback)[:6] == ["device", "memory", "queue pair", "bytes", "bandwidth", "ib_write_bw"]
    assert "bad" not in loopback.values()
    assert told["loopback"]["port"].startswith(f"{hosts[1].device} port 1")
    assert min(told["loopback"][figure] for figure in ("write_bytes_per_s", "read_bytes_per_s", "write_p50_us")) > 0


@pytest.mark.nightly
async def test_the_way_to_a_server_by_rdma_is_measured(
    hosts: tuple[Host, Host], capsys: pytest.CaptureFixture[str]
) -> None:
    async with serving(hosts[0]) as server:
        to = f"infinistore://127.0.0.1:{server.server.addresses.port}?device={hosts[1].device}"
        await trio.to_thread.run_sync(run, ["doctor", "--json", "--to", to, "--seconds", "0.1", "--deadline", "300"])

    paths = {path["path"]: path for path in json.loads(capsys.readouterr().out)["paths"]}
    assert paths["rdma"]["transport"] == "rdma"
    assert hosts[1].device in paths["rdma"]["reason"]
    assert min(paths["rdma"][figure] for figure in ("put_bytes_per_s", "get_bytes_per_s", "get_p50_us")) > 0
