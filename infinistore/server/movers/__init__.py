"""The server's half of each way for blocks: `base.py` says what a mover is,
`composed.py` lists those of a server.
"""
