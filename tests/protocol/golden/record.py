"""Make the golden frames from the code of a release: `python
tests/protocol/golden/record.py`.

The release's package is taken out of git into a folder of its own, and a process there
writes `frames.hex`, one message of each kind, and `conversation.hex`, what a client
sends to a server of the release over TCP and what that answers. `COMMIT` says which
release it is: the last one. It moves on with each release.
"""

import io
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import trio

__all__ = ["COMMIT", "unpack"]

COMMIT = "1211b640882c146756e314158cceb98a2a15359e"
HERE = Path(__file__).resolve().parent
REQUEST_ID = 0x01020304
DEADLINE_US = 5_000_000


def unpack(folder: Path, commit: str = COMMIT) -> None:
    """Put the files of the last release, or of another commit, into a folder.

    Raises:
        subprocess.CalledProcessError: that commit is not there, as in a shallow clone.
    """
    command = ["git", "-C", str(HERE.parents[2]), "archive", "--format=tar", commit]
    archive = subprocess.run(command, check=True, capture_output=True).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        files.extractall(folder, filter="data")


def frames() -> Iterator[str]:
    """Yield a line for each golden message: its name and its frame."""
    codec = import_module("infinistore.protocol.codec")
    messages = import_module("infinistore.protocol.messages")
    values = import_module("values")
    for message in values.golden_messages(messages, codec.numbers):
        head = codec.encode_head(message, request_id=REQUEST_ID, payload_bytes=2**40 + 5, deadline_us=DEADLINE_US)
        yield f"{type(message).__name__} {head.hex()}"


async def conversation(lines: list[str]) -> None:
    """Talk to a server, and append a line for each frame: who sends it, and the frame
    with its payload.
    """
    codec = import_module("infinistore.protocol.codec")
    messages = import_module("infinistore.protocol.messages")
    config = import_module("infinistore.config").ServerConfig(
        host="127.0.0.1", service_port=0, manage_port=None, unix_socket="off", prealloc_bytes=2**22
    )
    async with trio.open_nursery() as nursery:
        addresses = await nursery.start(import_module("infinistore.server").serve, config)
        stream = await trio.open_tcp_stream("127.0.0.1", addresses.port)

        async def receive(length: int) -> bytes:
            data = b""
            while len(data) < length:
                data += await stream.receive_some(length - len(data)) or sys.exit("the server closed the connection")
            return data

        asked = import_module("values").conversation(messages, codec.numbers)
        answered = 0
        for message, payload in asked:
            numbered = {"request_id": 0}
            if not isinstance(message, messages.ONE_WAY):
                answered += 1
                numbered = {"request_id": answered, "deadline_us": DEADLINE_US}
            request = codec.encode_head(message, payload_bytes=len(payload), **numbered)
            await stream.send_all(request + payload)
            lines.append(f"client {(request + payload).hex()}")
            if isinstance(message, messages.Touch):
                continue
            head = await receive(codec.HEADER_BYTES)
            header = codec.parse_header(memoryview(head), max_body_bytes=2**26, max_payload_bytes=2**26)
            rest = await receive(codec.head_bytes(header.body_bytes) - len(head) + header.payload_bytes)
            lines.append(f"server {(head + rest).hex()}")
        nursery.cancel_scope.cancel()


def record(folder: str) -> None:
    """Write the files, by the package in this folder."""
    assert str(import_module("infinistore").__file__).startswith(folder)
    (HERE / "frames.hex").write_text("\n".join(frames()) + "\n")
    lines: list[str] = []
    trio.run(conversation, lines)
    (HERE / "conversation.hex").write_text("\n".join(lines) + "\n")


def main() -> Any:
    """Run `record` by the last release's package."""
    with tempfile.TemporaryDirectory() as folder:
        unpack(Path(folder))
        program = f"import sys; sys.path[:0] = [{folder!r}, {str(HERE)!r}]; import record; record.record({folder!r})"
        return subprocess.run([sys.executable, "-P", "-c", program], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
