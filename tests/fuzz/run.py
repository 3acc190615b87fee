"""Start the process that tries the readers, and read what came of it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tests.support.places import ROOT


def try_readers(
    found: Path,
    *,
    examples: int,
    seconds: float = 0.0,
    seed: int = 0,
    only: Sequence[str] = (),
    table: str = "tests.fuzz.readers",
    limit: float = 2.0,
) -> list[dict[str, Any]]:
    """Try the readers of a table, so many examples of each, and more until each has had these seconds.

    Each input has `limit` seconds of CPU: other load on the machine does not count. Inputs that break a promise are
    left in the folder `found`. The same seed tries the same inputs.
    """
    order = {
        "table": table, "examples": examples, "seconds": seconds, "seed": seed, "only": only, "found": str(found),
        "limit": limit,
    }  # fmt: skip
    command = [sys.executable, "-m", "tests.fuzz.child", json.dumps(order)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr[-2000:]
    return [json.loads(line) for line in ended.stdout.splitlines()]


def broken(results: Iterable[dict[str, Any]]) -> dict[str, str]:
    """Return by reader which promise was broken."""
    return {result["reader"]: result["broken"] for result in results if "broken" in result}
