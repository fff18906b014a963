"""What can be chosen about a run of the demonstration. Imports little: the help of the
command line needs it.
"""

from pathlib import Path
from typing import Final

from attrs import field, frozen
from attrs.validators import gt

from infinistore.demo.layout import KVLayout
from infinistore.sizes import GIB, MIB

CONTEXT_TOKENS: Final = 32_768
"""The longest prompt that Qwen2.5-7B is made for; a longer text is cut."""
DEFAULT_POOL_BYTES: Final = GIB
DEFAULT_POOL_BYTES_WITH_DISK: Final = 512 * MIB
"""Less, because it is filled with other prompts, which the simulated model computes."""
DEFAULT_POOL_BYTES_OF_NODE: Final = 512 * MIB
GROUP_CHUNKS: Final = 2
"""How many chunks one node of a cluster has together: few, so that there are several
groups of a short text.
"""
DISK_RATIO: Final = 3
"""How many times the pool the disk may take: both prompts, and the pool once more."""
DEFAULT_PREFILL_TOKENS_PER_S: Final = 4000.0


@frozen
class DemoSettings:
    """The text, the server, the layout, and the speed of the simulated model."""

    input_file: Path | None = None
    """None takes the text that the package ships."""
    url: str | None = None
    """The address of a server that runs already; without one, a server is started."""
    pool_bytes: int = DEFAULT_POOL_BYTES
    """Memory of the server that is started."""
    disk: bool = False
    """Whether the server gets a disk, in a temporary folder, and is restarted on it."""
    nodes: int = 0
    """How many nodes the cluster has that is started; 0 for a single server."""
    layout: KVLayout = field(factory=KVLayout)
    prefill_tokens_per_s: float = field(default=DEFAULT_PREFILL_TOKENS_PER_S, validator=gt(0))
