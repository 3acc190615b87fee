"""`farm` as the first process of a container, which the kernel ends at no signal that it does not catch."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.helpers import wait_until
from tests.support.places import ROOT

SIGTERM_BIT = 1 << (signal.SIGTERM - 1)


def catches_sigterm(pid: int) -> bool:
    status = Path(f"/proc/{pid}/status").read_text()
    caught = next(line for line in status.splitlines() if line.startswith("SigCgt:"))
    return bool(int(caught.split()[1], 16) & SIGTERM_BIT)


def child_of(pid: int) -> int:
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return int(found[0]) if found else 0


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("unshare"), reason="only root can make a first process")
def test_a_worker_ends_at_sigterm_also_while_it_starts(tmp_path: Path) -> None:
    """It waits for a Redis that says nothing. Without a handler it would go on, and take jobs until it is killed."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        environ = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "FARM_DATA_DIR": str(tmp_path / "data"),
            "FARM_REDIS_URL": f"redis://127.0.0.1:{silent.getsockname()[1]}/0",
        }
        command = ["unshare", "--pid", "--fork", "--kill-child", sys.executable, "-m", "farm", "worker"]
        outer = subprocess.Popen(
            command, cwd=tmp_path, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        try:
            worker = wait_until(lambda: child_of(outer.pid), message="the first process")
            wait_until(lambda: catches_sigterm(worker), message="it catches SIGTERM")
            os.kill(worker, signal.SIGTERM)
            assert outer.wait(30) == 0
        finally:
            outer.kill()
            outer.wait()
