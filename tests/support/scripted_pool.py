"""The pool and the health probe of scripted workers. Imports little: each worker process of a test does it again."""

import os
from pathlib import Path

from farm.spec import Device
from farm.targets.pools import Pool, Target

POOL = Pool(Target("onnxruntime", "cpu"), "scripted-00000000", Device("cpu"), recipe=1)


def ask(wrong: Path) -> str:
    """The scripted health probe: it says what is in a file, and leaves a line next to it each time it is asked."""
    if wrong != Path(os.devnull):
        with wrong.with_suffix(".asked").open("a") as asked:
            asked.write("asked\n")
    return wrong.read_text()
