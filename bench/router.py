"""What `infinistore route` adds to a request, against the same engine asked directly.

    python bench/router.py [--quick] [--prompts 100000] [--json | --markdown] [--check]

The engine is a process that answers every request with the same pieces, each in a write
of its own, and computes nothing; a token is a byte. The router is the command as people
start it, with one engine and no store. Both are asked in turns.

- first token: the time from a request to the first piece, in milliseconds
- a piece: the processor time that the router takes for one of a long stream, in
  microseconds, as the kernel counts it
- at once: how many of so many streams, opened together, are answered to their end
- memory: how much the router has grown after so many prompts, each of them new

With `--check` the exit status is 1 if a first token takes 3 ms longer, a piece 120
microseconds, a stream is lost, or the memory grows by more than 64 MiB.
"""

import argparse
import http.client
import json
import os
import re
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rounds import add_common_arguments

__all__: list[str] = []

STREAMS = 300
PIECES = 2_000
MOST_MS, MOST_US, MOST_BYTES = 3.0, 120.0, 64 * 1024 * 1024
_ENGINE = """
import re, sys, trio
PIECE = b"data: " + b"x" * 200 + b"\\n\\n"
HEAD = b"HTTP/1.1 200 OK\\r\\nconnection: close\\r\\ncontent-type: %s\\r\\n"
async def serve(stream):
    async with stream:
        data = b""
        while b"\\r\\n\\r\\n" not in data:
            got = await stream.receive_some()
            if not got:
                return
            data += got
        head, _, body = data.partition(b"\\r\\n\\r\\n")
        found = re.search(rb"content-length: (\\d+)", head, re.I)
        while found and len(body) < int(found[1]):
            body += await stream.receive_some()
        if head.startswith(b"GET /v1/models"):
            said = b'{"data": [{"id": "m", "root": "m"}]}'
            await stream.send_all(HEAD % b"application/json" + b"content-length: %d\\r\\n\\r\\n" % len(said) + said)
        elif b"/tokenize" in head:
            said = b'{"tokens": [%s]}' % b",".join(b"%d" % one for one in body)
            await stream.send_all(HEAD % b"application/json" + b"content-length: %d\\r\\n\\r\\n" % len(said) + said)
        elif head.startswith(b"GET"):
            await stream.send_all(b"HTTP/1.1 404 Not Found\\r\\nconnection: close\\r\\ncontent-length: 0\\r\\n\\r\\n")
        else:
            pieces = int(re.search(rb'"max_tokens": (\\d+)', body)[1])
            await stream.send_all(HEAD % b"text/event-stream" + b"transfer-encoding: chunked\\r\\n\\r\\n")
            for _ in range(pieces):
                await stream.send_all(b"%x\\r\\n%s\\r\\n" % (len(PIECE), PIECE))
                await trio.lowlevel.checkpoint()
            await stream.send_all(b"0\\r\\n\\r\\n")
async def main():
    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    print(listener.socket.getsockname()[1], flush=True)
    await trio.serve_listeners(serve, [listener])
trio.run(main)
"""


@contextmanager
def running(command: Sequence[str], pattern: str) -> Iterator[tuple[int, int]]:
    """Run a program until the block ends; yield its id, and the port in its first line."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            found = re.search(pattern, process.stdout.readline())
            if found is None:
                raise SystemExit(f"{command[0]} did not start; its standard error says why")
            yield process.pid, int(found[1])
        finally:
            process.terminate()


def ask(port: int, pieces: int, prompt: object = (1, 2, 3)) -> tuple[float, int]:
    """Ask for a stream; return when its first piece came, in seconds, and its length."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    body = json.dumps({"model": "m", "prompt": prompt, "max_tokens": pieces, "stream": True})
    began = time.perf_counter()
    connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
    answer = connection.getresponse()
    length = len(answer.read(1))
    first_s = time.perf_counter() - began
    while got := len(answer.read(65536)):
        length += got
    connection.close()
    return first_s, length


def first_tokens(router: int, engine: int, calls: int) -> tuple[float, float]:
    """Return the medians of the time to the first piece: by the router, and directly."""
    times: dict[int, list[float]] = {router: [], engine: []}
    for number in range(2 * calls + 20):
        port = (router, engine)[number % 2]
        first_s, _ = ask(port, 1, list(range(number, number + 256)))
        if number >= 20:
            times[port].append(first_s)
    return statistics.median(times[router]), statistics.median(times[engine])


def processor_s(process: int) -> float:
    """Return the processor time of a process so far."""
    threads = Path(f"/proc/{process}/task").iterdir()
    return sum(int((thread / "schedstat").read_text().split()[0]) for thread in threads) / 1e9


def memory_bytes(process: int) -> int:
    """Return the memory that a process has."""
    pages = int(Path(f"/proc/{process}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def per_piece_s(router: int, process: int) -> float:
    """Return the processor time of the router for a piece of a long stream."""
    ask(router, 10)
    before = processor_s(process)
    ask(router, PIECES)
    return (processor_s(process) - before) / PIECES


def at_once(router: int, streams: int) -> int:
    """Open so many streams together; return how many came whole."""
    whole: list[int] = []
    expected = 20 * (len(b"data: \n\n") + 200)

    def one() -> None:
        try:
            whole.append(ask(router, 20)[1] == expected)
        except (OSError, http.client.HTTPException):
            whole.append(0)

    threads = [threading.Thread(target=one) for _ in range(streams)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(whole)


def many_prompts(router: int, prompts: int) -> None:
    """Ask for so many texts that are all new, over a connection that stays."""
    connection = http.client.HTTPConnection("127.0.0.1", router, timeout=120)
    for number in range(prompts):
        prompt = f"{number}: what nobody has asked before " * 8
        body = json.dumps({"model": "m", "prompt": prompt, "max_tokens": 1, "stream": True})
        connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
        connection.getresponse().read()
    connection.close()


def main() -> int:
    """Measure, print, and judge if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=5_000, help="prompts for the memory; default: 5000")
    add_common_arguments(
        parser, quick="fewer calls, for a look", check="fail where the router adds more than it is wanted to"
    )
    given = parser.parse_args()
    calls, prompts = (50, 500) if given.quick else (300, given.prompts)
    socket.setdefaulttimeout(120)
    with running([sys.executable, "-c", _ENGINE], r"(\d+)") as (_, engine):
        url = f"http://127.0.0.1:{engine}"
        command = [sys.executable, "-P", "-m", "infinistore", "route", "--engine", url, "--port", "0"]
        with running(command, r":(\d+) to") as (process, router):
            routed_s, direct_s = first_tokens(router, engine, calls)
            piece_s = per_piece_s(router, process)
            whole = at_once(router, STREAMS)
            many_prompts(router, prompts // 10)
            before = memory_bytes(process)
            many_prompts(router, prompts)
            grown = memory_bytes(process) - before
    figures = {
        "first token, routed (ms)": round(1e3 * routed_s, 3),
        "first token, direct (ms)": round(1e3 * direct_s, 3),
        "first token, routed / direct": round(routed_s / direct_s, 3),
        "a piece, processor (us)": round(1e6 * piece_s, 1),
        f"whole of {STREAMS} at once": whole,
        f"growth after {prompts} prompts (MiB)": round(grown / 2**20, 1),
    }
    if given.json:
        print(json.dumps(figures, indent=2))
    else:
        form = "| {} | {} |" if given.markdown else "{:<36} {}"
        if given.markdown:
            print("| what | figure |\n|---|---|")
        for name, figure in figures.items():
            print(form.format(name, figure))
    added_ms = 1e3 * (routed_s - direct_s)
    good = added_ms <= MOST_MS and 1e6 * piece_s <= MOST_US and whole == STREAMS and grown <= MOST_BYTES
    return 1 if given.check and not good else 0


if __name__ == "__main__":
    sys.exit(main())
