"""Settings that are refused, where they enter."""

import pytest

from infinistore.core import CoreLimits, Watermarks


@pytest.mark.parametrize(("low", "high"), [(0.0, 0.5), (0.9, 0.8), (0.5, 1.1), (-0.1, 0.5)])
def test_impossible_watermarks_are_refused(low: float, high: float) -> None:
    with pytest.raises(ValueError, match=r"low|high"):
        Watermarks(low, high)


@pytest.mark.parametrize(
    "setting",
    [
        {"max_key_bytes": 0},
        {"max_key_bytes": 1025},
        {"max_value_bytes": 0},
        {"max_batch_keys": 0},
        {"max_pinned_ratio": 0},
        {"max_pinned_ratio": 1.5},
        {"max_hold_s": 0},
        {"max_held_ratio": -1},
    ],
)
def test_impossible_limits_are_refused_by_name(setting: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(setting))):
        CoreLimits(**setting)  # type: ignore[arg-type]
