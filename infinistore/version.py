"""The version of this release: the only place where it stands."""

__all__ = ["__version__"]

__version__ = "0.1.0"
