"""Which tests run which line, found by running them once (`tests.mutants.reach`) and kept until they change."""

from __future__ import annotations

import difflib
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable
from functools import cached_property
from itertools import count
from pathlib import Path
from typing import Any

from tests.mutants.change import Change
from tests.mutants.places import DOCUMENTS, KEPT, LIMITS, ROOMS, ROOT, TESTS

AT_MOST = 1 / 16
"""Tests for one change, as a share of the seconds of all: about 40 s. A busy machine chooses the same ones."""
SLOW = 1 / 45
"""A test that takes more of them is asked about no change."""

BODY = re.compile(r"^local function (\w+)\((?:[^\n]* end$|.*?^end\b)", re.MULTILINE | re.DOTALL)
"""A shared function of a script, on one line or on several."""


class TestsByLine:
    """What was found: tests with their seconds, and for each line and script the tests that run it."""

    __test__ = False

    def __init__(self, kept: dict[str, Any]) -> None:
        self._kept = kept

    @classmethod
    def found(cls, tests: Iterable[str] = TESTS, *, keep: Path = KEPT) -> TestsByLine:
        """Return what is kept, after running the test files that are new or have changed since then."""
        kept = json.loads(keep.read_text()) if keep.exists() else {"files": {}, "tests": {}, "sources": {}}
        now = {name: _digest(name) for name in _test_files(tests)}
        changed = [name for name, digest in now.items() if kept["files"].get(name) != digest]
        old = cls(kept)
        kept["tests"] = {
            test: {**facts, "lines": {name: sorted(old._moved(name, lines)) for name, lines in facts["lines"].items()}}
            for test, facts in kept["tests"].items()
            if (file := test.partition("::")[0]) in now and file not in changed
        }
        if changed:
            kept["tests"] |= _run(changed)
        kept |= {"files": now, "sources": {str(path.relative_to(ROOT)): path.read_text() for path in sources()}}
        keep.parent.mkdir(parents=True, exist_ok=True)
        keep.write_text(json.dumps(kept))
        return cls(kept)

    def _moved(self, name: str, lines: list[int]) -> set[int]:
        """Return where lines are now that were elsewhere when their tests ran.

        Lines that have been written since then count as run by the tests of those in whose place they are.
        """
        return {place for line in lines for place in self._places(name).get(line, ())}

    def _places(self, name: str) -> dict[int, range]:
        if name not in self._moves:
            before = self._kept["sources"].get(name, "").splitlines()
            now = (ROOT / name).read_text().splitlines() if (ROOT / name).exists() else []
            self._moves[name] = places = {}
            for how, a, b, c, d in difflib.SequenceMatcher(None, before, now, autojunk=False).get_opcodes():
                if how == "equal":
                    places |= {a + 1 + line: range(c + 1 + line, c + 2 + line) for line in range(b - a)}
                elif how == "replace":
                    places |= dict.fromkeys(range(a + 1, b + 1), range(c + 1, d + 1))
                elif how == "insert" and a in places:
                    places[a] = range(places[a].start, d + 1)
        return self._moves[name]

    @cached_property
    def _moves(self) -> dict[str, dict[int, range]]:
        return {}

    @cached_property
    def _by_line(self) -> dict[tuple[str, int], set[str]]:
        found = defaultdict(set)
        for test, facts in self._kept["tests"].items():
            for name, lines in facts["lines"].items():
                for line in lines:
                    found[name, line].add(test)
                found[name, 0].add(test)
        return found

    @cached_property
    def _by_script(self) -> dict[str, set[str]]:
        found = defaultdict(set)
        for test, facts in self._kept["tests"].items():
            for script in facts["scripts"]:
                found[script].add(test)
        return found

    def chosen(self, change: Change) -> list[str]:
        """Return the tests that may notice a change: the nearest first, then from every file its fastest."""
        if change.file.endswith(".lua"):
            able = {test for script in scripts_with(change) for test in self._by_script[script]}
        else:
            first, last = change.lines
            able = {test for line in range(first, last + 1) for test in self._by_line[change.file, line]}
            if change.everywhere:
                able |= self._by_line[change.file, 0]
        if change.everywhere or (change.file.endswith(".lua") and not change.function):
            able |= {test for test in self._kept["tests"] if test == LIMITS or test.startswith(DOCUMENTS)}
        seconds = {test: self._kept["tests"][test]["seconds"] for test in able}
        place: dict[str, int] = {}
        counts: dict[str, count[int]] = defaultdict(count)
        for test in sorted(able, key=lambda test: (seconds[test], test)):
            place[test] = next(counts[test.partition("::")[0]])
        ordered = sorted(able, key=lambda test: (_distance(test, change.file), place[test], seconds[test], test))
        whole = self.seconds(self._kept["tests"])
        chosen, spent = [], 0.0
        for test in ordered:
            if seconds[test] <= SLOW * whole and (spent + seconds[test] <= AT_MOST * whole or not chosen):
                chosen.append(test)
                spent += seconds[test]
        return chosen

    def seconds(self, tests: Iterable[str]) -> float:
        """Return how long tests take together."""
        return sum(self._kept["tests"][test]["seconds"] for test in tests)


def sources() -> list[Path]:
    """Return the files that are changed."""
    return sorted(path for room in ROOMS for ending in ("py", "lua") for path in (ROOT / room).rglob(f"*.{ending}"))


def scripts_with(change: Change) -> set[str]:
    """Return the scripts that hold a line: a shared function is in those that call it, also through others."""
    texts = {path.stem: re.sub(r"--.*", "", path.read_text()) for path in (ROOT / change.file).parent.glob("*.lua")}
    own = {name for name in texts if not name.startswith("_")}
    stem = Path(change.file).stem
    if stem in own:
        return {stem}
    if not change.function:
        return own
    bodies = {found[1]: found[0] for name in texts.keys() - own for found in BODY.finditer(texts[name])}
    callers = {change.function}
    while more := {name for name, body in bodies.items() if name not in callers and _calls(body, callers)}:
        callers |= more
    return {name for name in own if _calls(texts[name], callers)}


def _calls(text: str, names: set[str]) -> bool:
    return bool(names & set(re.findall(r"\w+", text)))


def _distance(test: str, file: str) -> int:
    """Return how far a test is from a file: in its room's unit tests, its room's other tests, elsewhere.

    Contracts are near every room.
    """
    room = file.split("/")[1]
    near = f"/{room}/" in test or test.startswith("tests/contracts/")
    return 0 if test == LIMITS or test.startswith(f"tests/unit/{room}/") else 1 if near else 2


def _test_files(tests: Iterable[str]) -> list[str]:
    found = (
        path for name in tests for path in ([ROOT / name] if name.endswith(".py") else (ROOT / name).rglob("test_*.py"))
    )
    return sorted(str(path.relative_to(ROOT)) for path in found)


def _digest(name: str) -> str:
    return hashlib.sha256((ROOT / name).read_bytes()).hexdigest()


def _run(files: list[str]) -> dict[str, Any]:
    print(f"running {len(files)} test files to learn which lines they run", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "--tb=line",
            "-p",
            "no:cacheprovider",
            "-p",
            "tests.mutants.reach",
        ]
        command += ["-m", "not noise and not wheels and not migraphx", *files, *(["-n", "2"] if len(files) > 3 else [])]
        subprocess.run(command, cwd=ROOT, env={**os.environ, "REACH": folder}, check=False)
        found: dict[str, Any] = {}
        for path in Path(folder).glob("*.json"):
            found |= json.loads(path.read_text())
    return found
