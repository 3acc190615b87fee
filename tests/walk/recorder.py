"""Recorder: writes down, in each process of a farm, every call that enters another file of `farm/` or `tasks/`.

Needs the standard library only, since it also runs in sealed children. A child does not inherit the environment, so
this module is then the program that is started, and it starts the child's own program.
"""

from __future__ import annotations

import json
import mmap
import os
import runpy
import subprocess
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

FOLDER = "FARM_WALK"
"""The environment variable with the folder of the record: the file `calls`, and the switch `on`."""
HOOK = "FARM_WALK_HOOK"
"""The environment variable with the folder of this module; `hook/sitecustomize.py` reads it."""
UPKEEP = {
    *(f"control-{name}" for name in ("reap", "sweep", "repair", "tuning", "triggers", "webhooks", "garbage", "radar")),
    "lifeline",
    "leases",
}
"""Threads that look after the farm, or repeat by the clock what the walk has anyway."""
ROLES = {"serve": "server", "tasks": "worker process", "submit": "farm submit", "fetch": "farm fetch"}
"""What a process is, by a word of its command line; other processes are not followed."""
ROOT = str(Path(__file__).parents[2]) + os.sep


class Recorder:
    """Records the calls of one process while the first byte of the file `on` is not 0."""

    def __init__(self, folder: Path, role: str) -> None:
        self._role = role
        self._seen: set[tuple[str, str, str]] = set()
        self._files: dict[str, str] = {}
        with (folder / "on").open("r+b") as switch:
            self._on = mmap.mmap(switch.fileno(), 1, access=mmap.ACCESS_READ)
        self._out = os.open(folder / "calls", os.O_WRONLY | os.O_APPEND)

    def start(self) -> None:
        """Follow this thread, and all that start from now on."""
        threading.setprofile(self._profile)
        sys.setprofile(self._profile)

    def _file(self, path: str) -> str:
        """Return a file's path in the repository if it is the farm's own, else an empty text."""
        if path not in self._files:
            name = path.removeprefix(ROOT)
            own = name != path and name.startswith(("farm/", "tasks/"))
            self._files[path] = name if own else ""
        return self._files[path]

    def _profile(self, frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and self._on[0]:
            name = self._file(frame.f_code.co_filename)
            if name:
                self._enter(frame, name)

    def _is_inside(self, name: str, frame: FrameType | None) -> bool:
        """Whether a file already waits for the caller: it is called back then, and nothing is handed on."""
        while frame and self._file(frame.f_code.co_filename) != name:
            frame = frame.f_back
        return frame is not None

    def _enter(self, frame: FrameType, name: str) -> None:
        caller = frame.f_back
        while caller and not self._file(caller.f_code.co_filename):
            caller = caller.f_back
        source = self._file(caller.f_code.co_filename) if caller else ""
        function = frame.f_code.co_qualname
        # Functions without a name are called back: they belong to the file that made them.
        if source == name or "<" in function.rpartition(".")[2] or (source, name, function) in self._seen:
            return
        if _is_upkeep(threading.current_thread()) or self._is_inside(name, caller):
            return
        self._seen.add((source, name, function))
        if not _is_import(frame, self._file):
            call = {"role": self._role, "from": source, "to": name, "function": function}
            os.write(self._out, json.dumps(call).encode() + b"\n")


def _is_upkeep(thread: threading.Thread) -> bool:
    """Whether a thread looks after the farm, or was started by one that does, as those of its pools are."""
    return thread.name in UPKEEP or getattr(thread, "of_upkeep", False)


def _is_import(frame: FrameType | None, own: Any) -> bool:
    """Whether a module of the farm is being imported: what it does then is no part of the walk."""
    while frame:
        is_module = frame.f_code.co_name == "<module>" and frame.f_globals.get("__name__") != "__main__"
        if is_module and own(frame.f_code.co_filename):
            return True
        frame = frame.f_back
    return False


def install() -> None:
    """Record the calls of this process if it has a part in the walk, and of the children that it starts."""
    role = next((ROLES[word] for word in sys.orig_argv if word in ROLES), "")
    if not role:
        return
    folder = Path(os.environ[FOLDER])
    Recorder(folder, role).start()
    popen, begin = subprocess.Popen.__init__, threading.Thread.start

    def start_thread(thread: threading.Thread) -> None:
        thread.of_upkeep = _is_upkeep(threading.current_thread())  # type: ignore[attr-defined]
        begin(thread)

    threading.Thread.start = start_thread  # type: ignore[method-assign]

    def start(process: Any, command: Any, *rest: Any, **options: Any) -> None:
        if len(command) > 1 and str(command[1]).endswith("runner/child.py"):
            command = [command[0], __file__, *command[1:]]
            options["env"] = {**options["env"], FOLDER: str(folder)}
        popen(process, command, *rest, **options)

    subprocess.Popen.__init__ = start  # type: ignore[method-assign]


if __name__ == "__main__":
    program = sys.argv[1]
    sys.argv[:] = sys.argv[1:]
    action = json.loads(Path(sys.argv[1]).read_text())["action"]
    Recorder(Path(os.environ.pop(FOLDER)), f"child that answers `{action}`").start()
    runpy.run_path(program, run_name="__main__")
