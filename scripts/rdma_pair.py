"""Say in five minutes whether two hosts reach each other by RDMA, and how fast.

    python scripts/rdma_pair.py listen [--dev-name mlx5_0]     on one host, first
    python scripts/rdma_pair.py HOST --token TOKEN [--dev-name mlx5_0]   on the other

Each runs `infinistore doctor --rdma-loopback` on its own host, and stops there if
something is wrong. The first then serves for ten minutes (`--minutes`), at TCP port
22399 (`--port`) of all its addresses (`--address`) and, for `ib_write_bw`, the next
one. It prints the command for the second, with a token made for this run. The second
measures each transport to it by `infinistore doctor --to`, and `ib_write_bw` where both
hosts have it (`apt-get install perftest`). Its exit code is 0 if blocks went by RDMA.
"""

import argparse
import json
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from infinistore.doctor.loopback import perftest_bandwidth, perftest_command
from infinistore.transports.rdma.choice import ChosenPort, NoRdma, choose_port

INFINISTORE = [sys.executable, "-m", "infinistore"]
_ONE_ROUND_S = 30


def main() -> int:
    """Return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("host", metavar="listen|HOST")
    parser.add_argument("--dev-name", help="the RDMA device of this host; the best one unless given")
    parser.add_argument("--ib-port", type=int, default=1)
    parser.add_argument("--hint-gid-index", type=int, default=-1)
    parser.add_argument("--token", default="", help="what the first host has printed")
    parser.add_argument("--address", default="0.0.0.0", help="where to listen")
    parser.add_argument("--port", type=int, default=22399, help="TCP; the next one is for ib_write_bw")
    parser.add_argument("--minutes", type=float, default=10, help="how long to listen")
    parser.add_argument("--rounds", type=int, default=3, help="how often to measure; medians count")
    parser.add_argument("--deadline", type=float, default=5, help="longest time for one call, in seconds")
    arguments = parser.parse_args()
    if arguments.host != "listen" and not arguments.token:
        parser.error("--token is missing: `listen` on the first host prints it")
    flags = ["--ib-port", str(arguments.ib_port), "--hint-gid-index", str(arguments.hint_gid_index)]
    flags += ["--dev-name", arguments.dev_name] if arguments.dev_name else []
    doctor = [*INFINISTORE, "doctor", "--deadline", str(arguments.deadline), "--json"]
    told = _json([*doctor, "--rdma-loopback", *flags])
    for finding in told["findings"]:
        if finding["topic"].startswith("RDMA"):
            _print(finding)
    if told["loopback"] is None:
        return 1
    try:
        chosen = choose_port(arguments.dev_name, arguments.ib_port, None, arguments.hint_gid_index)
    except NoRdma as error:
        print(error)
        return 1
    if arguments.host == "listen":
        flags += ["--host", arguments.address, "--service-port", str(arguments.port)]
        return listen(flags, chosen, arguments.port, arguments.minutes * 60)
    url = f"infinistore://{arguments.host}:{arguments.port}?device={chosen.device}&ib_port={chosen.number}"
    url += f"&gid_index={chosen.gid_index}"
    paths, rates = [], []
    for _ in range(arguments.rounds):  # in turns: what disturbs one disturbs the other
        with token_file(arguments.token) as path:
            told = _json([*doctor, "--to", url, "--token-file", path])
        paths += [path for path in told["paths"] if path["path"] == "rdma" and path["put_bytes_per_s"]]
        if not paths:
            break
        rates += [rate for rate in [write_bandwidth(chosen, arguments.host, arguments.port + 1)] if rate is not None]
    for finding in told["findings"]:
        if finding["level"] != "good" and finding["topic"] == "server" and finding["subject"] != "shm":
            _print(finding)
    if not paths:
        print(f"bad      not reached by RDMA -> run `rdma_pair.py listen` there, and open TCP port {arguments.port}")
        return 1
    print(report(paths, rates))
    return 0


def report(paths: list[dict[str, Any]], rates: list[float]) -> str:
    """Return the medians of the rounds, by those of ib_write_bw where there are any."""
    put, get = (_median([path[f"{name}_bytes_per_s"] for path in paths]) for name in ("put", "get"))
    lines = [
        f"by RDMA: put {put / 1e6:,.0f} MB/s, get {get / 1e6:,.0f} MB/s, in batches of 64 x 64 KiB, with checksums"
    ]
    if rates:
        theirs = _median(rates)
        lines.append(f"ib_write_bw: {theirs / 1e6:,.0f} MB/s; put / it {put / theirs:.2f}, get / it {get / theirs:.2f}")
    else:
        lines.append("ib_write_bw: not compared; it is missing on one of the hosts (apt-get install perftest)")
    return "\n".join(lines)


def listen(flags: list[str], chosen: ChosenPort, port: int, seconds: float) -> int:
    """Serve, and let ib_write_bw listen again and again, until the time is over."""
    end, token = time.monotonic() + seconds, secrets.token_hex(8)
    command = [*INFINISTORE, "--require-rdma", "--unix-socket", "off", *flags]
    command += ["--manage-port", "off", "--prealloc-size", "256MiB", "--log-level", "warning", "--json"]
    with (
        token_file(token) as path,
        subprocess.Popen([*command, "--token-file", path], stdout=subprocess.PIPE, text=True) as server,
    ):
        try:
            assert server.stdout is not None
            if not server.stdout.readline():
                return server.wait() or 1  # it has said why
            print(f"listening for {seconds:.0f} s; on the other host:", flush=True)
            print(f"    python scripts/rdma_pair.py {socket.gethostname()} --token {token}", flush=True)
            while (left := end - time.monotonic()) > 0 and server.poll() is None:
                if shutil.which("ib_write_bw") is None:
                    _until(left, server.wait)
                    continue
                with subprocess.Popen(
                    perftest_command(chosen, port + 1), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
                ) as peer:
                    try:
                        _until(left, peer.wait)
                    finally:
                        peer.kill()
                    if peer.returncode:
                        time.sleep(0.2)
        except KeyboardInterrupt:
            return 0
        finally:
            server.terminate()
    return server.returncode if server.returncode and server.returncode > 0 else 0


@contextmanager
def token_file(token: str) -> Iterator[str]:
    """Give the path of a file with this token, which others cannot read."""
    with tempfile.NamedTemporaryFile("w") as file:
        file.write(f"{token}\n")
        file.flush()
        yield file.name


def _until(seconds: float, wait: Callable[[float], object]) -> None:
    with suppress(subprocess.TimeoutExpired):
        wait(seconds)


def write_bandwidth(chosen: ChosenPort, host: str, port: int) -> float | None:
    """Return what ib_write_bw moves to a host, in bytes a second; None without it."""
    if shutil.which("ib_write_bw") is None:
        return None
    end = time.monotonic() + _ONE_ROUND_S
    while time.monotonic() < end:  # the other end begins to listen again after each round
        command = [*perftest_command(chosen, port), host]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_ONE_ROUND_S)
        except subprocess.TimeoutExpired:
            return None
        if (found := perftest_bandwidth(done.stdout)) is not None:
            return found
        time.sleep(0.2)
    return None


def _median(numbers: list[float]) -> float:
    return sorted(numbers)[len(numbers) // 2]


def _json(command: list[str]) -> dict[str, Any]:
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if not done.stdout.startswith("{"):
        sys.exit(done.returncode or 1)
    told: dict[str, Any] = json.loads(done.stdout)
    return told


def _print(finding: dict[str, Any]) -> None:
    remedy = f" -> {finding['remedy']}" if finding["remedy"] else ""
    print(f"{finding['level']:<8} {finding['subject']}: {finding['text']}{remedy}")
    for line in finding["details"]:
        print(f"{'':<8} {line}")


if __name__ == "__main__":
    sys.exit(main())
