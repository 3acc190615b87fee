"""The app: all commands under one name, and one handler for all errors."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import re
import traceback
from collections.abc import Sequence
from difflib import get_close_matches
from importlib import import_module
from typing import Annotated, Any

import typer
from typer import Argument, Option
from typer.core import TyperCommand, TyperGroup
from typer.exceptions import TyperException

from farm import __version__, entry_points
from farm.cli import output
from farm.errors import ExitCode, FarmError, UsageError

# Each class that pydantic prepares would otherwise look through every installed package for plug-ins.
os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "1")

COMMANDS = {
    "Builds": (
        ("build_commands", "run submit plan retry watch status diff"),
        ("cell_commands", "history acknowledge logs open reproduce"),
        ("build_commands", "cancel pause resume"),
    ),
    "Programs": (("cell_commands", "compare"), ("artifact_commands", "fetch ls tag inspect")),
    "Manifests": (("manifest_commands", "init lint schema"),),
    "Without a farm": (("local_commands", "optimize bench"),),
    "The farm": (
        ("build_commands", "up"),
        ("operator_commands", "serve worker doctor audit gc drain unfence token"),
        ("tuning_commands", "tuning"),
    ),
}
"""The commands as `farm --help` lists them, with their modules: a command line imports only the one that it names."""

MODULES = {name: module for parts in COMMANDS.values() for module, names in parts for name in names.split()}

EXAMPLES = {
    "run": ("farm run farm.yaml -o built",),
    "submit": (
        "farm submit farm.yaml --label run=7 --junit report.xml",
        "farm submit farm.yaml --baseline prod --gate latency=5%",
        'id=$(farm submit farm.yaml --detach) && farm watch "$id"',
    ),
    "retry": ("farm retry @latest --failed", "farm retry @latest --only 'resnet50/*/int8/*'"),
    "status": ("farm status", "farm status @latest", "farm status --label run=7"),
    "diff": ("farm diff run=6 run=7",),
    "history": ("farm history resnet50/migraphx-gfx942/fp16/b8",),
    "acknowledge": (
        'farm acknowledge resnet50/migraphx-gfx942/fp16/b8 accuracy --reason "#12"',
        "farm acknowledge resnet50/migraphx-gfx942/fp16/b8 --delete",
    ),
    "logs": ("farm logs @latest resnet50/migraphx-gfx942/fp16/b8 --follow",),
    "open": ("farm open @latest", "farm open resnet50/migraphx-gfx942/fp16/b8"),
    "reproduce": ("farm reproduce @latest fp16/b8 -o again && sh again/run.sh",),
    "compare": ("farm compare resnet50", "farm compare resnet50 @latest"),
    "fetch": (
        "farm fetch resnet50/migraphx-gfx942/fp16/b8 -o out",
        "farm fetch resnet50@prod --target auto --precision fp16 -o out",
        "farm fetch resnet50@run=7 --target gfx942 --precision fp16 --family -o out",
    ),
    "ls": ("farm ls", "farm ls resnet50", "farm ls --ref prod", "farm ls pools"),
    "tag": ("farm tag prod @latest", "farm tag prod --previous"),
    "init": ("farm init model.onnx -o farm.yaml",),
    "lint": ("farm lint farm.yaml", "farm lint manifests/*.yaml --format github"),
    "optimize": (
        "farm optimize model.onnx --fp16",
        "farm optimize model.onnx --int8 --calibration data.npz --output-path out/",
    ),
    "bench": (
        "farm bench saved_models/model.mxr --against onnxruntime --model model.onnx",
        "farm bench resnet50/migraphx-gfx942/fp16/b8 --against @prod",
    ),
}
"""Command lines that the help of a command shows."""


class ExplainedCommand(TyperCommand):
    """A command whose help ends with examples."""

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """Write the examples as they are typed."""
        if examples := EXAMPLES.get(str(self.name)):
            with formatter.section("Examples"):
                for line in examples:
                    formatter.write(f"  {line}\n")


class Commands(TyperGroup):
    """All commands; each is made from its function, or its group of functions, when it is asked for."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        _add_json(self, *self.commands.values())

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of all commands, in the order of the help."""
        return list(dict.fromkeys([*MODULES, *self.commands, *_added()]))

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a command; None if there is none of that name."""
        if cmd_name not in self.commands and (made := _made(cmd_name)):
            self.commands[cmd_name] = made
        return self.commands.get(cmd_name)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the command that is meant. Raises UsageError with commands of similar names."""
        if args[0] == "version":
            raise UsageError("no such command: version", hint="`farm --version` prints it")
        if self.get_command(ctx, args[0]) is None:
            # Typer suggests from those that are made.
            for name in get_close_matches(args[0], self.list_commands(ctx)):
                self.get_command(ctx, name)
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Run a command. Raises Abort on Ctrl-C, with what it has said: the framework would keep only a code."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as interrupt:
            raise typer.Abort(*interrupt.args) from None

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the commands in groups, each with the first sentence about it."""
        groups = {title: " ".join(names for _, names in parts).split() for title, parts in COMMANDS.items()}
        added = [name for name in _added() if name not in MODULES]
        for title, names in {**groups, "Extensions": added, "Help": ["help"]}.items():
            if not names:
                continue
            rows = [(name, self._about(ctx, name)) for name in names]
            with formatter.section(title):
                formatter.write_dl(rows, col_max=12)

    def _about(self, ctx: Any, name: str) -> str:
        if name not in MODULES and name not in self.commands:
            return _first_sentence(entry_points.about(entry_points.COMMANDS, name))
        function = getattr(import_module(f"farm.cli.{MODULES[name]}"), name, None) if name in MODULES else None
        return _first_sentence(function.__doc__ if function else self.get_command(ctx, name).help)


def _first_sentence(text: str | None) -> str:
    return str(text or "").strip().partition("\n")[0].partition(". ")[0].rstrip(".")


def _added() -> list[str]:
    return list(entry_points.modules(entry_points.COMMANDS))


def _made(name: str) -> Any:
    """Make a command of its function or group of functions; None if neither the farm nor an extension has it."""
    if name in MODULES:
        module = import_module(f"farm.cli.{MODULES[name]}")
        found = getattr(module, name, None) or module.commands
    elif (found := entry_points.find(entry_points.COMMANDS, name)) is None:
        return None
    if isinstance(found, typer.Typer):
        group: Any = typer.main.get_command(found)
        group.name = name
        for each in group.commands.values():
            each.short_help = _first_sentence(each.help)  # The framework would cut it.
        _add_json(*group.commands.values())
        return group
    single = typer.Typer(add_completion=False, rich_markup_mode=None, context_settings=CONTEXT)
    single.command(name, cls=ExplainedCommand)(found)
    command = typer.main.get_command(single)
    _add_json(command)
    return command


Json = Annotated[bool, Option("--json", help="Print one JSON document on standard output, and nothing else there.")]


def _add_json(*commands: Any) -> None:
    """Give commands the option `--json`, which `run` reads: they need not know of it."""
    like = typer.Typer(add_completion=False)

    @like.command()
    def _(as_json: Json = False) -> None: ...

    (option,) = typer.main.get_command(like).params
    option.expose_value = False
    for each in commands:
        each.params.append(option)


CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 110}

app = typer.Typer(
    name="farm",
    no_args_is_help=True,
    cls=Commands,
    # Rich help costs 70 ms at every start, and its boxes do not survive a pipe.
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings=CONTEXT,
)


@app.callback(invoke_without_command=True)
def farm(
    context: typer.Context, version: Annotated[bool, Option("--version", "-V", help="Print the version.")] = False
) -> None:
    """Compile models for AMD GPUs and CPUs: once, for everybody."""
    if not version and context.invoked_subcommand is None:
        raise UsageError("which command?", hint="`farm help` lists them")
    if version:
        output.result({"version": __version__}, f"farm {__version__}")
        raise typer.Exit


@app.command("help")
def help_(
    context: typer.Context,
    topic: Annotated[list[str] | None, Argument(metavar="TOPIC", help="`exit-codes`, or a command.")] = None,
) -> None:
    """Explain a command, or the exit codes (`exit-codes`)."""
    if topic == ["exit-codes"]:
        said = (f"{code:>3}  {code.meaning}" for code in ExitCode)
        output.result({str(int(code)): code.meaning for code in ExitCode}, said)
        return
    with contextlib.redirect_stdout(io.StringIO()) as shown:
        code = run([*(topic or ()), "--help"])
    if code:
        raise typer.Exit(code)
    text = shown.getvalue().rstrip("\n")
    output.result({"help": text}, text)


def run(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit code."""
    if arguments[:1] == ["--json"]:
        arguments = [*arguments[1:], "--json"]  # It is an option of each command.
    before = output.AS_JSON.set("--json" in arguments)
    try:
        return _run(arguments)
    finally:
        output.AS_JSON.reset(before)


def _run(arguments: Sequence[str]) -> int:
    try:
        if "" in arguments:
            raise UsageError("an argument is empty", hint="is a variable of your script unset?")
        code = app(list(arguments), prog_name="farm", standalone_mode=False)
    except FarmError as error:
        code = output.complain(error)
    except TyperException as error:
        code = _wrong_usage(error, arguments)
    except ModuleNotFoundError as error:
        of_command = {"serve": "server", "worker": "worker"}.get(next(iter(arguments), ""), "embedded")
        extra = "signing" if error.name in _SIGNING else of_command
        hint = f"pip install 'migraphx-farm[{extra}]'"
        code = output.complain(UsageError(f"{error.name} is not installed", hint=hint))
    except (typer.Abort, KeyboardInterrupt) as interrupt:
        code = _interrupted([str(said) for said in interrupt.args])
    except SystemExit as end:
        # The framework's answer to a reader that went away, as `head` does, would say that a cell failed.
        code = ExitCode.INTERRUPTED if isinstance(end.__context__, OSError) else end.code
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EFBIG):
            return _own_fault()
        place = f" {error.filename}" if isinstance(error.filename, str) else ""
        output.AS_JSON.set(False)  # There may be no room for a document.
        code = output.complain(UsageError(f"cannot write{place}: {error.strerror}", hint="is the disk full?"))
    except Exception:
        return _own_fault()
    if code == 130:  # The framework was interrupted before the command began.
        code = _interrupted([])
    return int(code or ExitCode.OK)


def _interrupted(said: Sequence[str]) -> ExitCode:
    """End a command after Ctrl-C, which has `said` what exists; with --json, also print it as a document."""
    if not said:
        output.note("stopped")
    if output.as_json():
        code = ExitCode.INTERRUPTED
        found = {"kind": "Interrupted", "message": "; ".join(said) or "stopped", "hint": "", "exit_code": int(code)}
        output.emit({"error": found})
    return ExitCode.INTERRUPTED


def _own_fault() -> int:
    """Print the error that is being handled; an exit code of 1 would say that a cell failed."""
    output.note(traceback.format_exc().rstrip())
    output.note("error: this is a bug in the farm: please report it with the lines above")
    return int(ExitCode.FARM_FAULT)


def _wrong_usage(error: TyperException, arguments: Sequence[str]) -> ExitCode:
    """Let the framework print the error with the command's usage; with --json, also print it as a document."""
    shown = io.StringIO()
    show = getattr(error, "show", None)
    show(shown) if show else shown.write(error.format_message())
    output.note(re.sub(r"^Error: ", "error: ", shown.getvalue().rstrip(), flags=re.M).replace(VALUE_ERROR, ""))
    if arguments[:1] == ["optimize"] and "-o" in arguments and "extra argument" in error.format_message():
        output.note("  here -o is --offload-copy-off, as in migraphx-driver; --output-path (-p) names the file")
    if output.as_json():
        output.emit({"error": output.document(UsageError(error.format_message().replace(VALUE_ERROR, "")))})
    return ExitCode.USAGE


_SIGNING = ("cryptography", "securesystemslib", "tuf")
VALUE_ERROR = "Value error, "  # What pydantic writes before a sentence of ours.
