"""The Lua scripts: loads `lua/*.lua` and binds their arguments by the names in their headers."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

_ARGUMENTS = re.compile(r"^-- arguments: (.+)$", re.MULTILINE)
_SHARED = ("_base", "_builds", "_lanes", "_jobs", "_workers", "_attempts")
"""Files that are prepended to every script, in this order: each uses only those before it."""


@dataclass(frozen=True, slots=True)
class Script:
    """One script: its whole text, its digest on the server, and its arguments in order."""

    name: str
    text: str
    sha: str
    arguments: tuple[str, ...]

    def bind(self, values: Mapping[str, object]) -> list[object]:
        """Return the values in the script's order. Raises TypeError if the names differ from the header's."""
        if values.keys() != set(self.arguments):
            raise TypeError(f"{self.name}.lua takes {', '.join(self.arguments)}; got {', '.join(values)}")
        return [values[name] for name in self.arguments]


def load_scripts(constants: str) -> dict[str, Script]:
    """Return every script by its name; `constants` is Lua text that is prepended to all of them."""
    sources = _sources()
    shared = "\n".join([constants, *(sources[name] for name in _SHARED)])
    scripts = {}
    for name, source in sources.items():
        if name in _SHARED:
            continue
        found = _ARGUMENTS.search(source)
        arguments = tuple(found[1].split(", ")) if found else ()
        bound = f"local {', '.join(arguments)} = unpack(ARGV)\n" if arguments else ""
        text = f"{shared}\n{bound}{source}"
        # The server names scripts by SHA-1; it is not used for security.
        scripts[name] = Script(name, text, hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest(), arguments)
    return scripts


@cache
def _sources() -> dict[str, str]:
    folder = files("farm.store") / "lua"
    return {path.name.removesuffix(".lua"): path.read_text() for path in folder.iterdir() if path.name.endswith(".lua")}
