"""Make the farm's bucket when Valkey and SeaweedFS answer, as `farm doctor --fix` does."""

import json
import subprocess
import sys
import time

PATIENCE = 120.0
"""Seconds to wait for both servers."""


def broken() -> list[str]:
    """Return what `farm doctor --fix` cannot fix of the two servers."""
    words = ["/opt/farm/bin/farm", "doctor", "--fix", "--json"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if not done.stdout:
        sys.exit(done.stderr)
    checks = json.loads(done.stdout)["checks"]
    return [
        f"{check['name']}: {check['found']}"
        for check in checks
        if check["name"] in ("settings", "redis", "object storage") and check["state"] != "ok"
    ]


deadline = time.monotonic() + PATIENCE
while found := broken():
    if time.monotonic() > deadline:
        sys.exit("\n".join(found))
    time.sleep(1)
