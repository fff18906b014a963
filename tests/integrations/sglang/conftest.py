"""SGLang itself on a CPU, where it is installed.

SGLang asks for kernels and packages of a GPU as soon as it is imported. Packages that
are not here are replaced by stand-ins, and the kernels that copy between its device's
pools and its host's pools by copies in Python. The rest is SGLang's own: pools,
allocators, trees, controllers and their threads.
"""

import os
import sys
import warnings
from importlib.util import find_spec

from .stand_ins import StandInFinder

NOT_HERE = (
    "IPython",
    "datasets",
    "interegular",
    "llguidance",
    "outlines",
    "sgl_kernel",
    "torchvision",
    "triton",
    "tvm_ffi",
    "xgrammar",
)


def enter_sglang() -> None:
    os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
    with warnings.catch_warnings():  # what it and its dependencies warn of while they are imported
        warnings.simplefilter("ignore")
        from transformers.utils.import_utils import is_torchvision_available

        is_torchvision_available()  # it remembers that there is none
        from .copies import use_copies  # which needs PyTorch

        sys.meta_path.append(StandInFinder(NOT_HERE))
        use_copies()
        import sglang.srt.mem_cache.storage
        import sglang.test.kits.unified_radix_cache.storage  # noqa: F401


if find_spec("sglang") is not None:
    enter_sglang()
