"""Runs Dynamo's indexer, which listens on all addresses, in a network of its own.

    unshare --user --map-root-user --net python dynamo_indexer.py LOG

Each line of the standard input is a path and, behind a blank, what is posted there; for
each, one line of JSON is written.
"""

import fcntl
import json
import socket
import struct
import subprocess
import sys
import time
import urllib.error
import urllib.request
from typing import Any

PORT = 8090
IFF_UP = 1
SIOCSIFFLAGS = 0x8914


def ask(path: str, posted: str = "") -> Any:
    request = urllib.request.Request(
        f"http://127.0.0.1:{PORT}{path}", posted.encode() or None, {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.loads(answer.read() or "null")


def wait_until_there(indexer: "subprocess.Popen[bytes]") -> None:
    while indexer.poll() is None:
        try:
            ask("/health")
        except OSError:
            time.sleep(0.02)
        else:
            return
    raise SystemExit(f"the indexer ended with {indexer.returncode}")


def main(log_path: str) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", IFF_UP))
    command = [sys.executable, "-P", "-m", "dynamo.indexer", "--port", f"{PORT}", "--threads", "1"]
    with open(log_path, "wb") as log, subprocess.Popen(command, stdout=log, stderr=log) as indexer:
        try:
            wait_until_there(indexer)
            for line in sys.stdin:
                path, _, posted = line.strip().partition(" ")
                sys.stdout.write(json.dumps(ask(path, posted)) + "\n")
                sys.stdout.flush()
        finally:
            indexer.kill()


if __name__ == "__main__":
    main(*sys.argv[1:])
