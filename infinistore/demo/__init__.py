"""The demonstration: a server, a prefill process and a decode process move the KV cache of a real text over TCP.

`infinistore demo` runs it. `run.py` tells the story; the other modules are its parts:

- `settings.py`: what can be chosen, and the defaults
- `layout.py`: how many bytes a token takes, and the keys (a hash chain over the tokens, as inference engines do it)
- `text.py`: a file becomes tokens, and two prompts that begin alike
- `content.py`: the bytes that stand in for a model's output, the same in every process that knows the key
- `messages.py`: what the processes tell each other about their work
- `prefill.py`, `decode.py`: the two workers, each a process of its own; `worker.py` and `load.py` are what both need
- `failure.py`: what can be expected to go wrong
- `processes.py`: starts and stops the server and the workers
- `display.py`: what the reader sees while it runs, and the table at the end; `result.py` has its figures

It uses the public API only, as an engine would: nothing in here knows how the store works inside.
"""
