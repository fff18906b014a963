"""What the fuzzer was fed, and what it has found, is taken or refused as promised.
`make fuzz` looks for more.
"""

import re
from pathlib import Path

import pytest

from infinistore.core.pool_state import PoolState, decode_state

from . import targets
from .targets import TARGETS

CORPUS = Path(__file__).parent / "corpus"


@pytest.mark.parametrize("name", TARGETS)
def test_every_input_of_the_corpus_is_taken_or_refused_as_promised(name: str) -> None:
    inputs = sorted((CORPUS / name).iterdir())
    assert inputs
    for path in inputs:
        try:
            TARGETS[name](path.read_bytes())
        except Exception as error:
            error.add_note(f"the input is {path}")
            raise


def test_every_folder_of_the_corpus_has_a_target() -> None:
    assert {path.name for path in CORPUS.iterdir()} == set(TARGETS)


def test_make_fuzz_runs_every_target() -> None:
    makefile = (Path(__file__).parents[2] / "Makefile").read_text()
    (listed,) = re.findall(r"^FUZZ_TARGETS \?= (.*)$", makefile, flags=re.MULTILINE)
    assert listed.split() == list(TARGETS)


@pytest.mark.parametrize("name", ["body", "body-3", "whole", "whole-3"])
def test_a_state_of_a_pool_in_the_corpus_is_read_to_its_end(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the fuzzer would see nothing but the check of the header."""
    taken: list[PoolState] = []

    def noted(data: bytes) -> PoolState:
        taken.append(decode_state(data))
        return taken[-1]

    monkeypatch.setattr(targets, "decode_state", noted)
    TARGETS["pool_state"]((CORPUS / "pool_state" / name).read_bytes())
    assert [state.keys for state in taken] == [["one", "\u00fcber"]] * 2  # read, and written and read again
