"""Whether tests notice a change: they run in a copy of the tree that has it."""

from __future__ import annotations

import multiprocessing
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.mutants.change import Change

MEMORY = 8 << 30
"""Bytes that a change may take: a loop that never ends may fill a list."""

FORKS = multiprocessing.get_context("forkserver")
"""Importing all this takes longer than most tests."""
FORKS.set_forkserver_preload(
    ["boto3", "celery", "fastapi", "httpx", "hypothesis", "jsonschema", "numpy", "onnx", "pytest", "redis", "uvicorn"]
)

FAILED = re.compile(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", re.MULTILINE)


class End(NamedTuple):
    """How a change ended: `killed` by a test, by the `time` that the tests took, or `survived`."""

    how: str
    by: str = ""


class Copy:
    """A copy of the tree, in which one change at a time is tried."""

    def __init__(self, root: Path, sound: dict[str, bool], environ: Mapping[str, str]) -> None:
        self._root = root
        self._environ = environ
        self._times = count(int(time.time()) - 1_000_000)
        self._sound = sound

    @classmethod
    @contextmanager
    def of(cls, tree: Path, sound: dict[str, bool], environ: Mapping[str, str]) -> Iterator[Copy]:
        """Copy what git tracks, and what it would. Its tests find the variables of `environ`.

        Copies share what they learn in `sound`: which tests pass alone when nothing is changed. One that does not
        says nothing about a change.
        """
        with tempfile.TemporaryDirectory(prefix="m-") as folder:
            listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
            for name in subprocess.run(listed, cwd=tree, check=True, capture_output=True, text=True).stdout.split("\0"):
                if name and (tree / name).is_file():
                    (Path(folder) / "tree" / name).parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy2(tree / name, Path(folder) / "tree" / name)
            yield cls(Path(folder), sound, environ)

    def tried(self, change: Change, tests: Sequence[str], seconds: float) -> End:
        """Run the tests on the changed tree until one fails; `seconds` is how long they take on the unchanged one."""
        left = list(tests)
        while left:
            with self._changed(change):
                code, output = self._run(left, limit=60 + 3 * seconds)
            if code == 0:
                return End("survived")
            if code is None:
                return End("time")
            failed = FAILED.findall(output)
            if code == 1 and failed and failed[0] in left:
                if self._is_sound(failed[0]):
                    return End("killed", failed[0])
                left.remove(failed[0])
            elif self._is_sound(left[0]):  # pytest could not even begin
                return End("killed", "import")
            else:
                left.pop(0)
        return End("survived", "no test" if not tests else "")

    def _is_sound(self, test: str) -> bool:
        if test not in self._sound:
            self._sound[test] = self._run([test], limit=120)[0] == 0
        return self._sound[test]

    @contextmanager
    def _changed(self, change: Change) -> Iterator[None]:
        path = self._root / "tree" / change.file
        source = path.read_bytes()
        try:
            self._write(path, change.applied(source))
            yield
        finally:
            self._write(path, source)

    def _write(self, path: Path, content: bytes) -> None:
        path.write_bytes(content)
        # Python goes by time and size when it looks for what it has compiled.
        moment = next(self._times)
        os.utime(path, (moment, moment))

    def _run(self, tests: Sequence[str], limit: float) -> tuple[int | None, str]:
        """Return pytest's exit code, None if it took too long, and what it wrote."""
        arguments, output, temporary = (self._root / name for name in ("tests.txt", "output.txt", "t"))
        arguments.write_text("\n".join(tests))
        temporary.mkdir(exist_ok=True)
        environ = {**os.environ, **self._environ}
        process = FORKS.Process(target=_pytest, args=(self._root / "tree", arguments, output, temporary, environ))
        process.start()
        assert process.pid
        try:
            process.join(limit)
            if process.is_alive():
                os.kill(process.pid, signal.SIGINT)
                process.join(10)
                return None, ""
            return process.exitcode, output.read_text(errors="replace")
        finally:
            # The servers that it started end with it.
            if process.is_alive():
                os.killpg(process.pid, signal.SIGKILL)
                process.join()
            shutil.rmtree(temporary, ignore_errors=True)


def _pytest(tree: Path, tests: Path, output: Path, temporary: Path, environ: Mapping[str, str]) -> None:
    """Run tests of a tree, in a process that has imported what no change is in."""
    os.setsid()
    with output.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.chdir(tree)
    os.environ |= {**environ, "PYTHONPATH": str(tree), "TMPDIR": str(temporary), "COLUMNS": "400"}
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    tempfile.tempdir = None
    for name in [name for name in sys.modules if name.partition(".")[0] in ("farm", "tests")]:
        del sys.modules[name]
    sys.path.insert(0, str(tree))
    options = ["-x", "-q", "--tb=no", "-rfE", "-p", "no:cacheprovider", "-p", "no:schemathesis", f"@{tests}"]
    sys.exit(pytest.main(options))
