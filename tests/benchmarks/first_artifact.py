"""How long a newcomer waits for the first program: `make demo` in a fresh copy of the project, without a GPU.

    python tests/benchmarks/first_artifact.py

Needs git, make and a package registry: the packages of `deploy/locks/dev.txt` are installed into an environment of its
own, from pip's cache if that has them. Prints the seconds to each step; exits with 1 if the first program is not there
after five minutes.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.benchmarks.figures import figure

ROOT = Path(__file__).parent.parent.parent
LIMIT = 300.0
STEPS = {
    "pnet-samples.npz": "packages installed, the demo's data written",
    "16 cells": "a farm with queue, object storage and worker runs; the manifest is planned",
    " succeeded in ": "the first program is checked, measured and stored",
    "15 of 16 cells succeeded": "every cell has ended",
}
"""What is printed at the end of each step, in this order."""


def main() -> None:
    print(f"load at the beginning: {os.getloadavg()[0]:.1f}, on {os.cpu_count()} cores")
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "farm"
        subprocess.run(["git", "clone", "--quiet", "--depth", "1", ROOT.as_uri(), str(copy)], check=True)
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("FARM_", "MAKE"))}
        began, steps, first = time.monotonic(), iter(STEPS.items()), 0.0
        sign, step = next(steps)
        with subprocess.Popen(
            ["make", "demo"], cwd=copy, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as process:
            for line in process.stdout or ():
                if sign and sign in line:
                    took = time.monotonic() - began
                    first = took if "first" in step else first
                    figure(step, took, "s", LIMIT if "first" in step else None)
                    sign, step = next(steps, ("", ""))
        print(f"load at the end: {os.getloadavg()[0]:.1f}")
    if process.returncode or not first or first > LIMIT:
        sys.exit(f"`make demo` ended with {process.returncode}; the first program was there after {first:.0f} s")


if __name__ == "__main__":
    main()
