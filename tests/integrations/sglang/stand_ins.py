"""Modules for the packages that SGLang imports and that a CPU does without: they have
every name.
"""

import types
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from typing import Any


class _Anything:
    """Takes any arguments, and is valid in any model of pydantic's."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        pass

    @classmethod
    def __get_pydantic_core_schema__(cls, source: object, handler: object) -> Any:
        from pydantic_core import core_schema

        return core_schema.any_schema()


class StandIn(types.ModuleType):
    """A module, or something in one: a name with a capital is a class, every other one
    another stand-in. Called as a decorator, it returns the function as it was.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []
        self.__version__ = "0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        whole = f"{self.__name__}.{name}"
        made = type(name, (_Anything,), {"__module__": self.__name__}) if name[0].isupper() else StandIn(whole)
        setattr(self, name, made)
        return made

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        if len(arguments) == 1 and callable(arguments[0]) and not options:
            return arguments[0]
        return lambda function: function


class StandInFinder(MetaPathFinder, Loader):
    """Finds the packages of these names, and all modules in them."""

    def __init__(self, packages: Sequence[str]) -> None:
        self._packages = frozenset(packages)

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """Return a module that has every name, if its package is one of these."""
        return ModuleSpec(fullname, self, is_package=True) if fullname.partition(".")[0] in self._packages else None

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        """Make it."""
        return StandIn(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing is to be run."""
