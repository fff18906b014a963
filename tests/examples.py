"""How many examples a costly test gets: a share of what Hypothesis's profile has for a
cheap one, so that HYPOTHESIS_PROFILE=thorough looks further here, too.
"""

from hypothesis import settings

__all__ = ["examples"]


def examples(of_a_hundred: int) -> int:
    """Return so many for each hundred that the profile has, at least one."""
    assert settings.default is not None
    return max(1, settings.default.max_examples * of_a_hundred // 100)
