"""Keys for the KV cache of token blocks: equal keys mean interchangeable bytes.

The cached bytes of a block of tokens depend on all tokens before it, on the model, and
on the layout that the engine uses. So a block's key is from a chain of hashes, each
over the previous hash and the block's tokens, under a fingerprint of everything else.
The hash is blake2b: nobody can construct two prompts with equal keys, so one user's
prompt never finds another's blocks, by accident or by design.

Keys depend only on their inputs, not on the process, its hash seed or its byte order:
any two workers agree.
"""

import hashlib
import json
import struct
from collections.abc import Callable, Mapping, Sequence

_HASH_DIGITS = 32
_TAG_DIGITS = 16
_VOLATILE_SETTINGS = {"_attn_implementation", "_name_or_path", "architectures", "transformers_version"}
"""What may differ between processes that run the same model: its path and backend."""


def fingerprint(facts: Mapping[str, object]) -> str:
    """Return 16 hexadecimal characters that stand for these facts.

    Values that JSON cannot represent count by their `str`.
    """
    text = json.dumps(facts, sort_keys=True, default=str, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def fingerprint_of_config(config: Mapping[str, object]) -> str:
    """Return the fingerprint of a model's configuration, from `config.to_dict()`.

    It leaves out what may differ between processes that run the same model.
    """
    return fingerprint({name: value for name, value in config.items() if name not in _VOLATILE_SETTINGS})


class PrefixChain:
    """The hashes of a growing sequence's full blocks, in order.

    Each has 32 hexadecimal characters. `salt` is what the whole sequence depends on
    besides its tokens. `extra` is called for each block, with the numbers of its first
    token and of the one after its last: its result counts for this block and those that
    follow.

    With `group_blocks`, so many blocks in a row begin with the same hash tag, made of
    the hash of the first of them: `{TAG}HASH`. One node of a cluster has all of them.

    `known` are the hashes of the first blocks, from a chain with the same other
    arguments: this one goes on from there.
    """

    def __init__(
        self,
        block_tokens: int,
        salt: str = "",
        extra: Callable[[int, int], bytes] = lambda first, end: b"",
        *,
        group_blocks: int = 0,
        known: Sequence[str] = (),
    ) -> None:
        if block_tokens < 1:
            raise ValueError(f"a block has at least one token, not {block_tokens}")
        self._block_tokens = block_tokens
        self._extra = extra
        self._pack = struct.Struct(f"<{block_tokens}q").pack
        self._last = hashlib.blake2b(salt.encode(), digest_size=16).digest()
        self._group_blocks = group_blocks
        self._tag = ""
        self.hashes: list[str] = list(known)
        if known:
            self._tag, digest = known[-1][:-_HASH_DIGITS], known[-1][-_HASH_DIGITS:]
            self._last = bytes.fromhex(digest)

    def extend(self, tokens: Sequence[int]) -> list[str]:
        """Hash the full blocks of `tokens`, the whole sequence so far.

        Returns all hashes; known ones are not computed again.
        """
        size = self._block_tokens
        for first in range(len(self.hashes) * size, len(tokens) - size + 1, size):
            block = hashlib.blake2b(self._last, digest_size=16)
            block.update(self._pack(*tokens[first : first + size]))
            block.update(self._extra(first, first + size))
            self._last = block.digest()
            text = block.hexdigest()
            if self._group_blocks and len(self.hashes) % self._group_blocks == 0:
                self._tag = f"{{{text[:_TAG_DIGITS]}}}"
            self.hashes.append(self._tag + text)
        return self.hashes
