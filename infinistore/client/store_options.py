# Generated from options.py by scripts/generate.py: change that one instead.
"""The keyword arguments of every `open_store`, for type checkers."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypedDict

if TYPE_CHECKING:
    from ssl import SSLContext

__all__ = ["StoreOptions"]


class StoreOptions(TypedDict, total=False):
    """The keyword arguments of every `open_store`, and what else it takes.

    Attributes:
        url: Where the server is, and over which transport to reach it. Options may
            follow, as in `?deadline_s=5`; arguments take precedence. Without a URL, the
            store is embedded. The URLs are:

            * `infinistore://HOST:PORT`: shared memory on the server's host; elsewhere
              RDMA if both sides have a device, or else TCP
            * `infinistores://HOST:PORT`: shared memory on the server's host; elsewhere
              TCP with TLS. No RDMA, which does not encrypt blocks
            * `tcp://HOST:PORT`: TCP only
            * `unix:///PATH`: the server's Unix socket on this host, without shared
              memory
            * `shm:///PATH`: shared memory only, through the server's Unix socket; with
              shm://HOST:PORT, the client asks for its path
            * `rdma://HOST:PORT`: RDMA only
        deadline_s: How long one call may take, retries included, in seconds. Default:
            30.
        verify: With always, writes compute checksums and reads verify them; with never,
            neither. Default: always.
        token: The token of a server with --token-file. Without it, that of token_file
            in the URL, or else of the variable INFINISTORE_TOKEN. With a server only.
            Default: none.
        tls: The SSLContext that encrypts connections over TCP, instead of ca, cert and
            key. With any of these four, the server must speak TLS, whatever the scheme
            of the URL is. With a server only. Default: TLS only with infinistores://.
        ca: A file with the authorities to trust, in PEM. One of them must have signed
            the server's certificate, for the host in the URL. With a server only.
            Default: those of the system.
        cert: A file with the certificate of this client, in PEM, for a server with
            --tls-client-ca. With a server only. Default: none.
        key: A file with the key of cert, in PEM. With a server only. Default: the file
            of cert.
        unencrypted_rdma: Allow RDMA together with TLS: requests are encrypted then,
            blocks are not. With a server only. Default: False.
        max_connections: How many connections may carry blocks at a time; in a cluster 2
            to each node, unless given. Two more carry lookups. With a server only.
            Default: 8.
        transport: The only transport to use: inline, shm, rdma, or one of another
            package. Without it, the URL decides. With a server only. Default: the best
            one.
        spin_us: How long to spin for the reply of a fast server before sleeping, in
            microseconds; 0 or off: never. Adaptive: up to 400, while that pays and
            takes the processor from nobody. The Trio client never spins. With a server
            only. Default: adaptive.
        name: What the server's statistics call this client. With a server only.
            Default: HOST:PID.
        lazy: Connect with the first call instead of at once. While the server is down,
            calls raise StoreUnavailable. With a server only. Default: False.
        inline_bytes: The largest batch, in bytes, that goes over the control stream, in
            one round trip instead of two, although there is shared memory or RDMA. With
            a server only. Default: 65536 (64 KiB).
        copy_threads: How many threads, at most one for each core, may copy and hash a
            batch of 8 MiB or more with blocks of 256 KiB or more on average. More than
            the caller's own need numpy. Over shared memory only. Default: 2.
        known_blocks: About how many locations of blocks to remember. Such a block is
            read again without a request to the server; 0 sends one for each read. Over
            shared memory only. Default: 65536.
        device: The RDMA device to use, such as mlx5_0. With one, RDMA comes before
            shared memory. Over RDMA only. Default: the best one.
        ib_port: The port of the device. Over RDMA only. Default: 1.
        gid_index: The GID to prefer if it is usable; -1 means no preference. Over RDMA
            only. Default: -1.
        staging_bytes: The size of a buffer of registered memory, in bytes, for blocks
            that lie elsewhere. Over RDMA only. Default: 16777216 (16 MiB).
        lookup_deadline_s: How long a node may take to answer a lookup, in seconds. Then
            its keys count as missing, and after the second time in a row the node
            counts as lost. If a node sends no part of a block for this long, the client
            pings it. With a cluster, or a server with shards only. Default: 0.4.
        hedged_reads: Whether a read asks the other copies, if there are any, when a
            node is late. At most one key in twenty is asked for twice. With a cluster,
            or a server with shards only. Default: True.
        zone: The zone that this client is in. Of the copies of a block, it reads those
            of its machine first, then those of this zone, as --node-zone of the servers
            names it. With a cluster, or a server with shards only. Default: none.
        pool_bytes: The size of the pool, in bytes. Embedded only. Default: 268435456
            (256 MiB).
        minimal_allocate_bytes: The unit of allocation, in bytes: a block takes a
            multiple of it. Embedded only. Default: 65536 (64 KiB).
        allocator: The name of the allocator. Embedded only. Default: bitmap.
        eviction: The strategy that decides which blocks leave a full pool first.
            Embedded only. Default: lru.
        huge_pages: Use huge pages, which the machine must have reserved. Embedded only.
            Default: False.
        numa_node: The NUMA node that the pool is on, as far as it has memory; -1 for
            any. Embedded only. Default: -1.
        disk: A folder for blocks that memory has no room for, and its size, as
            PATH:SIZE; a list for several disks. Embedded only. Default: none.
        disk_admission: When a block is written to disk: lazy once a quarter of the pool
            has been put after it, eager at once, second-use when it was read once.
            Embedded only. Default: lazy.
        disk_wait_s: How long a read waits for blocks on disk, in seconds; then they
            count as missing. Embedded only. Default: 5.
        environment: What the store takes from its process, for simulations: the
            network, chance, shared memory. It is an `Environment` of
            `infinistore.client.extension`. With a server only. Default: sockets, and a
            generator of random numbers.
    """

    deadline_s: float
    verify: Literal["always", "never"]
    token: str
    tls: "SSLContext | None"
    ca: Path | None
    cert: Path | None
    key: Path | None
    unencrypted_rdma: bool
    max_connections: int
    transport: str
    spin_us: int | Literal["adaptive", "off"]
    name: str
    lazy: bool
    inline_bytes: int
    copy_threads: int
    known_blocks: int
    device: str
    ib_port: int
    gid_index: int
    staging_bytes: int
    lookup_deadline_s: float
    hedged_reads: bool
    zone: str
    pool_bytes: int
    minimal_allocate_bytes: int
    allocator: str
    eviction: str
    huge_pages: bool
    numa_node: int
    disk: str | Sequence[str]
    disk_admission: Literal["lazy", "eager", "second-use"]
    disk_wait_s: float
