"""Entry point of the command line: `farm --version` answers before anything else is imported."""

from __future__ import annotations

import atexit
import gc
import os
import signal
import sys
from collections.abc import Sequence
from io import TextIOWrapper

from farm import __version__

GARBAGE = 100_000
"""So many new objects are made before Python looks for garbage: more than any start makes, for a look takes 10 ms."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `farm` and return its exit code (`farm help exit-codes` lists them)."""
    is_process = arguments is None
    if is_process and os.getpid() == 1:  # In a container, where the kernel would ignore it.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    if arguments is None:
        arguments = sys.argv[1:]
        gc.set_threshold(GARBAGE, 50)  # A plan of 50,000 cells lives on: to look through it each time took a tenth.
        for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
            if getattr(sys, name) is None:  # Closed, as by `>&-`: the next file or socket would take its number.
                setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode))
        if isinstance(sys.stdout, TextIOWrapper):  # A terminal may lack characters that we or users write.
            sys.stdout.reconfigure(errors="replace")
        # At the end of a process Python looks through all that was imported once more; the kernel frees it anyway.
        atexit.register(gc.freeze)
    try:
        code = _run(arguments)
    except KeyboardInterrupt:  # While the first modules are imported.
        print("stopped", file=sys.stderr)  # noqa: T201
        code = 8
    if is_process:
        try:
            sys.stdout.flush()
        except OSError:  # The error was said. Python tries again at its end, and would then exit with 120.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return code


def _run(arguments: Sequence[str]) -> int:
    if arguments in (["--version"], ["-V"]):
        try:
            print(f"farm {__version__}", flush=True)  # noqa: T201
        except OSError as error:
            print(f"error: cannot write: {error.strerror}\n  is the disk full?", file=sys.stderr)  # noqa: T201
            return 2
        return 0
    # By default the threads that numpy starts for linear algebra (OpenBLAS) spin for 2^26 ticks, which makes importing
    # numpy half as long again. What the user sets stays.
    os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", "4")
    _reach_this_machine_directly()
    from farm.cli.commands import run

    return run(arguments)


def _reach_this_machine_directly() -> None:
    """Keep the environment's proxy from the parts of a farm on this machine: it would look for them on its own machine.

    Many set a proxy for all that they run, and no exception. All libraries that ask over HTTP read these variables.
    """
    excepted = os.environ.get("no_proxy", os.environ.get("NO_PROXY", ""))
    if excepted.strip() != "*" and any(name.lower().endswith("_proxy") for name in os.environ):
        every = dict.fromkeys([*filter(None, excepted.split(",")), "localhost", "127.0.0.1", "::1"])
        os.environ["no_proxy"] = os.environ["NO_PROXY"] = ",".join(every)
