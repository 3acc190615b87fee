"""The command line as an object, for tests that look at all of it."""

from __future__ import annotations

from typing import Any

import typer

from farm.cli.commands import app


def whole_command_line() -> Any:
    """The group of all commands; each command is otherwise made when it is first called."""
    top: Any = typer.main.get_command(app)
    top.commands = {name: top.get_command(None, name) for name in top.list_commands(None)}
    return top
