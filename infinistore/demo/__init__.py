"""The demonstration: server, prefill and decode share the KV cache of a text.

`infinistore demo` runs it. `run.py` tells the story; the other modules are its parts:

- `prompts.py`: the options; a text as tokens and two prompts; the keys and the bytes of
  their KV cache, the same in every process
- `workers.py`: prefill and decode, each a process, and the messages to and from them
- `processes.py`: starts, restarts and ends the server and the workers
- `display.py`: the output while it runs, and the figures at the end

Like an engine, it uses only the public API.
"""
