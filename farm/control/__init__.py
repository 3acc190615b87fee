"""The control plane: plain functions, and the loops that run them.

Any number of control planes may run. The leader's lease saves double work; no function is wrong if two run it.
"""
