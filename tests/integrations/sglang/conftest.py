"""SGLang's storage interface, backend factory and host pools, where SGLang is
installed; without the rest of it.

SGLang runs on a GPU alone: its packages import kernels and drivers as soon as they are
touched. So its packages are entered without running their `__init__`, and what the
modules under test import of kernels and devices is replaced by names without content.
What is tested (`hicache_storage`, `storage.backend_factory`, `pool_host`) is SGLang's
own.
"""

import sys
import types
import warnings
from importlib.util import find_spec

ENTERED = ("sglang", "sglang.srt", "sglang.srt.mem_cache")
WITHOUT_CONTENT = (
    "sglang.kernels",
    "sglang.kernels.ops",
    "sglang.kernels.ops.kvcache",
    "sglang.kernels.ops.kvcache.hicache",
    "sglang.srt.layers",
    "sglang.srt.layers.dcp",
    "sglang.srt.layers.dcp.layout",
    "sglang.srt.mem_cache.memory_pool",
    "sglang.srt.platforms",
    "sglang.srt.utils",
)


class WithoutContent(types.ModuleType):
    """Has every name: `is_cuda` and the like say no, the others are empty classes."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__ = []

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return (lambda: False) if name.startswith("is_") else type(name, (), {})


def enter_sglang(folder: str) -> None:
    for name in ENTERED:
        package = types.ModuleType(name)
        package.__path__ = [folder + name.removeprefix("sglang").replace(".", "/")]
        sys.modules[name] = package
    for name in WITHOUT_CONTENT:
        sys.modules[name] = WithoutContent(name)
    with warnings.catch_warnings():  # what it and its dependencies warn of while they are imported
        warnings.simplefilter("ignore")
        import sglang.srt.mem_cache.pool_host.mha
        import sglang.srt.mem_cache.pool_host.mla
        import sglang.srt.mem_cache.storage  # noqa: F401


_spec = find_spec("sglang")
if _spec is not None and _spec.submodule_search_locations:
    enter_sglang(_spec.submodule_search_locations[0])
