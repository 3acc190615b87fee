"""The wire: one type for each document that crosses a process, a file or HTTP, and what checks one.

Types are TypedDicts. A field that a later release adds is NotRequired or has a default: others may not send it yet.
"""
