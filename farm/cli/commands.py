"""The app: all commands under one name, and one handler for all errors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer
from typer.exceptions import TyperException

from farm.cli import (
    artifact_commands,
    bench_command,
    build_commands,
    history_command,
    manifest_commands,
    operator_commands,
    optimize_command,
    output,
    token_commands,
    tuning_commands,
)
from farm.errors import EXIT_CODES, ExitCode, FarmError, UsageError

app = typer.Typer(
    name="farm",
    help="Compile models for AMD GPUs and CPUs: once, for everybody.",
    no_args_is_help=True,
    # Rich help costs 70 ms at every start, and its boxes do not survive a pipe.
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)

for command in (
    build_commands.run,
    build_commands.up,
    build_commands.submit,
    build_commands.plan,
    build_commands.retry,
    build_commands.watch,
    build_commands.status,
    build_commands.diff,
    history_command.history,
    build_commands.logs,
    build_commands.reproduce,
    build_commands.cancel,
    build_commands.pause,
    build_commands.resume,
    artifact_commands.fetch,
    artifact_commands.ls,
    artifact_commands.tag,
    artifact_commands.inspect,
    optimize_command.optimize,
    bench_command.bench,
    manifest_commands.init,
    manifest_commands.lint,
    manifest_commands.schema,
    operator_commands.doctor,
    operator_commands.audit,
    operator_commands.gc,
    operator_commands.drain,
    operator_commands.unfence,
    operator_commands.worker,
    operator_commands.serve,
):
    app.command()(command)
app.add_typer(token_commands.commands, name="token")
app.add_typer(tuning_commands.commands, name="tuning")


@app.callback(invoke_without_command=True)
def farm(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
    as_json: output.Json = False,
) -> None:
    """Compile models for AMD GPUs and CPUs: once, for everybody."""
    if not version and context.invoked_subcommand is None:
        raise UsageError("which command?", hint="`farm help` lists them")
    if version:
        from farm import __version__

        output.emit({"version": __version__}) if as_json else output.say(f"farm {__version__}")
        raise typer.Exit


@app.command("help")
def help_(
    context: typer.Context,
    topic: Annotated[str, typer.Argument(help="`exit-codes`, or a command.")] = "",
    as_json: output.Json = False,
) -> None:
    """Explain a command, or the exit codes (`exit-codes`)."""
    if topic == "exit-codes":
        if as_json:
            output.emit({str(int(code)): text for code, text in EXIT_CODES.items()})
        else:
            output.say("\n".join(f"{int(code):>3}  {text}" for code, text in EXIT_CODES.items()))
        return
    if topic and not as_json:
        raise typer.Exit(run([topic, "--help"]))
    assert context.parent is not None
    text = _help_of(topic) if topic else context.parent.get_help()
    output.emit({"help": text}) if as_json else output.say(text)


def _help_of(topic: str) -> str:
    import contextlib
    import io

    with contextlib.redirect_stdout(io.StringIO()) as text:
        code = run([topic, "--help"])
    if code:
        raise typer.Exit(code)
    return text.getvalue()


def run(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit code."""
    try:
        code = app(list(arguments), prog_name="farm", standalone_mode=False)
    except FarmError as error:
        output.complain(error, as_json="--json" in arguments)
        code = error.exit_code
    except TyperException as error:
        code = _wrong_usage(error, as_json="--json" in arguments)
    except ModuleNotFoundError as error:
        missing = UsageError(f"{error.name} is not installed", hint=f"pip install 'migraphx-farm[{_extra(arguments)}]'")
        output.complain(missing, as_json="--json" in arguments)
        code = missing.exit_code
    except (typer.Abort, KeyboardInterrupt):
        code = ExitCode.INTERRUPTED
    except SystemExit as end:
        code = end.code
    except Exception:
        # An exit code of 1 would say that a cell failed.
        import traceback

        output.note(traceback.format_exc().rstrip())
        output.note("error: this is a bug in the farm: please report it with the lines above")
        code = ExitCode.FARM_FAULT
    # The framework exits with 130 on Ctrl-C; the farm has its own code for it.
    return int(ExitCode.INTERRUPTED if code == 130 else code or ExitCode.OK)


def _wrong_usage(error: TyperException, *, as_json: bool) -> ExitCode:
    """Let the framework print the error with the command's usage; with --json, also print it as a document."""
    import io

    shown = io.StringIO()
    show = getattr(error, "show", None)
    show(shown) if show else shown.write(error.format_message())
    output.note(shown.getvalue().rstrip())
    if as_json:
        output.emit({"error": output.document(UsageError(error.format_message()))})
    return ExitCode.USAGE


def _extra(arguments: Sequence[str]) -> str:
    return {"serve": "server", "worker": "worker"}.get(arguments[0], "embedded")
