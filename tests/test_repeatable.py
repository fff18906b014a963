"""What property tests draw is the same in each run of a commit."""

import importlib.util
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st


@pytest.mark.skipif(not settings().derandomize, reason="this profile draws something else each time")
def test_what_is_drawn_does_not_depend_on_the_modules_that_are_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[int] = []

    @settings(max_examples=200)
    @given(st.integers())
    def draw(number: int) -> None:
        drawn.append(number)

    draw()
    before = drawn.copy()
    path = tmp_path / "loaded.py"
    path.write_text(f"NUMBERS = {[10_000_019 * number for number in range(1, 50)]}", encoding="utf-8")
    spec = importlib.util.spec_from_file_location("loaded", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "loaded", module)
    spec.loader.exec_module(module)
    drawn.clear()
    draw()
    assert drawn == before
