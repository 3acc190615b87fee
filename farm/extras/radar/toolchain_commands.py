"""Try a new compiler on what a ref names, and promote it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer
from typer import Argument, Option

from farm.artifacts.refs import RefView
from farm.cli import output, render
from farm.cli.build_commands import Limits, MostOf
from farm.cli.connection import connect
from farm.cli.output import follow
from farm.errors import ExitCode
from farm.extras.radar.radar import RadarDocument
from farm.extras.radar.toolchains_api import BisectedCell, ToolchainsApi, Tried
from farm.extras.radar.toolchains_api import bisect as search
from farm.inert import one_line

commands = output.commands(__doc__)

Reference = Annotated[str, Option("--ref", help="The ref whose cells are meant.")]
Shadow = Annotated[str, Argument(metavar="BUILD", help="A shadow build's id, or its unique start.")]


@commands.command()
def ls(ref: Reference = "prod") -> None:
    """List the toolchains of each target, the oldest first, and how many cells of a ref readers get of each."""
    with connect() as client:
        found = ToolchainsApi.of(client).all(ref)
    rows = [("TARGET", "TOOLCHAIN", "WORKERS", f"IN {ref}", "KEPT")]
    for line in found:
        counts = str(line["live_workers"]), str(line["named"] or ""), str(line["superseded"] or "")
        rows.append((line["target"], line["toolchain"], *counts))
    output.table(rows, "no toolchain yet: workers bring them", {"items": found})


@commands.command()
def radar(
    ref: Reference = "prod",
    to: Annotated[
        str, Option(metavar="TOOLCHAIN", help="The start of its id; default: the newest with a worker.")
    ] = "",
    cell: Annotated[list[str] | None, Option(metavar="PATTERN", help="Only these cells. Repeatable.")] = None,
    gate: Limits = None,
    budget: MostOf = None,
    detach: Annotated[bool, Option("--detach", help="Print the build's id alone and do not wait.")] = False,
) -> None:
    """Build what a ref names under another toolchain, and say what gets better, worse and breaks.

    Nothing that readers see moves. Exits with 0 if it can be promoted, with 3 if only gates speak against it.
    """
    from farm.manifest.parsing import read_gates

    with connect() as client:
        build = ToolchainsApi.of(client).shadow(ref, to, cells=cell or (), gates=read_gates(gate or (), budget or ()))
        if detach:
            output.result({"build": build}, build["id"])
            return
        output.note(f"shadow build {build['id']}; page: {client.page_of(build)}/radar")
        ended = follow(client, build["id"])["build"]
        found = ToolchainsApi.of(client).radar(build["id"])
    output.result(found, lines(found))
    verdict = ended["verdict"]
    code = verdict["exit_code"] if verdict else ExitCode.OK
    raise typer.Exit(int(code or (ExitCode.OK if found["promotable"] else ExitCode.CELL_FAILED)))


@commands.command()
def report(build: Shadow) -> None:
    """Say what a shadow build found: what gets better, worse and breaks."""
    with connect() as client:
        found = ToolchainsApi.of(client).radar(client.find_build(build))
    output.result(found, lines(found))


@commands.command()
def promote(
    build: Shadow,
    force: Annotated[bool, Option("--force", help="Take the cells that passed, although others did not.")] = False,
) -> None:
    """Let the ref of a shadow build give readers its programs, if its gates passed.

    One conditional write: if the ref has moved since, nothing changes. Readers who name the old toolchain get its
    programs as before.
    """
    with connect() as client:
        moved = ToolchainsApi.of(client).promote(client.find_build(build), force=force)
    _say_moved(moved)


@commands.command()
def rollback(
    ref: Reference = "prod",
    to: Annotated[str, Option(metavar="TOOLCHAIN", help="The start of its id; default: the one before.")] = "",
    generation: Annotated[int | None, Option(min=1, metavar="N", help="Only if the ref has this generation.")] = None,
) -> None:
    """Let a ref give readers the programs of the toolchain before, which it has kept. One conditional write."""
    with connect() as client:
        moved = ToolchainsApi.of(client).roll_back(ref, to, generation=generation)
    _say_moved(moved)


def bisect(
    cell: Annotated[list[str], Argument(metavar="CELL", help="Cells of the ref, by their whole names.")],
    ref: Reference = "prod",
    good: Annotated[
        str, Option(metavar="TOOLCHAIN", help="One that is known to be good; default: the ref's own.")
    ] = "",
    bad: Annotated[str, Option(metavar="TOOLCHAIN", help="One that is known to be bad; default: try the newest.")] = "",
    gate: Limits = None,
    budget: MostOf = None,
) -> None:
    """Find the first toolchain under which a cell fails.

    A missed gate is a failure, too. Tries toolchains that have a worker, halving what is left: 6 compiles for 64 of
    them, and the two ends if they are not known. A toolchain that cannot be judged is skipped.
    """
    from farm.manifest.parsing import read_gates

    def note(cell: str, tried: Tried) -> None:
        output.note(f"{cell}: {tried['toolchain']} is {tried['verdict']} {one_line(tried['text'])}".rstrip())

    gates = read_gates(gate or (), budget or ())
    with connect() as client:
        found = search(client, cell, ref=ref, good=good, bad=bad, gates=gates, on_step=note)
    output.result({"schema": 1, "ref": ref, "cells": found}, bisected(found))


def lines(found: RadarDocument) -> list[str]:
    """Return what a radar says, the worst first."""
    about = [(str(cell["effect"]), cell["identifier"], one_line(cell["text"])) for cell in found["cells"]]
    about += [
        ("breaks" if each["breaks"] else "left out", each["identifier"], each["text"]) for each in found["left_out"]
    ]
    order = ("breaks", "worse", "unclear", "better", "left out")
    said = [f"{effect}: {name}: {text}" for this in order for effect, name, text in about if effect == this]
    counts = ", ".join(f"{count} {effect}" for effect, count in found["counts"].items() if count)
    said.append(f"{found['ref']} under {found['toolchain']}: {counts or 'no cells'}")
    if found["promotable"]:
        said.append(f"  promote:  farm toolchain promote {found['build']}")
    else:
        said.append(f"  not to be promoted: {found['why']}")
    return said


def bisected(found: Sequence[BisectedCell]) -> list[str]:
    """Return what a bisection found, one cell after the other."""
    said = []
    for cell in found:
        compiles = f"({render.plural(cell['compiles'], 'compile')})"
        if cell["first_bad"]:
            text = (
                f"first bad is {cell['first_bad']}, last good {cell['last_good']} {compiles}: {one_line(cell['text'])}"
            )
        elif cell["suspects"]:
            text = f"first bad is one of {', '.join(cell['suspects'])}: the others cannot be judged {compiles}"
        else:
            text = f"not found {compiles}: {cell['text']}"
        said.append(f"{cell['identifier']}: {text}")
    return said


def _say_moved(moved: RefView) -> None:
    output.result(moved, f"{moved['tag']}: generation {moved['generation']}")
