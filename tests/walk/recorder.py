"""Recorder: writes down, in each process of a farm, every call that enters another file of `farm/` or `tasks/`.

Needs the standard library only, since it also runs in sealed children. A child does not inherit the environment, so
this module is then the program that is started, and it starts the child's own program.

A script of the job store is a file, too. Its text is sent with a note at each call of a function of another file; the
notes are members of the set `NOTES`, since a script can write nowhere else.
"""

from __future__ import annotations

import fcntl
import json
import mmap
import os
import re
import runpy
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

FOLDER = "FARM_WALK"
"""The environment variable with the folder of the record: the file `calls`, and the switch `on`."""
HOOK = "FARM_WALK_HOOK"
"""The environment variable with the folder of this module; `hook/sitecustomize.py` reads it."""
SHARED = tuple(
    f"farm/{name}" for name in ("errors", "files", "inert", "logging", "metrics", "settings", "spec", "units")
)
"""Files and folders that every room may use: they are words, not places."""
LOOPS = ("reap", "sweep", "repair", "forget", "tidy", "tuning", "triggers", "webhooks", "garbage", "radar")
UPKEEP = {f"control-{name}" for name in LOOPS}
"""Threads of the control plane that do nothing for the cell."""
ROLES = {
    "serve": "server",
    "worker": "supervisor",
    "tasks": "worker process",
    "submit": "farm submit",
    "fetch": "farm fetch",
}
"""What a process is, by a word of its command line; other processes are not followed."""
ROOT = str(Path(__file__).parents[2]) + os.sep
LINK = "farm/store/link.py"
LUA = "farm/store/lua"
NOTES = "{farm}:walk"
"""The key of the set of calls within scripts, each as JSON."""


class Recorder:
    """Records the calls of one process while the first byte of the file `on` is not 0."""

    def __init__(self, folder: Path, role: str) -> None:
        self._role = role
        self._seen: set[tuple[str, int, str, str]] = set()
        self._files: dict[str, str] = {}
        self._scripts: dict[str, tuple[str, str]] = {}
        """By digest the name of a script, and its text with notes."""
        with (folder / "on").open("r+b") as switch:
            self._on = mmap.mmap(switch.fileno(), 1, access=mmap.ACCESS_READ)
        self._calls = folder / "calls"
        self._open()

    def _open(self) -> None:
        """Open the file of calls, at a number that nobody takes who opens others."""
        opened = os.open(self._calls, os.O_WRONLY | os.O_APPEND)
        self._out = fcntl.fcntl(opened, fcntl.F_DUPFD_CLOEXEC, 900)
        os.close(opened)

    def start(self) -> None:
        """Follow this thread, and all that start from now on."""
        threading.setprofile(self._profile)
        sys.setprofile(self._profile)

    def _file(self, path: str) -> str:
        """Return a file's path in the repository if it counts, else an empty text."""
        if path not in self._files:
            name = path.removeprefix(ROOT)
            own = name != path and name.startswith(("farm/", "tasks/"))
            self._files[path] = name if own and not is_shared(name) else ""
        return self._files[path]

    def _profile(self, frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and self._on[0]:
            name = self._file(frame.f_code.co_filename)
            if name:
                self._enter(frame, name)

    def _enter(self, frame: FrameType, name: str) -> None:
        caller = self._caller(frame)
        source = self._file(caller.f_code.co_filename) if caller else ""
        if source == name or _is_upkeep(threading.current_thread()):
            return
        if name == LINK and not self._scripts:
            self._follow_scripts(frame.f_locals.get("self"))
        self._note((source, caller.f_lineno if caller else 0, name, frame.f_code.co_qualname), frame, caller)

    def _note(self, call: tuple[str, int, str, str], frame: FrameType, caller: FrameType | None) -> None:
        """Write a call down if it is the first from its place, with the functions that wait for it."""
        if call not in self._seen and not _is_import(frame, self._file):
            within = [(self._file(each.f_code.co_filename), each.f_code.co_qualname) for each in self._callers(caller)]
            self._seen.add(call)
            line = _as_json(self._role, *call, within).encode() + b"\n"
            try:
                os.write(self._out, line)
            except OSError:  # A guard and a child close what they got; they do so before they are sealed.
                self._open()
                os.write(self._out, line)

    def _caller(self, frame: FrameType | None) -> FrameType | None:
        """Return the nearest frame above one that is in a file that counts."""
        frame = frame and frame.f_back
        while frame and not self._file(frame.f_code.co_filename):
            frame = frame.f_back
        return frame

    def _callers(self, frame: FrameType | None) -> list[FrameType]:
        found = []
        while frame:
            found.append(frame)
            frame = self._caller(frame)
        return found

    def _follow_scripts(self, link: Any) -> None:
        """Send scripts with notes from now on, and record that they are entered."""
        redis = sys.modules["redis"].client
        for script in getattr(link, "_scripts", {}).values():
            self._scripts[script.sha] = (script.name, with_notes(script.text, partial(_as_json, self._role)))
        if self._scripts:
            for kind in (redis.Redis, redis.Pipeline):
                kind.execute_command = self._sending(kind.execute_command)

    def _sending(self, send: Callable[..., Any]) -> Callable[..., Any]:
        def execute_command(client: Any, *words: Any, **options: Any) -> Any:
            counts = words[0] == "EVALSHA" and self._on[0] and not _is_upkeep(threading.current_thread())
            if counts and words[1] in self._scripts:
                name, text = self._scripts[words[1]]
                self._note((LINK, 0, f"{LUA}/{name}.lua", name), sys._getframe(), self._caller(sys._getframe()))
                words = ("EVAL", text, *words[2:])
            return send(client, *words, **options)

        return execute_command


def is_shared(name: str) -> bool:
    """Whether a file does not count."""
    return name.removesuffix(".py") in SHARED or name.startswith(tuple(f"{each}/" for each in SHARED))


def with_notes(text: str, note: Callable[..., str]) -> str:
    """Return a script's text in which each call of another file's function adds a member to the set of notes."""
    sources = {path.stem: path.read_text() for path in Path(ROOT, LUA).glob("*.lua")}
    parts = {name: source for name, source in sources.items() if source in text}
    places = {
        function: name
        for name in (*parts, "_shared")  # Of this one a script has only what it uses.
        for function in re.findall(r"^local function (\w+)", sources[name], re.MULTILINE)
    }
    for name, source in parts.items():
        text = text.replace(source, _noted(name, source, places, note))
    return f'local function walk(call, f) redis.call("SADD", "{NOTES}", call) return f end\n{text}'


def _noted(name: str, source: str, places: Mapping[str, str], note: Callable[..., str]) -> str:
    """Return the text of one file with notes."""
    own = set(re.findall(r"local (?:function )?(\w+)", source))
    others = [function for function, place in places.items() if place != name and function not in own]
    lines = source.split("\n")
    for number, line in enumerate(lines, 1):
        code, dashes, comment = line.partition("--")

        def noted(found: re.Match[str], number: int = number) -> str:
            call = note(f"{LUA}/{name}.lua", number, f"{LUA}/{places[found[1]]}.lua", found[1], [])
            return f"walk([==[{call}]==], {found[1]})("

        if others:
            code = re.sub(rf"(?<![\w.:])({'|'.join(others)})\(", noted, code)
        lines[number - 1] = code + dashes + comment
    return "\n".join(lines)


def _as_json(role: str, source: str, line: int, name: str, function: str, within: list[tuple[str, str]]) -> str:
    return json.dumps(
        {"role": role, "source": source, "line": line, "file": name, "function": function, "within": within}
    )


def _is_upkeep(thread: threading.Thread) -> bool:
    """Whether a thread looks after the farm, or was started by one that does, as those of its pools are."""
    return thread.name in UPKEEP or getattr(thread, "of_upkeep", False)


def _is_import(frame: FrameType | None, own: Any) -> bool:
    """Whether a module of the farm is being imported: what it does then is not part of the walk."""
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
        if role == "worker process" and len(command) > 1 and str(command[1]).endswith("runner/child.py"):
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
