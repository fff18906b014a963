"""SGLang's server on a CPU.

python -m tests.integrations.sglang.serve FLAGS

SGLang starts processes that begin with this module, too.
"""

import runpy

from .on_cpu import enter_sglang

enter_sglang()

if __name__ == "__main__":
    runpy.run_module("sglang.launch_server", run_name="__main__")
