"""Prefixes in a cluster: all owners are asked at the same time, and the first hole
counts.

A token of a hold on several nodes is a list of `NODE=TOKEN`, separated by `&`, with the
name of the node escaped as in a URL.
"""

from collections.abc import Sequence
from typing import Any
from urllib.parse import quote, unquote

from infinistore.client.cluster.calls import CallInView, is_lost
from infinistore.client.cluster.nodes import part_of
from infinistore.client.cluster.reads import present_anywhere
from infinistore.client.connection.effects import Outcome
from infinistore.client.requests import Matched, MatchPrefix, Prefetch, Prefetched, ReleaseHold, Request
from infinistore.kept_errors import KeptError

__all__ = ["match_prefix", "prefetch", "release_hold"]


async def match_prefix(call: CallInView, request: MatchPrefix) -> Matched:
    """Count the leading keys that are there; hold them, and nothing beyond them."""
    keys = request.keys
    view = call.view
    parts = view.parts(keys) if view.has_one_place else await _parts_that_are_there(call, keys)
    outcomes = await _ask_or_release(call, [(index, part_of(request, positions)) for index, positions in parts])
    if len(parts) == 1 and view.has_one_place and not is_lost(outcomes[0]):
        (index, _), match = parts[0], outcomes[0]
        return Matched(match.matched, _token(call, {index: match.hold} if match.hold else {}), match.on_disk)
    first_hole = sum(len(positions) for _, positions in parts)
    for (_, positions), outcome in zip(parts, outcomes, strict=True):
        matched = 0 if is_lost(outcome) else outcome.matched
        if is_lost(outcome):
            call.counters.lost_reads += len(positions)
        if matched < len(positions):
            first_hole = min(first_hole, positions[matched])
    held: dict[int, Matched] = {}
    beyond: dict[int, MatchPrefix] = {}
    for (index, positions), outcome in zip(parts, outcomes, strict=True):
        if not is_lost(outcome):
            wanted = sum(position < first_hole for position in positions[: outcome.matched])
            held[index] = outcome._replace(on_disk=min(outcome.on_disk, wanted))
            if wanted < outcome.matched and outcome.hold:
                beyond[index] = request.at(positions[:wanted])
    if beyond:
        await _hold_less(call, held, beyond)
    tokens = {index: match.hold for index, match in held.items() if match.hold}
    return Matched(first_hole, _token(call, tokens), sum(match.on_disk for match in held.values()))


async def _parts_that_are_there(call: CallInView, keys: Sequence[str]) -> list[tuple[int, Sequence[int]]]:
    """Return the leading keys that are there, by the node that has them, where each key
    may be in several places.
    """
    found = await present_anywhere(call, keys)
    leading = (*found, -1).index(-1)
    parts: dict[int, list[int]] = {}
    for position, index in enumerate(found[:leading]):
        parts.setdefault(index, []).append(position)
    return list(parts.items())


async def _hold_less(call: CallInView, held: dict[int, Matched], wanted: dict[int, MatchPrefix]) -> None:
    """Hold on some nodes only what is wanted of them, instead of what is held there."""
    fewer = [(index, request) for index, request in wanted.items() if request.keys]
    less = dict(zip([index for index, _ in fewer], await call.ask_all(fewer), strict=True))
    superfluous: list[tuple[int, Request[Any]]] = []
    for index, request in wanted.items():
        outcome = less.get(index, Matched(0))
        if isinstance(outcome, KeptError):  # then it holds too much, until its time is over
            continue
        if outcome.matched == len(request.keys):
            outcome, held[index] = held[index], outcome
        if outcome.hold:
            superfluous.append((index, ReleaseHold(outcome.hold)))
    await call.ask_all(superfluous)


async def prefetch(call: CallInView, request: Prefetch) -> Prefetched:
    """Have all owners begin to read blocks from disk."""
    parts = call.view.parts(request.keys)
    outcomes = await _ask_or_release(call, [(index, part_of(request, positions)) for index, positions in parts])
    reading = skipped = 0
    tokens: dict[int, str] = {}
    for (index, _), outcome in zip(parts, outcomes, strict=True):
        if not is_lost(outcome):
            reading += outcome.reading
            skipped += outcome.skipped
            if outcome.hold:
                tokens[index] = outcome.hold
    return Prefetched(reading, skipped, _token(call, tokens))


async def release_hold(call: CallInView, request: ReleaseHold) -> bool:
    """End a hold on all its nodes; False if it has ended on all of them."""
    parts: list[tuple[int, Request[Any]]] = []
    indices = {node.id: index for index, node in enumerate(call.view.view.nodes)}
    for one in request.hold.split("&"):
        name, separator, token = one.rpartition("=")
        if not separator:  # of a store of one server
            parts += [(index, ReleaseHold(token)) for index in indices.values()]
        elif unquote(name) in indices:
            parts.append((indices[unquote(name)], ReleaseHold(token)))
    outcomes = await call.ask(parts)
    return any(outcome for outcome in outcomes if not is_lost(outcome))


async def _ask_or_release(call: CallInView, parts: Sequence[tuple[int, Request[Any]]]) -> list[Outcome]:
    """Ask, and if a node refuses, release what the others hold: the caller learns of no
    hold.
    """
    outcomes = await call.ask_all(parts)
    refused = [
        (index, outcome)
        for (index, _), outcome in zip(parts, outcomes, strict=True)
        if isinstance(outcome, KeptError) and not is_lost(outcome)
    ]
    if refused:
        held = [
            (index, ReleaseHold(outcome.hold))
            for (index, _), outcome in zip(parts, outcomes, strict=True)
            if not isinstance(outcome, KeptError) and outcome.hold
        ]
        await call.ask_all(held)
        raise call.error(*refused[0])
    return outcomes


def _token(call: CallInView, tokens: dict[int, str]) -> str:
    nodes = call.view.view.nodes
    return "&".join(f"{quote(nodes[index].id, safe='')}={token}" for index, token in tokens.items())
