"""The demonstration: server, prefill and decode share the KV cache of a text.

`infinistore demo` runs it. `run.py` controls it; the other modules are its parts:

- `settings.py`: the options and their defaults
- `layout.py`: the bytes of a token, and the keys (a hash chain over the tokens, as in
  inference engines)
- `text.py`: converts a file to tokens, and to two prompts with the same beginning
- `content.py`: the bytes that replace a model's output, the same in every process
- `messages.py`: the messages between the processes
- `prefill.py`, `decode.py`: the two workers, each in a separate process; `worker.py`
  and `load.py` are shared
- `failure.py`: expected failures
- `processes.py`: starts and stops the server and the workers; `own_server.py` has the
  disk of the server, and restarts it
- `restart.py`: what happens with a disk after both prompts; `watching.py` asks the
  server for its figures meanwhile
- `display.py`: the output while it runs, and the table at the end; `result.py` has the
  figures

Like an engine, it uses only the public API.
"""
