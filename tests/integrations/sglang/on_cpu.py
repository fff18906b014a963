"""SGLang on a CPU. SGLang asks for kernels and packages of a GPU as soon as it is
imported. Packages that are not here are replaced by stand-ins, and the kernels that
copy between its device's pools and its host's pools by copies in Python. The rest is
SGLang's own.
"""

import os
import sys
import warnings

from .stand_ins import StandInFinder

__all__ = ["enter_sglang"]

NOT_HERE = (
    "IPython",
    "datasets",
    "einops",
    "interegular",
    "jsonschema",
    "llguidance",
    "outlines",
    "setproctitle",
    "sgl_kernel",
    "soundfile",
    "torchaudio",
    "torchvision",
    "triton",
    "tvm_ffi",
    "xgrammar",
)


def enter_sglang() -> None:
    """Let SGLang be imported from now on."""
    os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
    with warnings.catch_warnings():  # what it and its dependencies warn of while they are imported
        warnings.simplefilter("ignore")
        from transformers.utils import import_utils

        import_utils.is_torchvision_available()  # it remembers that there is none
        import_utils.is_torchaudio_available()
        from .copies import use_copies  # which needs PyTorch

        sys.meta_path.append(StandInFinder(NOT_HERE))
        use_copies()
