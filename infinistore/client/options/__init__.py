"""How a store is opened: the options of `open_store` and the URL."""
