"""Make the token with which Prometheus reads the API's metrics, where there is none."""

import json
import subprocess
from pathlib import Path

PLACE = Path("/monitor/farm-token")

if not PLACE.is_file():
    # A token of that name whose secret was lost goes.
    subprocess.run(["/opt/farm/bin/farm", "token", "revoke", "prometheus"], capture_output=True, check=False)
    words = [
        "/opt/farm/bin/farm",
        "token",
        "create",
        "prometheus",
        "--role",
        "monitor",
        "--namespace",
        "main",
        "--json",
    ]
    made = subprocess.run(words, capture_output=True, text=True, check=True)
    PLACE.touch(mode=0o600)
    PLACE.write_text(json.loads(made.stdout)["secret"])
