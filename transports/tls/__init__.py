"""TLS over any stream, for Trio, asyncio and threads. Imported when it is asked for."""
