"""What people call: the asynchronous store, its generated blocking twin, and leases."""
