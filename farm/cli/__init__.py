"""The command line. Every command is a function with typed options; it imports what it needs when it runs."""

from farm.cli.main import main

__all__ = ["main"]
