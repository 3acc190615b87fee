"""How long `farm` takes to say something about itself, against an interpreter that does nothing.

    python tests/benchmarks/startup.py [RUNS]

Prints medians and ratios; exits with 1 where a limit is broken. The limits are for two cores that do other work too.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time

LIMITS = {
    ("-m", "farm", "--version"): 0.150,
    ("-m", "farm", "--help"): 0.250,
    ("-m", "farm", "run", "--help"): 0.500,
}
"""Seconds. A command's own help is not held to less: the framework reads its options by pydantic."""


def median_seconds(runs: int, arguments: tuple[str, ...]) -> float:
    """Return the median wall time of starting this interpreter with these arguments, from bytecode as if installed."""
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    times = []
    for _ in range(runs):
        begun = time.perf_counter()
        subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL, env=environ)
        times.append(time.perf_counter() - begun)
    return statistics.median(times)


def main() -> int:
    """Measure, print, judge."""
    runs = int(sys.argv[1]) if len(sys.argv) > 1 else 15
    baseline = median_seconds(runs, ("-c", "pass"))
    print(f"{'python -c pass':24} {baseline * 1e3:6.0f} ms   1.0x")
    broken = 0
    for arguments, limit in LIMITS.items():
        seconds = median_seconds(runs, arguments)
        broken += seconds > limit
        verdict = "ok" if seconds <= limit else "OVER"
        name = " ".join(arguments[1:])
        print(f"{name:24} {seconds * 1e3:6.0f} ms  {seconds / baseline:4.1f}x   limit {limit * 1e3:.0f} ms  {verdict}")
    print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores: what else runs here slows this down")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
