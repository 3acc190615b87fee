"""The command that changes the code: what it changes, and whether it sees that a test notices."""

from __future__ import annotations

import ast
import subprocess
from collections import Counter
from pathlib import Path

import pytest

from tests.mutants.__main__ import all_changes, changes_of, known_equal, named
from tests.mutants.change import Change
from tests.mutants.lua_changes import lua_changes
from tests.mutants.places import ROOT
from tests.mutants.python_changes import python_changes
from tests.mutants.tests_by_line import scripts_with
from tests.mutants.trial import Copy

SOURCE = b'''\
"""A module with 3 words."""
if TYPE_CHECKING:
    import numbers
LIMIT: int = 5


@once
def price(count: int | None = 2, *, of: str = "all") -> int | None:
    """Return 7 or more."""
    log.info("asked", count=count + 1)
    if not count:
        raise ValueError(f"{count + 1} is not enough", 400)
    total = count * LIMIT
    if total > 20 and of != "some":
        total -= 1
    note(total, title="9" * 9)
    return total
'''

SCRIPT = b"""\
-- a comment with 1 == 2
local function spend(job)
  local left = job.left
  if job.left > 0 and not job.over then call("DECRBY", "0 and 1", 4) end  -- not here
  return ARGV[2]
end
"""


def written(source: bytes, changes: list[Change]) -> set[str]:
    return {line[2:] for change in changes for line in change.difference(source) if line[0] == "+"}


def test_python_is_changed_in_its_logic_also_below_decorators_and_not_in_texts_logs_and_annotations() -> None:
    changes = python_changes("m.py", SOURCE)
    assert written(SOURCE, changes) == {
        "LIMIT: int = 6",
        'def price(count: int | None = 3, *, of: str = "all") -> int | None:',
        "if count:",
        "pass",  # for `raise`, the first `-=` and `note`
        "total = count / LIMIT",
        'if total >= 20 and of != "some":',
        'if total > 10 and of != "some":',
        'if total > 20 or of != "some":',
        'if total > 20 and of == "some":',
        'if not (total > 20 and of != "some"):',
        "total += 1",
        "total -= 2",
    }
    assert Counter(change.sort for change in changes)["dropped statement"] == 3


def test_scripts_are_changed_by_a_line_and_not_in_texts_comments_and_arguments() -> None:
    line = 'if job.left > 0 and not job.over then call("DECRBY", "0 and 1", 4) end  -- not here'
    assert written(SCRIPT, lua_changes("m.lua", SCRIPT)) == {
        line.replace(">", ">="),
        line.replace("0 and not", "0 or not"),
        line.replace("and not ", "and "),
        line.replace("> 0", "> 1"),
        line.replace("4", "5"),
        line.replace("job.left > 0 and not job.over", "not (job.left > 0 and not job.over)"),
    }


def test_every_changed_file_can_be_read() -> None:
    """A change that no interpreter takes would count as killed."""
    texts = {change.file: (ROOT / change.file).read_bytes() for change in changes_of(1, 100)}
    for change in changes_of(1, 100):
        if change.file.endswith(".py"):
            ast.parse(change.applied(texts[change.file]))


def test_a_seed_always_gives_the_same_changes() -> None:
    assert changes_of(7, 20) == changes_of(7, 20)
    assert changes_of(7, 20) != changes_of(8, 20)


def test_a_shared_function_is_tried_by_the_scripts_that_reach_it() -> None:
    change = Change("farm/store/lua/_shared.lua", 0, 0, "", "", (1, 1), function="queue_up")
    assert "hand_out" in scripts_with(change)  # through `offer` of the same file
    assert "lead" not in scripts_with(change)


def test_what_counts_as_equal_is_a_change_that_there_is() -> None:
    assert known_equal() - {named(change) for change in all_changes()} == set()


def test_a_planted_change_is_killed_by_the_test_that_sees_it_and_only_by_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    source = (
        b"def larger(a, b):\n    return a if a > b else b\n"
        b"def rest(a):\n    while a > 9:\n        a = a - 9\n    return a\n"
    )
    (tmp_path / "sums.py").write_bytes(source)
    (tmp_path / "test_sums.py").write_text(
        "from sums import larger, rest\n"
        "def test_blind(): assert larger(1, 1) == 1\n"
        "def test_broken(): assert larger(3, 2) == 4\n"
        "def test_larger(): assert larger(2, 1) == 2\n"
        "def test_rest(): assert rest(20) == 2\n"
    )
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    by_text = {change.difference(source)[1][2:]: change for change in python_changes("sums.py", source)}
    blind, broken, seeing = (f"test_sums.py::test_{name}" for name in ("blind", "broken", "larger"))
    with Copy.of(tmp_path, {}, {}) as copy:
        planted = by_text["return a if not (a > b) else b"]
        assert copy.tried(planted, [broken, seeing], 1) == ("killed", seeing)
        assert copy.tried(by_text["return a if a >= b else b"], [blind, seeing], 1) == ("survived", "")
        assert copy.tried(planted, [], 0) == ("survived", "no test")
        endless = copy.tried(by_text["a = a + 9"], ["test_sums.py::test_rest"], -19)
        assert endless == ("time", "")
    assert (tmp_path / "sums.py").read_bytes() == source
