"""What messages say to people."""

import ast
import os
from pathlib import Path

from .conftest import PROJECT

# Counts that are small or a peer's, where the number itself is what somebody looks for.
COUNTS_BYTES = {
    *(
        "keys.py",
        "addresses.py",
        "secret_files.py",
        "client/options.py",
        "client/memory/buffers.py",
        "client/movers/shm/known_blocks.py",
        "cli/files.py",
    ),
    *("demo/workers.py", "demo/display.py", "doctor/rdma.py", "server/management/selftest.py"),
    *(
        "tensors/tensor_blocks.py",
        *("integrations/internal/store_calls.py", "integrations/internal/blocking_store_calls.py"),
        "protocol/codec.py",
        "protocol/client_connection.py",
        "protocol/server_connection.py",
    ),
    *(
        "protocol/frame_reader.py",
        "allocators/base.py",
        "allocators/contract.py",
        "allocators/slab.py",
        "transports/cuda.py",
    ),
    *("core/arena.py", "sizes.py"),  # a repr; how such a size is written
}


def sources() -> dict[str, Path]:
    package = PROJECT / "infinistore"
    found = (Path(folder, file) for folder, _, files in os.walk(package, followlinks=True) for file in files)
    return {str(path.relative_to(package)): path for path in found if path.suffix == ".py"}


def test_sizes_are_told_in_units_that_people_read() -> None:
    """`an arena of 68719476736 bytes` is `an arena of 64 GiB` (`sizes.in_units`)."""
    wrong = []
    for name, path in sources().items():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr) and name not in COUNTS_BYTES:
                for value, after in zip(node.values, node.values[1:], strict=False):
                    if isinstance(value, ast.FormattedValue) and isinstance(after, ast.Constant):
                        wrong += [f"{name}:{node.lineno}"] * str(after.value).startswith(" bytes")
    assert wrong == []
