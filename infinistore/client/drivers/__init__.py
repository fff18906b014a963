"""What waits: Trio, asyncio, and threads."""
