"""The limits of a tenant: what they accept, and which attribute an error names."""

from typing import Any

import pytest

from infinistore.tenant_limits import TenantLimits, check_tenant_name


def test_a_tenant_without_limits_may_take_what_there_is() -> None:
    limits = TenantLimits("team-a")
    assert (limits.group, limits.reserved_bytes, limits.max_bytes, limits.max_keys) == ("default", 0, None, None)
    assert (limits.weight, limits.requests_per_s, limits.bytes_per_s) == (1, None, None)


@pytest.mark.parametrize("name", ["", "-a", "a.b", "a b", "é", "a" * 65, "a\n", None, 7])
def test_a_name_that_cannot_stand_in_a_token_is_refused(name: Any) -> None:
    with pytest.raises(ValueError, match="letters, digits, hyphens and underscores"):
        check_tenant_name(name)
    with pytest.raises(ValueError, match=r"^tenant must be"):
        TenantLimits(name)
    with pytest.raises(ValueError, match=r"^group must be"):
        TenantLimits("a", name)


@pytest.mark.parametrize("key", ["reserved_bytes", "max_bytes", "max_keys", "weight", "requests_per_s", "bytes_per_s"])
@pytest.mark.parametrize("value", [-1, True, "7", float("nan"), float("inf"), [1]])
def test_a_bad_value_is_refused_by_its_name(key: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"^{key} must be"):
        TenantLimits("a", **{key: value})


@pytest.mark.parametrize("key", ["max_bytes", "max_keys", "weight", "requests_per_s", "bytes_per_s"])
def test_a_limit_of_nothing_is_refused(key: str) -> None:
    with pytest.raises(ValueError, match=f"^{key} must be"):
        TenantLimits("a", **{key: 0})  # type: ignore[arg-type]


def test_what_must_be_there_cannot_be_none() -> None:
    with pytest.raises(ValueError, match=r"^reserved_bytes must be"):
        TenantLimits("a", reserved_bytes=None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^weight must be"):
        TenantLimits("a", weight=None)  # type: ignore[arg-type]


def test_nobody_reserves_more_than_it_may_take() -> None:
    assert TenantLimits("a", reserved_bytes=7, max_bytes=7).reserved_bytes == 7
    with pytest.raises(ValueError, match=r"reserved_bytes \(8\) must not be above max_bytes \(7\) of tenant 'a'"):
        TenantLimits("a", reserved_bytes=8, max_bytes=7)


def test_the_parts_of_limits_are_together_within_them() -> None:
    limits = TenantLimits(
        "a",
        reserved_bytes=10,
        max_bytes=101,
        disk_max_bytes=403,
        max_keys=2,
        weight=3,
        requests_per_s=5.0,
        bytes_per_s=1e9,
    )
    part = limits.divided(4)
    assert (part.reserved_bytes, part.max_bytes, part.max_keys, part.weight) == (2, 25, 1, 3)
    assert part.disk_max_bytes == 100
    assert (part.requests_per_s, part.bytes_per_s) == (1.25, 2.5e8)
    assert TenantLimits("a").divided(4) == TenantLimits("a")
    assert limits.divided(1) is limits
