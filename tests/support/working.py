"""Another worker process that has an attempt at work."""

import subprocess
import sys
from pathlib import Path

AT_WORK = """
import sys, time
from pathlib import Path
from farm.node.disk import WorkFolder
with WorkFolder(Path(sys.argv[1])).place("j-1-1-") as folder:
    (folder / "model").write_text("model")
    print(folder, flush=True)
    time.sleep(600)
"""


def at_work_in(work: Path) -> subprocess.Popen[str]:
    """Start one; it has said its attempt's folder on its standard output, and works until it is killed."""
    command = [sys.executable, "-c", AT_WORK, str(work)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout
    assert process.stdout.readline()
    return process
