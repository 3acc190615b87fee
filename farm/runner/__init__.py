"""The child process: all that touches a compiler or a hostile model. Imports nothing else of the farm.

`child.py` is started as `<python> <folder>/child.py REQUEST.json MESSAGES_FD GUARD_FD`. Standard input is a
pipe that the worker holds: when it closes, everything that the child started is killed. Standard output and
standard error are the log. `protocol.py` describes requests and messages.
"""
