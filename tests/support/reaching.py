"""What a hostile child tries to reach: another job's files, a server, a local socket, its worker."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.support.places import TESTS

HOSTILE = TESTS / "support" / "hostile_child.py"
PROBES = 23


def make_places(folder: Path) -> dict[str, Path]:
    """Make an attempt's folder with an input and a place for outputs, and what belongs to another job."""
    for name in ("attempt/model", "attempt/made", "cache"):
        (folder / name).mkdir(parents=True)
    (folder / "attempt/model/model.onnx").write_bytes(b"a model")
    (folder / "cache/other.onnx").write_bytes(b"a secret model")
    return {
        "input": folder / "attempt/model/model.onnx",
        "output": folder / "attempt/made/program.onnx",
        "other": folder / "cache/other.onnx",
    }


@contextmanager
def within_reach(places: dict[str, Path]) -> Iterator[dict[str, Any]]:
    """Yield what a child is asked to reach, with servers that listen meanwhile."""
    local = str(places["output"].parent / "s")
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as listening:
        listening.bind(local)
        listening.listen(1)
        yield {
            "local": local,
            "worker": os.getpid(),
            "port": server.getsockname()[1],
            **{name: str(path) for name, path in places.items()},
        }
