"""A worker process: `python -m tasks APP OPTIONS`, with a module that has an `app`, and Celery's options as JSON.

Celery's own command line imports all its commands and a shell first, which takes as long as half of the farm.
"""

from __future__ import annotations

import json
import sys
from importlib import import_module

if __name__ == "__main__":
    worker = import_module(sys.argv[1]).app.Worker(**json.loads(sys.argv[2]))
    worker.start()
    sys.exit(worker.exitcode)
