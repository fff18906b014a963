"""Runs a command in a terminal of its own, and types something when it has shown
something: `python terminal.py KEYS COMMAND...`.

What it shows goes to standard output, and its exit code is that of this program.
"""

import os
import pty
import sys
import termios

keys, *command = sys.argv[1:]
pid, terminal = pty.fork()
if not pid:
    os.environ["TERM"] = "xterm"
    os.execvp(command[0], command)
termios.tcsetwinsize(terminal, (40, 120))
typed = False
while True:
    try:
        shown = os.read(terminal, 65536)
    except OSError:  # it has ended
        break
    if not shown:
        break
    os.write(sys.stdout.fileno(), shown)
    if not typed:
        os.write(terminal, keys.encode().decode("unicode_escape").encode())
        typed = True
sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
