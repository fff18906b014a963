"""Opens an embedded store, with its disks if it has any."""

from infinistore.client.operations.embedded import EmbeddedStore
from infinistore.client.options import Options


def open_embedded(options: Options) -> EmbeddedStore:
    """Open the store. Blocking.

    Raises:
        OutOfMemory: no memory for the pool.
        ConfigError: a disk cannot be used. Nothing on it was changed.
        StoreUnavailable: this process gets no more threads, which disks need.
    """
    store = EmbeddedStore(options)
    if options.disk:
        # Late, because they need numpy.
        from infinistore.client.operations.embedded_on_disk import EmbeddedDisks, OperationsOnDisk

        try:
            store.disks = EmbeddedDisks(options, store.core, store.returns, store.clock)
        except BaseException:
            store.close()
            raise
        store.operations = OperationsOnDisk
    return store
