"""Names for the KV cache of token blocks: equal names mean that the cached bytes are interchangeable.

What an engine computes for a block of tokens depends on all tokens before it, on the model, and on how the engine lays
the result out. So a block is named by a chain of hashes, each over the one before it and the block's own tokens, under
a fingerprint of everything else. The hash is blake2b: nobody can make two prompts with equal names, not even on
purpose, so that one user's prompt never finds another's blocks by accident or by design.

Names depend on their inputs alone, not on the process, its hash seed or its byte order: any two workers agree.
"""

import hashlib
import json
import struct
from collections.abc import Callable, Mapping, Sequence

__all__ = ["PrefixChain", "fingerprint", "fingerprint_of_config"]

_VOLATILE_SETTINGS = {"_attn_implementation", "_name_or_path", "architectures", "transformers_version"}
"""What may differ between two processes that run the same model: where it lies, and what runs it."""


def fingerprint(facts: Mapping[str, object]) -> str:
    """Return 16 hexadecimal characters that stand for these facts; what JSON cannot tell counts by its `str`."""
    text = json.dumps(facts, sort_keys=True, default=str, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def fingerprint_of_config(config: Mapping[str, object]) -> str:
    """Return the fingerprint of a model's configuration, as `config.to_dict()` gives it, without what may differ
    between two processes that run the same model."""
    return fingerprint({name: value for name, value in config.items() if name not in _VOLATILE_SETTINGS})


class PrefixChain:
    """The hashes of a growing sequence's full blocks, first to last: 32 hexadecimal characters each.

    `salt` is what the whole sequence depends on besides its tokens. `extra` is asked about each block, with the numbers
    of its first token and of the one after its last: what it returns counts for this block and those that follow.
    """

    def __init__(
        self, block_tokens: int, salt: str = "", extra: Callable[[int, int], bytes] = lambda first, end: b""
    ) -> None:
        if block_tokens < 1:
            raise ValueError(f"a block has at least one token, not {block_tokens}")
        self._block_tokens = block_tokens
        self._extra = extra
        self._pack = struct.Struct(f"<{block_tokens}q").pack
        self._last = hashlib.blake2b(salt.encode(), digest_size=16).digest()
        self.hashes: list[str] = []

    def extend(self, tokens: Sequence[int]) -> list[str]:
        """Hash the full blocks of `tokens`, the whole sequence so far, that are not hashed yet; return all hashes."""
        size = self._block_tokens
        for first in range(len(self.hashes) * size, len(tokens) - size + 1, size):
            block = hashlib.blake2b(self._last, digest_size=16)
            block.update(self._pack(*tokens[first : first + size]))
            block.update(self._extra(first, first + size))
            self._last = block.digest()
            self.hashes.append(block.hexdigest())
        return self.hashes
