"""A cluster's membership in etcd: the conversation with its JSON gateway, what nodes
write there, and what follows from it. No I/O: coroutines whose awaits end in effects.
"""
