"""The report of a machine with a GPU: what each part of the tests and benchmarks has
shown, and on which machine.

A file of JSON, written anew after each part, so that a run that is cut off loses only
the part that it was at. Nothing here needs more than Python itself.
"""

import json
import os
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

__all__ = ["LENGTHS", "PARTS", "Part", "Report", "markdown", "missed", "why_not"]


class Part(NamedTuple):
    """A part of `bench/gpu.py`. `wanted` says of figures, by how their names begin,
    which value is wanted, as in `>= 0.95`.
    """

    title: str
    wanted: Mapping[str, str]


LENGTHS: Final = (1024, 2048, 4096, 8192, 16_384, 32_768)
_COPIES: Final = {"write": ">= 0.95", "read": ">= 0.95"}
_TTFT: Final = "Time to first token of {} tokens, a Llama of transformers: the prompt computed, and its cache loaded"

PARTS: Final[dict[str, Part]] = {
    "copies-batch": Part("GPU to pool and back by cudaMemcpyBatchAsync: rate by that of cudaMemcpyAsync", _COPIES),
    "copies-fallback": Part("The same by the fallback for drivers before CUDA 12.8", _COPIES),
    "register": Part("Registering a pool with CUDA", {}),
    "overhead": Part(
        "A prefill step of a Llama that stores its cache layer by layer: time by that without",
        {"stored in": "<= 1.01"},
    ),
    "decode": Part("Decoding steps beside loads of whole prompts: time by that without", {}),
    **{
        f"ttft-{tokens}": Part(_TTFT.format(tokens), {"cold / warm": ">= 12.6"} if tokens == 8192 else {})
        for tokens in LENGTHS
    },
    "ttft-lmcache": Part("The same of 8192 tokens with the storage of LMCache (local_cpu), copied by PyTorch", {}),
    "processes": Part("Processes with one GPU and one pool: rate of all by that of one", {}),
    "shards": Part("Shards of a server, without the GPU: requests and bytes a second by those of others", {}),
}
"""What is measured, in order: by `bench/gpu.py`, and the last by `bench/shards.py`."""


class Report:
    """The report in a file, which need not exist."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self.parts: dict[str, dict[str, Any]] = json.loads(file.read_text()) if file.is_file() else {}

    def is_done(self, name: str) -> bool:
        """Whether a part has been run to its end, whatever came out."""
        return not why_not(self.parts.get(name))

    def keep(self, name: str, result: Mapping[str, Any]) -> None:
        """Add a part's result, and write the file in one step."""
        self.parts[name] = dict(result)
        self._file.parent.mkdir(parents=True, exist_ok=True)
        beside = self._file.with_suffix(".new")
        beside.write_text(json.dumps(self.parts, indent=2) + "\n")
        os.replace(beside, self._file)


def why_not(result: Mapping[str, Any] | None) -> str:
    """Return why a part has no result, for people; nothing if it has one."""
    if result is None:
        return "has not been run yet"
    if "broke" in result:
        return f"broke: {result['broke']}"
    return f"there is no {result['missing']}" if "missing" in result else ""


def missed(name: str, figures: Mapping[str, Any]) -> list[str]:
    """Return the names of a part's figures that are not as is wanted."""
    return [figure for figure, value in figures.items() if not _is_as_wanted(value, _wanted(name, figure))]


def _wanted(name: str, figure: str) -> str:
    wanted = PARTS[name].wanted if name in PARTS else {}
    return next((limit for start, limit in wanted.items() if figure.startswith(start)), "")


def _is_as_wanted(value: Any, wanted: str) -> bool:
    if not wanted:
        return True
    relation, _, limit = wanted.partition(" ")
    return bool(value >= float(limit) if relation == ">=" else value <= float(limit))


def markdown(parts: Mapping[str, Mapping[str, Any]], tests: Iterable[str]) -> str:
    """Return the tables of a report for a page, and which parts were not run. `tests`
    are the names of the tests' parts that there are.
    """
    machines: dict[str, str] = {}

    def mark(result: Mapping[str, Any]) -> str:
        return machines.setdefault(result["machine"], chr(ord("A") + len(machines)))

    tests = list(tests)
    rows = []
    for name in tests:
        if (result := parts.get(name)) is None:
            continue
        if why_not(result):
            rows.append(f"| `{name}` | {why_not(result)} | | | |")
        else:
            failed = ", ".join(f"`{test}`" for test in result["failed"]) or "none"
            cells = [result["passed"], failed, len(result["skipped"]), mark(result)]
            rows.append(f"| `{name}` | {' | '.join(map(str, cells))} |")
    lines = ["| tests | passed | failed | skipped | on |", "|---|---|---|---|---|", *rows, ""] if rows else []
    rows = []
    for name, part in PARTS.items():
        if (result := parts.get(name)) is None:
            continue
        if why_not(result):
            rows.append(f"| **{part.title}** | {why_not(result)} | | |")
        else:
            rows.append(f"| **{part.title}** | | | {mark(result)} |")
            rows += _rows(name, result["figures"])
    lines += ["| figure | measured | wanted | on |", "|---|---|---|---|", *rows, ""] if rows else []
    if left := [f"`{name}`" for name in (*tests, *PARTS) if name not in parts]:
        lines += [*textwrap.wrap(f"Not run yet: {', '.join(left)}.", 88, break_on_hyphens=False), ""]
    lines += [*(f"{letter}: {machine}" for machine, letter in machines.items())]
    return "\n".join(lines).strip().replace("|  |", "| |") + "\n"


def _rows(name: str, figures: Mapping[str, Any]) -> Iterator[str]:
    lost = missed(name, figures)
    for figure, value in figures.items():
        wanted = _wanted(name, figure)
        said = f"{wanted}: {'missed' if figure in lost else 'reached'}" if wanted else ""
        yield f"| {figure} | {value if isinstance(value, str) else f'{value:.3g}'} | {said} | |"
