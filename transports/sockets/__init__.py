"""TCP and Unix sockets as streams, for Trio, asyncio and threads."""
