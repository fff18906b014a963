"""Strategies by name. What names of all kinds have in common is tested with those of
allocators.
"""

import pytest

from infinistore.errors import ConfigError
from infinistore.eviction import Eviction, eviction_class, eviction_names


def test_the_names_are_those_of_the_classes() -> None:
    assert eviction_names()[:2] == ["adaptive", "lru"]
    for name in eviction_names():
        assert issubclass(eviction_class(name), Eviction)
        assert eviction_class(name).name == name


def test_an_unknown_name_is_answered_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"no eviction strategy called 'lfu'.*Known are: adaptive, lru"):
        eviction_class("lfu")
