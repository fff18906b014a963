"""The disks of a server: the task that runs them, and what requests wait for."""
