"""LMCache itself, where it is installed: `make test-integrations` brings an environment that has it."""

import warnings
from importlib.util import find_spec

if find_spec("lmcache") is not None:
    with warnings.catch_warnings():  # what LMCache and its dependencies warn of while they are imported
        warnings.simplefilter("ignore")
        import lmcache.v1.cache_engine  # noqa: F401
