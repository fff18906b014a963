"""The demonstration: server, prefill and decode share the KV cache of a text.

`infinistore demo` runs it. `run.py` controls it; the other modules are its parts:

- `settings.py`: the options and their defaults
- `layout.py`: the bytes of a token, the keys (a hash chain over the tokens, as in
  inference engines), and the bytes that replace a model's output, the same in every
  process
- `text.py`: converts a file to tokens, and to two prompts with the same beginning
- `messages.py`: the messages between the processes, and expected failures
- `workers.py`: prefill and decode, each in a separate process
- `processes.py`: starts, restarts and stops the server, and the workers
- `display.py`: the output while it runs, and the figures at the end

Like an engine, it uses only the public API.
"""
