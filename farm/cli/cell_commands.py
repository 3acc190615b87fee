"""Commands about cells: logs, open, reproduce, history, acknowledge; compare: which of a model's programs to ship."""

from __future__ import annotations

import re
import time
import webbrowser
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from io import BytesIO
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from farm.cli import connection, output, render
from farm.cli.connection import connect, connect_or_start, offering
from farm.errors import NotFound, UsageError
from farm.inert import inert

if TYPE_CHECKING:
    from farm.client.client import FarmClient
    from farm.results.report import JudgedCell, PastCell
    from farm.results.verdict import CellLine


JOB = r"j-[0-9a-f]{16}"  # A job's id.
PAUSE = 1.0  # Seconds between two questions.
KNOWN_FOR = timedelta(days=30)  # For how long a failure is known if nobody says how long.
TAIL = 200  # Bytes of what was shown by which its end is found again.

PIECE = 1 << 20
"""Bytes of a log that are printed at once, about."""

CellName = Annotated[str, offering("CELL", "A cell, or a part that occurs only in its name.", connection.cells)]


def logs(
    what: Annotated[str, offering("BUILD|JOB", "A build (with a cell), or a job's id.")],
    cell: CellName = "",
    follow: Annotated[bool, Option("--follow", "-f", help="Go on until the job has ended.")] = False,
) -> None:
    """Print a job's log.

    While the job runs, prints the log's last part; after that, all of it. With --follow it prints what is added, and
    ends with the job.
    """
    if follow and output.as_json():
        raise UsageError("--follow prints lines as they come: leave out --json")
    with connect_or_start() as client:
        if re.fullmatch(JOB, what):
            _say_log(client, what, what, follow=follow)
            return
        row = _one_cell(client.cells(client.find_build(what)), cell)
        identifier = str(row["identifier"])
        if job := row.get("job"):
            _say_log(client, job, identifier, follow=follow)
        elif facts := row.get("facts"):
            _print_log(identifier, client.artifacts.log(facts["key"]))
        else:
            raise NotFound(f"{identifier} has no log yet", hint=str(row.get("waiting") or ""))


def _say_log(client: FarmClient, job: str, name: str, *, follow: bool) -> None:
    if follow:
        with output.if_interrupted("the job goes on"):
            for added in follow_log(client, job):
                output.say(inert(added))
        return
    text = client.jobs.log(job)
    if not text and (found := client.jobs.get(job))["state"] == "queued":
        raise NotFound(f"{name} waits, and has no log yet", hint=f"`farm logs --follow {found['id']}` waits for it")
    _print_log(name, text)


def _print_log(name: str, text: bytes) -> None:
    if output.as_json():
        output.emit({"of": name, "log": text.decode(errors="replace")})
        return
    lines = BytesIO(text.rstrip(b"\n"))
    while some := lines.readlines(PIECE):  # All at once took seven times its memory.
        output.say(inert(b"".join(some).decode(errors="replace").removesuffix("\n")))


def open(
    what: Annotated[
        str, offering("[BUILD|CELL]", "A build, or a cell's whole name: as it ended last; default: all builds.")
    ] = "",
) -> None:
    """Print the address of a page and, on a terminal, open it in a browser."""
    with connect() as client:
        page = f"{client.url}/ui/"
        if "/" in what and "=" not in what:
            if not (past := client.history(what, 1)):
                raise NotFound(f"no build had the cell {what}", hint="`farm ls` lists cells by their whole names")
            page = f"{client.page_of(client.build(past[0]['build']))}/cells/{what}"
        elif what:
            page = client.page_of(client.build(client.find_build(what)))
    output.result({"page": page}, page)
    if output.lively() and not output.as_json() and not webbrowser.open(page):
        output.note("there is no browser here")


def reproduce(
    what: Annotated[str, offering("BUILD|JOB|KEY", "A build (with a cell), a job, a key.")],
    cell: CellName = "",
    folder: Annotated[Path, Option("--output", "-o", metavar="DIR", help="The new folder to write.")] = Path(
        "reproduction"
    ),
) -> None:
    """Write a folder that reruns one attempt without the farm.

    For a failed job or an artifact: spec, work order, every input and a copy of the code that runs the children.
    `sh DIR/run.sh` repeats the attempt without the farm, and computes the cache key again.
    """
    from farm.settings import load_settings

    settings = load_settings()
    with connect_or_start() as client:
        if not re.fullmatch(f"{JOB}|[0-9a-f]{{64}}", what):
            what = client.find_build(what)
            row = _one_cell(client.cells(what), cell)
            what, cell = (what, row["identifier"]) if row.get("job") else ((row.get("facts") or row)["key"], "")
        document = client.jobs.reproduce(what, folder, settings, cell)
    said = [f"{folder}: {document['order']['identifier']}, key {document['key'][:12]}", f"  rerun:  sh {folder}/run.sh"]
    output.result({"folder": str(folder), "key": document["key"], "job": document.get("job", "")}, said)


def _one_cell(cells: Sequence[JudgedCell], named: str) -> JudgedCell:
    found = [cell for cell in cells if cell["identifier"] == named]
    found = found or [cell for cell in cells if named in cell["identifier"]]
    if not found:
        raise NotFound(f"no cell {named} in this build", hint="`farm status BUILD` lists its cells")
    if len(found) > 1:
        names = ", ".join(str(cell["identifier"]) for cell in found[:5])
        raise UsageError(f"{len(found)} cells match: name one", hint=f"{names}{', …' if len(found) > 5 else ''}")
    return found[0]


def follow_log(client: FarmClient, job: str) -> Iterator[str]:
    """Yield whole lines of a job's log as they come, until the job has ended."""
    shown = b""
    attempt = 0
    while True:
        found = client.jobs.get(job)
        ended, text = found["state"] not in ("queued", "running"), client.jobs.log(job)
        if found["attempt"] != attempt:
            shown, attempt = b"", found["attempt"]
        new = added(shown, text)
        whole = new if ended else new[: new.rfind(b"\n") + 1]
        if whole:
            shown += whole
            yield whole.decode(errors="replace").rstrip("\n")
        if ended:
            return
        time.sleep(PAUSE)


def added(before: bytes, now: bytes) -> bytes:
    """Return what a log has more than before. `now` may be its last part only, or the whole."""
    if now.startswith(before):
        return now[len(before) :]
    if len(now) > len(before) and (place := now.rfind(before)) >= 0:
        return now[place + len(before) :]
    # It is a window that moved on: what is new begins after the longest end of the known that it begins with.
    first = max(0, len(before) - len(now))
    heads = re.finditer(b"(?=%b)" % re.escape(now[:TAIL]), before[first:]) if now else ()
    ends = range(max(first, len(before) - TAIL), len(before))
    for start in chain((first + head.start() for head in heads), ends):
        # Compared without copies: with them the time grows with the square of the length.
        if memoryview(now)[: len(before) - start] == memoryview(before)[start:]:
            return now[len(before) - start :]
    # The window may also begin before what was shown, or lie behind it altogether.
    place = now.rfind(before[-TAIL:]) if before else -1
    return now[place + len(before[-TAIL:]) :] if place >= 0 else now


def history(
    cell: Annotated[str, offering("CELL", "A cell's whole name.", connection.cells)] = "",
    limit: Annotated[int, Option("--limit", "-n", min=1, max=500, metavar="N", help="Builds to show.")] = 20,
    rebuild: Annotated[
        bool, Option("--rebuild", help="Make the server's history again from all reports (administrators).")
    ] = False,
) -> None:
    """Show how a cell did in past builds.

    Shows state, latency, size, error, compile time, node and toolchain, the newest build first. A hit shows the numbers
    of the attempt that made its program.
    """
    if bool(cell) is rebuild:
        raise UsageError("name a cell, or say --rebuild", hint="`farm status BUILD` lists a build's cells")
    with connect_or_start() as client:
        if rebuild:
            count = client.upkeep.rebuild_history()
            output.result({"reports": count}, f"made of {render.plural(count, 'report')}")
            return
        found = client.history(cell, limit)
    if not found:
        raise NotFound(f"no build had a cell {cell}", hint="`farm status BUILD` lists a build's cells")
    output.table(rows(found), "", {"items": found})


def rows(found: Sequence[PastCell]) -> Sequence[Sequence[str]]:
    """Return a table of what a cell did, the newest build first."""
    rows = [("ended (UTC)", "build", "state", "latency", "size", "error", "compile", "node", "toolchain")]
    for past in found:
        values, error = past["values"], render.error(past["error"])
        state = render.state(past["state"], past["kind"], past["expected"])
        state = "hit" if past["hit"] and not past["kind"] else state
        latency = render.duration(values.get("latency")) + (" shared" if values.get("shared") else "")
        size, took = render.size(values.get("size")), render.duration(values.get("compile_time"))
        place = render.when(past["ended"]), past["build"]
        rows.append((*place, state, latency, size, error, took, past["node"], past["toolchain"]))
    return rows


def acknowledge(
    cell: Annotated[str, offering("CELL", "A cell's whole name.", connection.cells)],
    kind: Annotated[str, Argument(metavar="KIND", help="The kind of failure, such as regression.")] = "",
    reason: Annotated[str, Option(metavar="TEXT", help="Why it is accepted.")] = "",
    until: Annotated[str, Option(metavar="DAY", help="The last day, such as 2026-12-31; without it in 30 days.")] = "",
    link: Annotated[str, Option(metavar="URL", help="Where it is discussed.")] = "",
    delete: Annotated[bool, Option("--delete", help="Expect nothing of the cell any more.")] = False,
) -> None:
    """Accept a cell's failure until a day: builds submitted from now on stay green, and `latest` takes its program.

    `latest` takes what a gate or a tolerance refused with this KIND when a later build makes it again and passes.
    """
    if delete is bool(kind or reason):
        raise UsageError("name the KIND and say --reason, or --delete", hint="docs/failure-kinds.md lists the kinds")
    if not delete and not (kind and reason):
        raise UsageError("a failure is acknowledged with its KIND and a --reason")
    until = until or str((datetime.now(UTC) + KNOWN_FOR).date())
    with connect_or_start() as client:
        if delete:
            client.jobs.forget(cell)
            output.result({"cell": cell, "deleted": True}, f"nothing is expected of {cell} any more")
            return
        client.jobs.acknowledge(cell, kind, reason, until, link)
    known = {"cell": cell, "kind": kind, "reason": reason, "until": until, "link": link}
    output.result(known, f"{cell} may fail with {kind} until {until}")


# --- compare: which of a model's programs to ship ---------------------------------------------------------------------

LOOKED_AT = 50  # Builds that are looked at for a model, the newest first.


def compare(
    model: Annotated[str, Argument(metavar="MODEL", help="A model's name.")],
    build: Annotated[str, offering("[BUILD]", "A build; default: the newest with a program of it.")] = "",
) -> None:
    """Show which of a model's programs to ship: speed against error and size.

    A `*` marks the Pareto front: no other program of that target and shape is both faster and nearer to the reference.
    """
    from farm.results.verdict import CellLine

    with connect_or_start() as client:
        build_id, cells = _find(client, model, build)
    known = [CellLine.of(cell) for cell in cells if cell["facts"]]
    found = weighed(build_id, model, [each._replace(target=each.identifier.split("/")[1]) for each in known])
    output.result(found, lines(found, output.width()))


def _find(client: FarmClient, model: str, build: str) -> tuple[str, list[JudgedCell]]:
    known = [client.find_build(build)] if build else [
        each["id"] for each in client.builds(LOOKED_AT) if not each.get("shadows") and each["counts"]["succeeded"]
    ]  # fmt: skip
    for build_id in known:
        cells = [cell for cell in client.cells(build_id) if cell["model"] == model]
        if any(cell["facts"] for cell in cells):
            return build_id, cells
    where = build or f"the newest {LOOKED_AT} builds"
    hint = "`farm ls` lists models; name a build to look further back"
    raise NotFound(f"no program of {model} in {where}", hint=hint)


def weighed(build: str, model: str, found: Sequence[CellLine]) -> dict[str, Any]:
    """Return a model's programs, compared with each other, and what to ship of each target and shape."""
    from farm.results.tradeoff import advise, by_place, front, gains

    gained, fronts = gains(found), map(front, by_place(found).values())
    best = {each.identifier for some in fronts for each in some}
    names = ("identifier", "target", "precision", "shape", "latency", "p99", "throughput", "error", "size")
    return {
        "build": build,
        "model": model,
        "cells": [
            {name: getattr(each, name) for name in names}
            | {"passed": each.succeeded, "marks": each.marks.split()}
            | {"gain": gained.get(each.identifier), "on_front": each.identifier in best}
            for each in found
        ],
        "recommended": [
            {"target": target, "shape": shape, "cell": chosen and chosen.identifier, "reason": reason}
            for (target, shape), chosen, reason in advise(found)
        ],
    }


def lines(found: Mapping[str, Any], columns: int = 0) -> list[str]:
    """Return what `weighed` found as a table, and what to ship of each target and shape."""
    rows = [("", "cell", "latency", "p99", "throughput", "x fp32", "error", "size", "")]
    for each in found["cells"]:
        rough = "~" if "shared" in each["marks"] else ""
        rows.append((
            "*" if each["on_front"] else "",
            each["identifier"].partition("/")[2],
            rough + render.duration(each["latency"]) if each["latency"] else "",
            render.duration(each["p99"]),
            render.rate(each["throughput"]),
            f"{rough}{each['gain']:.2f}x" if each["gain"] else "",
            render.error(each["error"]),
            render.size(each["size"]),
            ", ".join([*each["marks"], *([] if each["passed"] else ["refused"])]),
        ))  # fmt: skip
    said = [f"{found['model']} in {found['build']}", *render.align(rows, columns=columns)]
    cells = {each["identifier"]: each for each in found["cells"]}
    for advice in found["recommended"]:
        where, chosen = f"{advice['target']} {advice['shape']}", cells.get(advice["cell"])
        if not chosen:
            said.append(f"{where}: nothing to recommend: {advice['reason']}")
            continue
        gain = f"{chosen['gain']:.2f}x fp32, " if chosen["gain"] and chosen["precision"] != "fp32" else ""
        numbers = f"{gain}error {render.error(chosen['error'])}, {render.size(chosen['size'])}"
        said.append(f"{where}: ship {chosen['precision']}: {numbers}; {advice['reason']}")
    return said
