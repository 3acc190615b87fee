"""Entry point of the command line: `farm --version` answers before anything else is imported."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `farm` and return its exit code (`farm help exit-codes` lists them)."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    if arguments == ["--version"]:
        from farm import __version__

        sys.stdout.write(f"farm {__version__}\n")
        return 0
    from farm.cli.commands import run

    return run(arguments)
