"""Another user of this machine: what a process without our rights can do."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

NOBODY = 65534

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


def as_neighbour(deed: Callable[[], Any], within: Path) -> Any:
    """Do something as another user with `within` as the current folder; return what came of it, as JSON has it.

    He stands in that folder even if those above are closed to him, as pytest's are.
    """
    answers, writer = os.pipe()
    if (pid := os.fork()) == 0:
        code = 1
        try:
            os.chdir(within)
            os.setgroups([])
            os.setresgid(NOBODY, NOBODY, NOBODY)
            os.setresuid(NOBODY, NOBODY, NOBODY)
            data = json.dumps(deed()).encode()
            os.close(answers)
            with os.fdopen(writer, "wb") as file:
                file.write(data)
            code = 0
        finally:
            os._exit(code)
    os.close(writer)
    with os.fdopen(answers, "rb") as file:
        data = file.read()
    assert os.waitpid(pid, 0)[1] == 0, "it failed as another user"
    return json.loads(data)
