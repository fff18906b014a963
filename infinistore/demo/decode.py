"""The decode process: loads a prompt's longest stored prefix, and checks every byte.

Run as `python -m infinistore.demo.decode`; `messages.py` defines its input and output.

It uses Trio because it shares `load.py` with prefill. An engine with its own threads
would use `infinistore.blocking.open_store`; see `examples/blocking_client.py`.
"""

from typing import TYPE_CHECKING

from infinistore.demo.layout import chunk_names
from infinistore.demo.messages import DemoError, Finished, Job, Setup
from infinistore.demo.worker import PrefixLoader, run_worker

if TYPE_CHECKING:
    from infinistore.client import AsyncStore


async def decode(store: "AsyncStore", setup: Setup, job: Job) -> Finished:
    """Load and check the prompt's full chunks. All must exist, as prefill has
    stored them, unless the job says otherwise.
    """
    layout, tokens = setup.layout, len(job.tokens)
    names = chunk_names(layout, job.tokens)
    prefix = await PrefixLoader(store, layout, job.prompt, job.may_miss).load(tokens, names)
    if prefix.chunks < len(names) and not job.may_miss:
        raise DemoError(
            f"prefill stored {len(names)} chunks of prompt {job.prompt}, but only the first {prefix.chunks} are still "
            "there: others write to this store, or its pool or its disk has no room for them"
        )
    return Finished(
        prompt=job.prompt,
        tokens=tokens,
        hit_tokens=prefix.chunks * layout.chunk_tokens,
        loaded_bytes=prefix.loaded_bytes,
        load_s=prefix.load_s,
        disk_blocks=prefix.disk_blocks,
        computed_tokens=0,
        compute_s=0.0,
        written_bytes=0,
        write_s=0.0,
        compute_and_write_s=0.0,
    )


if __name__ == "__main__":
    run_worker(decode)
