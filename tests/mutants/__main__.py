"""Change one small thing at a time and see whether a test fails; `make mutants N=200 SEED=7`.

    python -m tests.mutants --count 200 --seed 7
    python -m tests.mutants --count 30 --only farm/results      changes of some files
    python -m tests.mutants --list                              only say which

Exits with 1 if less than 90 % are killed. `equal.toml` names changes that nobody can notice: they are left out.
"""

from __future__ import annotations

import argparse
import json
import queue
import random
import sys
import time
import tomllib
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict
from functools import cache

from tests.conftest import WEED, running_weed
from tests.mutants.change import Change
from tests.mutants.lua_changes import lua_changes
from tests.mutants.places import EQUAL, KEPT, PICTURES, ROOT
from tests.mutants.python_changes import python_changes
from tests.mutants.tests_by_line import TestsByLine, sources
from tests.mutants.trial import Copy, End

KILLED = 0.9


def main() -> int:
    """Try the changes of a seed; 0 if enough of them are killed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=200, metavar="N")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6), metavar="N")
    parser.add_argument("--only", default="", metavar="TEXT", help="files whose path begins with this")
    parser.add_argument("--list", action="store_true", help="print the changes and try none")
    parser.add_argument("--at-once", type=int, default=2, metavar="N", help="how many are tried at the same time")
    arguments = parser.parse_args()
    chosen = changes_of(arguments.seed, arguments.count, arguments.only)
    print(f"seed {arguments.seed}: {len(chosen)} changes", flush=True)
    if arguments.list:
        for change in chosen:
            print(described(change))
        return 0
    began = time.monotonic()
    ends = tried(chosen, TestsByLine.found(), arguments.at_once)
    return reported(arguments.seed, ends, time.monotonic() - began)


def changes_of(seed: int, number: int, only: str = "") -> list[Change]:
    """Return so many changes, always the same for a seed and a tree."""
    equal = known_equal()
    found = [change for change in all_changes() if change.file.startswith(only) and named(change) not in equal]
    return random.Random(seed).sample(found, min(number, len(found)))


@cache
def all_changes() -> tuple[Change, ...]:
    """Return every change of the rooms, in order of file and place."""
    return tuple(
        change
        for path in sources()
        if (name := str(path.relative_to(ROOT))) not in PICTURES
        for change in (python_changes if path.suffix == ".py" else lua_changes)(name, path.read_bytes())
    )


def named(change: Change) -> tuple[str, str]:
    """Return the name by which a list holds a change wherever its lines are."""
    return change.file, "\n".join(change.difference((ROOT / change.file).read_bytes()))


def known_equal() -> set[tuple[str, str]]:
    """Return the changes that are known to change nothing, by file and difference."""
    return {(each["file"], each["change"].strip()) for each in tomllib.loads(EQUAL.read_text())["equal"]}


def tried(changes: list[Change], by_line: TestsByLine, at_once: int) -> dict[Change, End]:
    """Try every change, and say how each ended."""
    with ExitStack() as stack:
        copies: queue.SimpleQueue[Copy] = queue.SimpleQueue()
        sound: dict[str, bool] = {}
        # Where SeaweedFS started for each, that would take most of the time.
        environ = {WEED: json.dumps(asdict(stack.enter_context(running_weed())))}
        for _ in range(at_once):
            copies.put(stack.enter_context(Copy.of(ROOT, sound, environ)))

        def end(change: Change) -> End:
            tests = by_line.chosen(change)
            copy, began = copies.get(), time.monotonic()
            try:
                end = copy.tried(change, tests, by_line.seconds(tests))
            finally:
                copies.put(copy)
            print(
                f"{end.how:9}{time.monotonic() - began:4.0f} s of {len(tests):3} tests  {change}  {end.by}", flush=True
            )
            return end

        pool = ThreadPoolExecutor(at_once)
        stack.callback(pool.shutdown, cancel_futures=True)
        return dict(zip(changes, pool.map(end, changes), strict=True))


def described(change: Change) -> str:
    """Return a change with its place and its lines."""
    return f"{change}\n    " + "\n    ".join(change.difference((ROOT / change.file).read_bytes()))


def reported(seed: int, ends: dict[Change, End], seconds: float) -> int:
    """Print and write who survived; return the exit code."""
    survived = [change for change, end in ends.items() if end.how == "survived"]
    for change in survived:
        print(f"survived: {described(change)}")
    counts = Counter(end.how for end in ends.values())
    share = 1 - len(survived) / len(ends)
    said = ", ".join(f"{number} {how}" for how, number in counts.most_common())
    print(f"seed {seed}: {share:.1%} of {len(ends)} killed ({said}) in {seconds / 60:.0f} min")
    written = [{**change._asdict(), **end._asdict(), "as": described(change)} for change, end in ends.items()]
    (KEPT.parent / f"{seed}.json").write_text(json.dumps(written, indent=1))
    return 0 if share >= KILLED else 1


if __name__ == "__main__":
    sys.exit(main())
