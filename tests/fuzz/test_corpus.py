"""What the fuzzer was fed, and what it has found, is taken or refused as promised.
`make fuzz` looks for more.
"""

from pathlib import Path

import pytest

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
