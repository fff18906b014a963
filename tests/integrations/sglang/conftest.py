"""SGLang itself on a CPU, where it is installed."""

import warnings
from importlib.util import find_spec

if find_spec("sglang") is not None:
    from .on_cpu import enter_sglang

    enter_sglang()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import sglang.srt.mem_cache.storage
        import sglang.test.kits.unified_radix_cache.storage  # noqa: F401
