"""`infinistore unpin`: lets pinned keys be evicted again."""

from infinistore.cli.pin import unpin as command

__all__ = ["command"]
