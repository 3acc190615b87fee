"""The command line. Every command is a function with typed options; what it needs is imported when it runs."""

from farm.cli.main import main

__all__ = ["main"]
