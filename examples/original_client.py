"""A program for the original InfiniStore, which runs unchanged on both.

    infinistore --service-port 22345 &
    python examples/original_client.py 127.0.0.1 22345

A third argument is the RDMA device to use, such as mlx5_0.

As in engines, blocks move in an event loop in a separate thread, and lookups come from
the main thread.
"""

import asyncio
import ctypes
import sys
import threading

import infinistore

BLOCK_BYTES = 64 * 1024
BLOCKS = 32


def pointer(memory: bytearray) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def move_blocks(config: infinistore.ClientConfig, loop: asyncio.AbstractEventLoop) -> None:
    connection = infinistore.InfinityConnection(config)
    connection.connect()
    try:
        written = bytearray(range(256)) * (BLOCKS * BLOCK_BYTES // 256)
        read = bytearray(len(written))
        for memory in (written, read):
            connection.register_mr(pointer(memory), len(memory))

        # A block is a key, and an offset in bytes from the pointer.
        blocks = [(f"layer{number}", number * BLOCK_BYTES) for number in range(BLOCKS)]
        write = connection.rdma_write_cache_async(blocks, BLOCK_BYTES, pointer(written))
        asyncio.run_coroutine_threadsafe(write, loop).result()
        print("last match:", connection.get_match_last_index([key for key, _ in blocks] + ["not there"]))
        fetch = connection.rdma_read_cache_async(blocks, BLOCK_BYTES, pointer(read))
        asyncio.run_coroutine_threadsafe(fetch, loop).result()
        print("read back what was written:", read == written)

        print("deleted:", connection.delete_keys([key for key, _ in blocks]))
        print("still there:", connection.check_exist("layer0"))
        missing = connection.rdma_read_cache_async(blocks, BLOCK_BYTES, pointer(read))
        try:
            asyncio.run_coroutine_threadsafe(missing, loop).result()
        except infinistore.InfiniStoreKeyNotFound:
            print("a read of what is missing is an error of its own")
    finally:
        connection.close()


def send_one_value(config: infinistore.ClientConfig) -> None:
    connection = infinistore.InfinityConnection(config)
    connection.connect()
    try:
        value = bytearray(b"a value for TCP")
        connection.tcp_write_cache("value", pointer(value), len(value))
        received = connection.tcp_read_cache("value")
        assert received is not None  # None for a missing key; the original hangs
        print("by TCP:", bytes(received).decode())
        connection.delete_keys(["value"])
    finally:
        connection.close()


def main() -> None:
    settings = {"host_addr": sys.argv[1], "service_port": int(sys.argv[2]), "link_type": infinistore.LINK_ETHERNET}
    if len(sys.argv) > 3:
        settings["dev_name"] = sys.argv[3]
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        move_blocks(infinistore.ClientConfig(connection_type=infinistore.TYPE_RDMA, **settings), loop)
        send_one_value(infinistore.ClientConfig(connection_type=infinistore.TYPE_TCP, **settings))
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


if __name__ == "__main__":
    if len(sys.argv) not in {3, 4} or not sys.argv[2].isdecimal():
        sys.exit(f"usage: {sys.argv[0]} HOST PORT [DEVICE]")
    main()
