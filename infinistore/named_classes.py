"""Things by name: the built-in ones of a kind, and those that other packages bring.

A package adds one with an entry point. Built-in ones are listed, so that they work in a
source tree without package metadata, and their names cannot be overridden. A module is
imported only when its thing is used.
"""

import difflib
from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any

import attrs

from infinistore.errors import ConfigError


@attrs.frozen(kw_only=True)
class Named:
    """The things of one kind."""

    kind: str
    """What one of them is called in messages."""
    group: str
    """The entry-point group."""
    built_in: Mapping[str, str]
    """Name to "module:object"."""

    def names(self) -> list[str]:
        """Return the names of all: built-in ones first, then others, sorted."""
        return [*self.built_in, *sorted(set(self._entry_points()) - set(self.built_in))]

    def find(self, name: str) -> EntryPoint:
        """Return where `name` is, not imported yet.

        Raises:
            ConfigError: there is none of this name.
        """
        point = self._entry_points().get(name)
        if point is None:
            names = self.names()
            close = difflib.get_close_matches(name, names, n=1)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            raise ConfigError(f"there is no {self.kind} called {name!r}.{hint} Known are: {', '.join(names)}.")
        return point

    def _entry_points(self) -> dict[str, EntryPoint]:
        found = {point.name: point for point in entry_points(group=self.group)}
        for name, value in self.built_in.items():
            found[name] = EntryPoint(name=name, value=value, group=self.group)
        return found


@attrs.frozen(kw_only=True)
class NamedClasses(Named):
    """The subclasses of `base`, which messages call `public`."""

    base: type[Any]
    public: str

    def load(self, name: str) -> type[Any]:
        """Return the class `name`.

        Raises:
            ConfigError: there is none of this name, or it cannot be loaded, or it is
                no subclass.
        """
        point = self.find(name)
        where = f"the {self.kind} {name!r} ({point.value})"
        try:
            loaded = point.load()
        except (ImportError, AttributeError) as error:
            raise ConfigError(f"{where} cannot be loaded: {error}") from error
        if not (isinstance(loaded, type) and issubclass(loaded, self.base)):
            raise ConfigError(f"{where} is not a subclass of {self.public}")
        return loaded
