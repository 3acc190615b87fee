"""Entry point of the command line: `farm --version` answers before anything else is imported."""

from __future__ import annotations

import atexit
import gc
import sys
from collections.abc import Sequence

GARBAGE = 100_000
"""So many new objects are made before Python looks for garbage: more than any start makes, for a look takes 10 ms."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `farm` and return its exit code (`farm help exit-codes` lists them)."""
    if arguments is None:
        arguments = sys.argv[1:]
        gc.set_threshold(GARBAGE)
        # At the end of a process Python looks through all that was imported once more; the kernel frees it anyway.
        atexit.register(gc.freeze)
    if arguments in (["--version"], ["-V"]):
        from farm import __version__

        sys.stdout.write(f"farm {__version__}\n")
        return 0
    _compile_no_annotations()
    from farm.cli.commands import run

    return run(arguments)


def _compile_no_annotations() -> None:
    """Let `typing` keep annotations as texts until somebody evaluates them.

    Every field of a TypedDict and every annotation that is a text makes a `ForwardRef`, which compiles the text: 1,500
    times at a start, of which few are evaluated, and `eval` takes texts too. Python 3.14 no longer compiles them.
    """
    import typing

    vars(typing).setdefault("compile", lambda text, *_: text)
