"""Requests that were recorded elsewhere, for simulations.

The format is that of the traces published with Mooncake (Qin et al., FAST'25,
https://github.com/kvcache-ai/Mooncake, folder `FAST25-release/traces`): a JSON object
on each line,

    {"timestamp": 82, "input_length": 955, "output_length": 52, "hash_ids": [46, 47]}

with milliseconds since the trace began, lengths in tokens, and one id for each block of
512 tokens of the prompt, the last of which may be shorter. Two requests have the same
id at the same place if their prompts are equal up to the end of that block, as with the
keys of a store.
"""

import json
import math
from collections.abc import Iterable
from typing import Any, Final

import attrs

from infinistore.errors import ConfigError

__all__ = ["TRACE_BLOCK_TOKENS", "TracedRequest", "read_trace"]

TRACE_BLOCK_TOKENS: Final = 512
"""The tokens of a block in Mooncake's traces."""


@attrs.frozen
class TracedRequest:
    """One request of a trace."""

    arrived_s: float
    """When it came, in seconds since the trace began."""
    tokens: int
    """The length of its prompt, at least 1."""
    output_tokens: int
    """The length of its answer."""
    blocks: tuple[int, ...]
    """An id for each block of the prompt, the last and shorter one included."""


def read_trace(lines: Iterable[str], *, block_tokens: int = TRACE_BLOCK_TOKENS) -> list[TracedRequest]:
    """Read a trace, for example an open file. Blank lines are skipped.

    Returns the requests in the order of their arrival.

    Raises:
        ConfigError: a line is not such a request, or there is none at all. The message
            has the number of the line.
    """
    requests = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            requests.append(_request(json.loads(line), block_tokens))
        except (ValueError, RecursionError) as error:
            raise ConfigError(
                f"line {number} of the trace is not a request ({error}); a trace has on each line an object like "
                '{"timestamp": 0, "input_length": 700, "output_length": 20, "hash_ids": [0, 1]}, with milliseconds, '
                f"tokens, and an id for each {block_tokens} tokens of the prompt"
            ) from error
    if not requests:
        raise ConfigError("the trace has no requests: it is empty")
    return sorted(requests, key=lambda request: request.arrived_s)


def _request(fields: Any, block_tokens: int) -> TracedRequest:
    if not isinstance(fields, dict):
        raise ValueError("it is no object")
    tokens = _whole_number(fields, "input_length")
    blocks = fields.get("hash_ids")
    if not isinstance(blocks, list) or not all(type(block) is int for block in blocks):
        raise ValueError("hash_ids is no list of whole numbers")
    if len(blocks) != math.ceil(tokens / block_tokens) or not tokens:
        raise ValueError(f"hash_ids has {len(blocks)} blocks for an input_length of {tokens}")
    arrived = fields.get("timestamp")
    if isinstance(arrived, bool) or not isinstance(arrived, int | float) or not 0 <= arrived < math.inf:
        raise ValueError(f"timestamp is {arrived!r}, not milliseconds since the trace began")
    return TracedRequest(arrived / 1000, tokens, _whole_number(fields, "output_length"), tuple(blocks))


def _whole_number(fields: dict[str, Any], name: str) -> int:
    value = fields.get(name)
    if type(value) is not int or value < 0:
        raise ValueError(f"{name} is {value!r}, not a number of tokens")
    return value
