"""The pools of a server with tenants: one for each trust group, and who uses which."""
