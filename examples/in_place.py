"""Zero-copy: blocks written and read in place, as numpy arrays.

    python examples/in_place.py                                 # embedded
    python examples/in_place.py infinistore://127.0.0.1:22345   # by shared memory

With a server on another host, the same program works with copies.
"""

import sys

from infinistore import blocking

try:
    import numpy as np
except ImportError:
    sys.exit("this example needs numpy: pip install numpy")

SHAPE = (16, 2048)  # tokens, numbers each


def main(url: str | None) -> None:
    with blocking.open_store(url) as store:
        # Space for two blocks, which become visible together at the end.
        size_bytes = int(np.prod(SHAPE)) * 4
        with store.reserve({"layer0/keys": size_bytes, "layer0/values": size_bytes}) as views:
            keys, values = (np.frombuffer(view, np.float32).reshape(SHAPE) for view in views)
            np.multiply.outer(np.arange(16), np.ones(2048), out=keys)
            values[:] = 0.5
            del keys, values  # do not write to them after the statement

        # Views of the pool: read-only, and pinned. None for a missing block.
        with store.lease(["layer0/keys", "layer0/values", "layer1/keys"], verify=True) as (first, second, missing):
            assert first is not None and second is not None and missing is None
            scores = np.frombuffer(first, np.float32).reshape(SHAPE) @ np.frombuffer(second, np.float32)[:2048]
            print("scores:", scores[:4].tolist())
            print("pinned:", store.stats().store.pinned_bytes, "bytes")

        # The pins end with the last array. LeaseStillInUse warns about arrays that
        # outlive the statement.
        print("the bytes went by:", store.stats().transport)
        store.delete(["layer0/keys", "layer0/values"])


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else None)
