"""The decode process: loads the longest prefix that the store holds of a prompt, and checks every byte of it.

Run as `python -m infinistore.demo.decode`; `messages.py` says what it reads and writes.

It is on Trio because it shares `load.py` with prefill. An engine that calls from its own threads would do the same with
`infinistore.blocking.open_store`; `examples/blocking_client.py` shows that.
"""

from typing import TYPE_CHECKING

from infinistore.demo.failure import DemoError
from infinistore.demo.layout import chunk_names
from infinistore.demo.load import PrefixLoader
from infinistore.demo.messages import Finished, Job, Setup
from infinistore.demo.worker import run_worker

if TYPE_CHECKING:
    from infinistore.client import AsyncStore


async def decode(store: "AsyncStore", setup: Setup, job: Job) -> Finished:
    """Load and check the prompt's whole chunks. All must be there: prefill has just been told to store them."""
    layout, tokens = setup.layout, len(job.tokens)
    names = chunk_names(layout, job.tokens)
    prefix = await PrefixLoader(store, layout, job.prompt).load(tokens, names)
    if prefix.chunks < len(names):
        raise DemoError(
            f"prefill stored {len(names)} chunks of prompt {job.prompt}, but only the first {prefix.chunks} are still "
            "there: others write to this store, or its pool is too small (--pool-size)"
        )
    return Finished(
        prompt=job.prompt,
        tokens=tokens,
        hit_tokens=prefix.chunks * layout.chunk_tokens,
        loaded_bytes=prefix.loaded_bytes,
        load_s=prefix.load_s,
        computed_tokens=0,
        compute_s=0.0,
        written_bytes=0,
        write_s=0.0,
        compute_and_write_s=0.0,
    )


if __name__ == "__main__":
    run_worker(decode)
