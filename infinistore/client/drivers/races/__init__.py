"""A part of a call against the other copies of its blocks: one module a driver."""
