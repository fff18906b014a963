"""The process of one shard, which `infinistore --shards N` starts: not a command.

Its only argument is the descriptor of its link to the supervisor, from which it learns
everything else.
"""

import sys

__all__: list[str] = []


def _main() -> None:
    from infinistore.cli.log_format import set_up_logging
    from infinistore.cli.serve import calm_the_garbage_collector
    from infinistore.server import ShardProcess

    try:
        shard = ShardProcess(int(sys.argv[1]))
    except EOFError:  # the supervisor was killed meanwhile
        return
    set_up_logging(shard.start.config.log_level, shard.start.config.log_format, shard=shard.start.index)
    import trio

    trio.run(shard.run, calm_the_garbage_collector)


if __name__ == "__main__":
    _main()
