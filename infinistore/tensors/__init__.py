"""PyTorch tensors in a store: by byte offset, and layer by layer during computation.

    from infinistore import blocking
    from infinistore.tensors import LayerWriter, read_blocks, write_blocks

    with blocking.open_store() as store, LayerWriter(store) as writer:
        for layer, cache in enumerate(caches):
            compute(layer, cache)
            writer.write(cache, [(f"prompt/L{layer}", 0)], cache.nbytes)  # at once
        writer.flush()

Requires PyTorch: `pip install '.[torch]'` in a clone. It is imported only when the
first tensor arrives.
"""

from infinistore.tensors.blocks import read_blocks, write_blocks
from infinistore.tensors.errors import BlockSizeMismatch, BlocksMissing, CudaError
from infinistore.tensors.layers import LayerLoader, LayerWriter, LayerWriterStatistics, Ticket

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
