"""The drivers: `open_store` for Trio, for asyncio and for threads. Each runs calls, and
carries out what they ask for.
"""
