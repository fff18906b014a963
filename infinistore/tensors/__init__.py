"""PyTorch tensors in a store: blocks by byte offset, and layer by layer beside the computation.

    from infinistore import blocking
    from infinistore.tensors import LayerWriter, read_blocks, write_blocks

    with blocking.open_store() as store, LayerWriter(store) as writer:
        for layer, cache in enumerate(caches):
            compute(layer, cache)
            writer.write(cache, [(f"prompt/L{layer}", 0)], cache.nbytes)  # returns at once
        writer.flush()

Needs PyTorch: `pip install infinistore[torch]`. It is not imported before a tensor is there.
"""

from infinistore.tensors.blocks import read_blocks, write_blocks
from infinistore.tensors.errors import BlockSizeMismatch, BlocksMissing, CudaError
from infinistore.tensors.layer_loader import LayerLoader
from infinistore.tensors.layer_writer import LayerWriter, LayerWriterStatistics, Ticket

__all__ = [
    "BlockSizeMismatch",
    "BlocksMissing",
    "CudaError",
    "LayerLoader",
    "LayerWriter",
    "LayerWriterStatistics",
    "Ticket",
    "read_blocks",
    "write_blocks",
]
