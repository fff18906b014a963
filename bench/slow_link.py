"""A loopback of one's own whose traffic of one port is slow: a network namespace, and
tc's discipline htb in it. Nothing of the machine's own network is touched.
"""

import os
import shutil
import subprocess
import sys

from programs import ProgramError

__all__ = ["enter_own_network", "slow_down", "speed_up"]

_ENTERED = "INFINISTORE_BENCH_NETWORK"
_BURST = "256kb"  # a packet of loopback has up to 64 KiB
_AS_FAST = ("rate", "100gbit", "burst", "4mb", "cburst", "4mb")


def enter_own_network() -> None:
    """Start this program again in a network namespace where nothing but loopback is.

    Raises:
        ProgramError: a program is missing, or the system refuses
    """
    if os.environ.get(_ENTERED) != str(os.getpid()):
        for program, package in (("tc", "iproute2"), ("unshare", "util-linux")):
            if shutil.which(program) is None:
                raise ProgramError(f"a slow link needs {program}; on Debian: apt-get install {package}")
        root = [] if os.geteuid() == 0 else ["--map-root-user"]
        command = ["unshare", "--net", *root, sys.executable, *sys.argv]
        os.execvpe("unshare", command, {**os.environ, _ENTERED: str(os.getpid())})
    _run("ip", "link", "set", "lo", "up")
    _run("tc", "qdisc", "add", "dev", "lo", "root", "handle", "1:", "htb", "default", "10", "r2q", "100000")
    _run("tc", "class", "add", "dev", "lo", "parent", "1:", "classid", "1:10", "htb", *_AS_FAST)


def slow_down(port: int, bytes_per_s: int) -> None:
    """Let what goes to and from a port have so much a second, all together."""
    rate = ("rate", f"{bytes_per_s}bps", "burst", _BURST, "cburst", _BURST)  # tc's bps are bytes
    _run("tc", "class", "replace", "dev", "lo", "parent", "1:", "classid", "1:20", "htb", *rate)
    for end in ("sport", "dport"):
        match = ("match", "ip", end, str(port), "0xffff")
        _run("tc", "filter", "add", "dev", "lo", "parent", "1:", "protocol", "ip", "u32", *match, "flowid", "1:20")


def speed_up() -> None:
    """Let what was slowed down have as much as all else."""
    _run("tc", "filter", "del", "dev", "lo", "parent", "1:")


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ProgramError(f"{' '.join(command)}: {done.stderr.strip()}")
