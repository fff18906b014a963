"""Prefill and decode as two programs that share nothing but the store.

    infinistore --prealloc-size 512MiB &
    python examples/prefill_and_decode.py prefill tcp://127.0.0.1:22345 "some words of a prompt, and some more"
    python examples/prefill_and_decode.py decode  tcp://127.0.0.1:22345 "some words of a prompt, and others"

Each derives the names of the prompt's chunks: a chunk's name is a hash of the previous
name and of its own tokens, so that equal names mean equal beginnings. `infinistore
demo` does the same with real sizes.
"""

import hashlib
import sys

from infinistore import blocking

CHUNK_TOKENS = 2
BLOCK_BYTES = 64 * 1024


def chunk_keys(tokens: list[str]) -> list[str]:
    """Return a key for each full chunk of the prompt."""
    keys, name = [], b"the model's name belongs here"
    for start in range(0, len(tokens) - CHUNK_TOKENS + 1, CHUNK_TOKENS):
        chunk = "\0".join(tokens[start : start + CHUNK_TOKENS]).encode()
        name = hashlib.blake2b(name + chunk, digest_size=16).digest()
        keys.append(f"example/{name.hex()}")
    return keys


def kv_block(key: str) -> bytes:
    """Return a model's result for the chunk: here, bytes derived from the key."""
    return hashlib.shake_128(key.encode()).digest(BLOCK_BYTES)


def prefill(url: str, tokens: list[str]) -> None:
    keys = chunk_keys(tokens)
    with blocking.open_store(url) as store:
        found = store.match_prefix(keys)  # chunks of other prompts are reused
        store.put_many({key: kv_block(key) for key in keys[found:]})
    print(f"prefill: {int(found)} of {len(keys)} chunks were there, {len(keys) - found} computed and stored")


def decode(url: str, tokens: list[str]) -> None:
    keys = chunk_keys(tokens)
    with blocking.open_store(url) as store:
        # The hold prevents eviction between the lookup and the read.
        found = store.match_prefix(keys, hold_s=10)
        blocks = store.get_many(keys[:found])
        if found.hold:
            store.release_hold(found.hold)
    assert all(bytes(block or b"") == kv_block(key) for key, block in zip(keys, blocks, strict=False))
    print(f"decode: loaded {len(blocks)} of {len(keys)} chunks, every byte is right")


if __name__ == "__main__":
    if len(sys.argv) != 4 or sys.argv[1] not in {"prefill", "decode"}:
        sys.exit(f"usage: {sys.argv[0]} prefill|decode URL PROMPT")
    (prefill if sys.argv[1] == "prefill" else decode)(sys.argv[2], sys.argv[3].split())
