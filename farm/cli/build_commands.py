"""Commands about builds: run, up, submit, plan, retry, watch, status, diff, cancel, pause, resume."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn, Protocol

import typer
from typer import Argument, Option

from farm import entry_points
from farm.cli import connection, output, render
from farm.cli.connection import connect, connect_or_start, offering
from farm.cli.output import follow
from farm.errors import Conflict, ExitCode, FarmError, FarmFault, NotFound, UsageError
from farm.inert import one_line
from farm.units import counted

if TYPE_CHECKING:
    from farm.client.client import FarmClient
    from farm.client.freezing import Frozen
    from farm.matrix.planned import ShownPlan
    from farm.results.report import BuildView, Report
    from farm.settings import Settings


LOOKED_AT = 20  # Open builds that `run` looks at, to find one of the same manifest.
Publish = Callable[["Report", str], None]  # Writes what is wanted of a build's report; the text is its page.
SECOND_THOUGHT = 5  # Seconds after Ctrl-C within which a second Ctrl-C cancels the build.

ManifestArgument = Annotated[Path, Argument(metavar="MANIFEST", help="The manifest, a YAML file.")]
BuildId = Annotated[
    str, offering("BUILD", "A build's id or its unique start, @latest, a manifest's name, a label K=V, a git commit.")
]
BuildOrPool = Annotated[str, offering("BUILD|POOL", "A build, or a pool's whole name.", connection.pools)]
Labels = Annotated[list[str] | None, Option("--label", "-l", metavar="KEY=VALUE", help="Label the build. Repeatable.")]
Detach = Annotated[bool, Option("--detach", help="Print the build's id alone and do not follow it.")]
DryRun = Annotated[bool, Option("--dry-run", help="Print the plan and stop; create nothing.")]
Junit = Annotated[Path | None, Option("--junit", metavar="FILE", help="Write the report as JUnit XML.")]
Summary = Annotated[Path | None, Option("--summary", metavar="FILE", help="Write the report as Markdown.")]
Only = Annotated[list[str] | None, Option("--only", metavar="CELL", help="Only these: 'net/*/int8/*'. Repeatable.")]
FailFast = Annotated[bool, Option("--fail-fast", help="Cancel the other cells when one has failed.")]
Untrusted = Annotated[
    bool, Option("--untrusted", help="A stranger's manifest: run none of its code, read only its folder.")
]
Limits = Annotated[
    list[str] | None,
    Option("--gate", metavar="NAME=SHARE", help="How much worse than the baseline: latency=5%. Repeatable."),
]
MostOf = Annotated[
    list[str] | None, Option("--budget", metavar="NAME=VALUE", help="How much at most: latency=10ms. Repeatable.")
]
BaselineTag = Annotated[
    str,
    Option("--baseline", metavar="TAG", help="The tag that gates compare with; default: the manifest's, else latest."),
]
FirstRun = Annotated[bool, Option("--first", help="A first run: the tag that gates compare with need not exist yet.")]


# --- commands -------------------------------------------------------------------------------------------------------


def run(
    manifest: ManifestArgument,
    only: Only = None,
    fail_fast: FailFast = False,
    label: Labels = None,
    gate: Limits = None,
    budget: MostOf = None,
    baseline: BaselineTag = "",
    first: FirstRun = False,
    folder: Annotated[
        Path | None, Option("--output", "-o", metavar="DIR", help="Write the programs of cells that passed.")
    ] = None,
    junit: Junit = None,
    summary: Summary = None,
) -> None:
    """Build a manifest on this machine, with a farm of its own.

    Starts a farm in the data folder, submits, waits and stops it; nothing has to be set up or running. Servers that the
    settings name (Redis, S3, an API) are used instead of embedded ones. Ctrl-C stops the build; the next run of
    the unchanged manifest goes on with it. After it has ended, a run is a new build, whose unchanged cells are hits.
    """
    publish = reports_to(junit, summary, manifest)
    if folder and not (there := next(path for path in (folder, *folder.absolute().parents) if path.exists())).is_dir():
        raise UsageError(f"cannot write into {folder}: {there} is a file", hint="choose another folder")
    frozen = _freeze(manifest, label, gate, budget, baseline, only, first=first, fail_fast=fail_fast)
    with (
        output.if_interrupted("the farm is down again, nothing runs"),
        _own_farm() as settings,
        connect(settings) as client,
    ):
        build_id = _stopped_before(client, frozen)
        _say_unfinished(client, but=build_id)
        build_id = build_id or _submit(client, frozen)
        gone_on = [
            f"stopped: build {build_id} goes on with the next `farm run` or `farm up` here",
            f"  resume:  farm run {manifest}",
            f"  cancel:  farm cancel {build_id}",
        ]
        # Its pages go with the farm, so the result names none.
        code = _watch(client, build_id, gone_on, publish, pages=False)
        _bring_programs(client, build_id, folder)
    raise typer.Exit(code)


def up() -> None:
    """Keep a farm running on this machine until Ctrl-C.

    Other commands find it by the data folder.
    """
    from farm.artifacts.tokens import link_code
    from farm.client.client import running_farm
    from farm.settings import load_settings

    left: list[BuildView] = []
    there = running_farm(load_settings().data_dir)
    with suppress(KeyboardInterrupt), _own_farm() as settings:
        said = f"the farm runs at {settings.api_url}; its data is in {settings.data_dir}"
        output.result({"api_url": settings.api_url, "data_dir": str(settings.data_dir)}, said)
        if not output.as_json():
            once = link_code(settings.api_token.get_secret_value())
            output.note(f"look at it, once and within ten minutes: {settings.api_url}/ui/sign-in?once={once}")
            output.note(f"  later: {settings.api_url}/ui/ with `api_token` of {settings.data_dir}/farm.json")
            output.note(f"submit with `farm submit MANIFEST`; Ctrl-C {'leaves it running' if there else 'stops it'}")
        try:
            threading.Event().wait()
        finally:
            with suppress(FarmError), connect(settings) as client:
                left = _open_builds(client)
    goes_on = running_farm(load_settings().data_dir)
    names = ", ".join(build["id"] for build in left[:3]) + (", …" if len(left) > 3 else "")
    rest = f"; {render.plural(len(left), 'build')} unfinished: {names} (the next farm here goes on with it)"
    output.note(f"left: the farm runs on at {goes_on[0]}" if goes_on else f"the farm is down{rest if left else ''}")


def submit(
    manifest: ManifestArgument,
    dry_run: DryRun = False,
    detach: Detach = False,
    untrusted: Untrusted = False,
    only: Only = None,
    fail_fast: FailFast = False,
    label: Labels = None,
    gate: Limits = None,
    budget: MostOf = None,
    baseline: BaselineTag = "",
    first: FirstRun = False,
    junit: Junit = None,
    summary: Summary = None,
) -> None:
    """Submit a manifest and follow the build to its verdict.

    Prints the plan first: which cells are hits, which are misses and what changed. Ctrl-C detaches, the build goes on.
    """
    publish = reports_to(junit, summary, manifest)
    given = {"first": first, "untrusted": untrusted, "fail_fast": fail_fast}
    frozen = _freeze(manifest, label, gate, budget, baseline, only, **given)
    with connect() as client:
        if dry_run:
            show_plan(client.plan(frozen))
            return
        build_id = _submit(client, frozen, detach=detach)
        code = follow_to_verdict(client, build_id, publish, detach=detach)
    raise typer.Exit(code)


def retry(
    build: BuildId,
    failed: Annotated[bool, Option("--failed", help="Only what failed unexpectedly or was cancelled.")] = False,
    only: Only = None,
    yes: Annotated[bool, Option("--yes", "-y", help="Do not ask; without a terminal, retry never asks.")] = False,
    dry_run: DryRun = False,
    detach: Detach = False,
    junit: Junit = None,
    summary: Summary = None,
) -> None:
    """Run an ended build's cells again, in a new build.

    Uses the plan of the ended build: the same model files, toolchains and keys. Cells that are published by now are
    hits. Follows the new build to its verdict.
    """
    from farm.client.freezing import new_build_id

    publish = reports_to(junit, summary)
    with connect() as client:
        before, new_id = client.find_build(build), new_build_id()
        planned = client.plan_retry(before, failed=failed, only=only or (), new_id=new_id)
        if dry_run:
            show_plan(planned)
            return
        say_before(render.plan(planned), detach=detach)
        if sys.stdin.isatty() and not yes:
            typer.confirm("go on?", abort=True, err=True)
        client.retry(before, failed=failed, only=only or (), new_id=new_id)
        say_before([f"build {new_id}"], detach=detach)
        code = follow_to_verdict(client, new_id, publish, detach=detach)
    raise typer.Exit(code)


def plan(
    manifest: ManifestArgument,
    offline: Annotated[
        bool, Option("--offline", help="Ask no farm: list the cells, without what is a hit. Runs no code.")
    ] = False,
    only: Only = None,
    first: FirstRun = False,
) -> None:
    """Show what submitting a manifest would do.

    Lists hits, misses and what changed. Creates nothing.
    """
    if offline:
        from farm.client.authoring import name_cells

        name, cells = name_cells(manifest, only or ())
        document = {"name": name, "cells": [{"identifier": cell} for cell in cells]}
        output.result(document, render.offline_plan(name, cells))
        return
    frozen = _freeze(manifest, only=only, first=first)
    with connect_or_start() as client:
        show_plan(client.plan(frozen))


def watch(build: BuildId = "@latest", junit: Junit = None, summary: Summary = None) -> None:
    """Follow a build to its verdict, and exit with it."""
    publish = reports_to(junit, summary)
    with connect() as client:
        build_id = client.find_build(build)
        code = _watch(client, build_id, _goes_on(build_id), publish)
    raise typer.Exit(code)


def status(
    build: Annotated[str, offering("BUILD", "A build; default: list the newest builds.")] = "",
    label: Annotated[str, Option("--label", "-l", metavar="KEY=VALUE", help="List only builds with it.")] = "",
    limit: Annotated[int, Option("--limit", "-n", min=1, max=1000, metavar="N", help="Builds to list.")] = 50,
    picture: Annotated[Path | None, Option(metavar="FILE.svg", help="Draw its batch sweeps.")] = None,
    export: Annotated[Path | None, Option(metavar="FILE", help="Write its cells to a .csv or .parquet file.")] = None,
) -> None:
    """Show a build's state and why it waits, or list the newest."""
    if (picture or export) and not build:
        raise UsageError("--picture and --export are of one build: name it", hint="@latest is the newest")
    if label:
        read_labels([label])
    for file in filter(None, (picture, export)):
        output.check_folder(file)
    with connect_or_start() as client:
        if not build:
            builds = client.builds(limit, label=label)
            nothing = f"no build has the label {label}" if label else "no builds yet: farm submit MANIFEST"
            output.table(render.builds(builds), nothing, {"items": builds})
            return
        found = client.report(client.find_build(build))
        troubles = client.workers.troubles() if found["build"]["state"] == "open" else []
    if picture:
        _draw(found, picture)
    if export:
        from farm.client.tables import write

        with output.writing(export):
            write(found["cells"], export)
    if output.as_json():
        output.emit(found)
        return
    shown, cells, page = found["build"], found["cells"], client.page_of(found["build"])
    if shown["state"] == "reported":
        output.say_all(render.outcome(found, page, output.width()))
        return
    output.say_all([f"{shown['name']} {shown['id']}: {render.counts(cells)}", *render.outlook(shown.get("outlook"))])
    output.say_all([*render.under_way(cells), *render.waiting(cells), *render.failures(cells, shown["id"], page)])
    for line in troubles:
        output.note(one_line(line))
    output.note(f"page: {page}")


def diff(
    left: Annotated[str, offering("BUILD", "A build.")],
    right: Annotated[str, offering("OTHER", "The build to compare it with.")] = "@latest",
) -> None:
    """Show in which cells two builds differ, and why.

    Shows latencies side by side without a verdict: the builds may have run on different nodes, at different times.
    `farm bench` measures two programs in turns.
    """
    with connect_or_start() as client:
        found = client.diff(client.find_build(left), client.find_build(right))
    if found["left"]["id"] == found["right"]["id"]:
        output.note(f"{left} and {right} are the same build: name two")
    output.result(found, render.differences(found, output.width()))


def cancel(
    build: BuildId,
    yes: Annotated[bool, Option("--yes", "-y", help="Do not ask; without a terminal, cancel never asks.")] = False,
) -> None:
    """Cancel every cell of a build that has not ended. Jobs that other builds need go on."""
    with connect_or_start() as client:
        build_id = client.find_build(build)
        if sys.stdin.isatty() and not yes:
            found = client.build(build_id)
            live = found["counts"]["queued"] + found["counts"]["running"]
            typer.confirm(f"cancel {render.plural(live, 'cell')} of {build_id} {found['name']}?", abort=True, err=True)
        count = client.cancel(build_id)
    said = f"{build_id}: {render.plural(count, 'cell')} cancelled{'' if count else ', all had ended'}"
    output.result({"build": build_id, "cancelled": count}, said)


def pause(what: BuildOrPool) -> None:
    """Hand out no more jobs of a build, or of a pool.

    Running jobs go on, and so do jobs that a worker has just received. Only administrators may pause a pool.
    """
    _rest(what, paused=True)


def resume(what: BuildOrPool) -> None:
    """Resume a paused build or pool."""
    _rest(what, paused=False)


# --- how they do it -------------------------------------------------------------------------------------------------


@contextmanager
def _own_farm() -> Iterator[Settings]:
    """Run a farm in the data folder, and stop it also on SIGTERM."""
    from farm.local.embedded import EmbeddedFarm
    from farm.settings import load_settings

    signal.signal(signal.SIGTERM, signal.default_int_handler)
    settings = load_settings()
    output.quiet_logs(settings)
    with EmbeddedFarm(settings, say=output.note) as found:
        yield found


def _bring_programs(client: FarmClient, build_id: str, folder: Path | None) -> None:
    passed = [cell for cell in client.cells(build_id) if cell["state"] == "succeeded" and cell["facts"]]
    if not passed:
        return
    if folder is None:
        first, more = passed[0]["identifier"], f"; {len(passed)} programs" if len(passed) > 1 else ""
        output.note(f"fetch:  farm fetch {first}@{build_id} -o DIR{more}, with or without a running farm")
        return
    for cell in passed:
        place = folder.joinpath(*cell["identifier"].split("/"))
        client.fetch(
            cell["model"], cell["target"], cell["precision"], cell["shape"], ref=build_id, folder=place,
            toolchain=cell["facts"]["toolchain"] if cell["facts"] else "",
        )  # fmt: skip
    output.note(f"{render.plural(len(passed), 'program')} in {folder}, each next to its artifact.json")


def _open_builds(client: FarmClient) -> list[BuildView]:
    return [build for build in client.builds() if build["state"] == "open" and not build.get("follows")]


def _stopped_before(client: FarmClient, frozen: Frozen) -> str:
    """Return the open build that was made of the same manifest, inputs and options; empty if there is none."""
    for build in _open_builds(client)[:LOOKED_AT]:
        again = replace(frozen, submission={**frozen.submission, "build_id": build["id"]})
        with suppress(Conflict):  # Something else made it.
            client.submit(again)
            output.note(f"going on with {build['id']}, which was stopped before its end")
            output.note(f"  a new one instead:  farm cancel {build['id']}, then the same command")
            return build["id"]
    return ""


def _say_unfinished(client: FarmClient, but: str = "") -> None:
    """Name earlier builds that go on during this one: they take slots, and make its measurements rough."""
    for build in [build for build in _open_builds(client) if build["id"] != but][:5]:
        output.note(f"an earlier build goes on, too: {build['id']} {build['name']} ({counted(build['counts'])})")
        output.note(f"  cancel:  farm cancel {build['id']}")


def _submit(client: FarmClient, frozen: Frozen, *, detach: bool = False) -> str:
    """Show the plan, bring what the farm lacks, and create the build; return its id."""
    with output.if_interrupted("nothing was submitted; what was uploaded is not sent again"):
        planned = client.plan(frozen)
        say_before(render.plan(planned, _starting(client, planned)), detach=detach)
        build = client.submit(frozen, plan=planned, progress=output.progress("uploading"))
    found = build.document
    if found.get("plan") != planned.get("digest"):
        for line in render.plan_changes(planned["cells"], client.cells(found["id"])):
            output.note(line)
    say_before([f"build {found['id']}"], detach=detach)
    output.note(f"page: {build.url}")
    return found["id"]


def _starting(client: FarmClient, planned: ShownPlan) -> set[str]:
    """Return the pools of a plan without a worker that takes jobs, but with one that has just started."""
    outlook = planned.get("outlook")
    unserved = set(outlook["unserved"]) if outlook else set()
    workers = client.workers.all() if unserved else []
    return {
        pool for worker in workers if "first health probe" in worker["resting"] for pool in worker["pools"]
    } & unserved


def say_before(lines: Sequence[str], *, detach: bool) -> None:
    """Print what precedes a result: on standard error if that is a document, or with `detach` a build's id alone."""
    for line in lines:
        output.note(line) if detach or output.as_json() else output.say(line)


def follow_to_verdict(client: FarmClient, build_id: str, publish: Publish, *, detach: bool) -> int:
    """Follow a build to its verdict, or leave it at once; return the exit code."""
    if not detach:
        return _watch(client, build_id, _goes_on(build_id), publish)
    for line in () if output.as_json() else (f"  follow:  farm watch {build_id}", f"  cancel:  farm cancel {build_id}"):
        output.note(line)
    output.result({"build": client.build(build_id)}, build_id)
    return int(ExitCode.OK)


def _watch(client: FarmClient, build_id: str, gone_on: Sequence[str], publish: Publish, *, pages: bool = True) -> int:
    """Follow a build to its verdict and return the exit code; on Ctrl-C leave it, on a second one cancel it.

    Then it raises KeyboardInterrupt. With `pages` the text names the page of each failed cell.
    """
    try:
        report = follow(client, build_id)
    except KeyboardInterrupt:
        _leave(client, build_id, gone_on)
    except FarmFault:
        if pages:  # Else it is a farm of this command's own.
            output.note(f"the farm went away; build {build_id} goes on when it is back: farm watch {build_id}")
        raise
    build, page = report["build"], client.page_of(report["build"])
    said = [] if output.as_json() else ["", *render.outcome(report, page if pages else "", output.width())]
    output.result({"build": build, "cells": report["cells"]}, said)
    publish(report, page)
    verdict = build["verdict"]
    return verdict["exit_code"] if verdict else int(ExitCode.OK)


def _leave(client: FarmClient, build_id: str, gone_on: Sequence[str]) -> NoReturn:
    """Say how a build goes on, and cancel it if Ctrl-C is pressed again. Raises KeyboardInterrupt, to end the command.

    An embedded farm then stops at once, even if other processes use it.
    """
    try:
        for line in gone_on:
            output.note(line)
        output.countdown("press Ctrl-C again to cancel it", SECOND_THOUGHT)
    except KeyboardInterrupt:
        cancelled = f"{build_id}: {render.plural(client.cancel(build_id), 'cell')} cancelled"
        output.note(cancelled)
        raise KeyboardInterrupt(cancelled) from None
    raise KeyboardInterrupt(*map(str.strip, gone_on))


def _goes_on(build_id: str) -> list[str]:
    return [
        f"detached: build {build_id} goes on",
        f"  return:  farm watch {build_id}",
        f"  cancel:  farm cancel {build_id}",
    ]


def _freeze(
    manifest: Path,
    labels: list[str] | None = None,
    limits: Sequence[str] | None = None,
    budgets: Sequence[str] | None = None,
    baseline: str = "",
    only: Sequence[str] | None = None,
    *,
    first: bool = False,
    untrusted: bool = False,
    fail_fast: bool = False,
) -> Frozen:
    from farm.client.freezing import freeze
    from farm.manifest.parsing import read_gates
    from farm.settings import load_settings

    gates = read_gates(limits or (), budgets or (), baseline, first=first)
    known = {**pipeline_labels(), **read_labels(labels)}
    with output.if_interrupted("nothing was submitted"):
        return freeze(
            manifest, labels=known, pythons=load_settings().converters, gates=gates, untrusted=untrusted,
            only=only or (), fail_fast=fail_fast,
        )  # fmt: skip


def show_plan(planned: ShownPlan) -> None:
    """Print what a submission would do."""
    output.result(planned, render.plan(planned))


def _rest(what: str, *, paused: bool) -> None:
    with connect() as client:
        pools = [pool["name"] for pool in client.pools.all()]
        if what in pools:
            client.pools.pause(what) if paused else client.pools.resume(what)
            name = what
        else:
            try:
                name = client.find_build(what)
            except (NotFound, UsageError) as error:
                known = f"the pools are {', '.join(pools)}" if pools else "there is no pool yet"
                raise type(error)(f"{what!r} is neither a build nor a pool", hint=f"{error.hint}; {known}") from None
            client.pause(name) if paused else client.resume(name)
    output.result({"name": name, "paused": paused}, f"{name} {'is paused' if paused else 'goes on'}")


def _draw(report: Report, file: Path) -> None:
    from farm.results.tradeoff import draw

    build = report["build"]
    if not report.get("sweeps"):
        raise NotFound(f"build {build['id']} has no batch sweep", hint="`sweep:` in the manifest asks for one")
    drawn = draw(report["sweeps"], build["name"])
    with output.writing(file):
        file.write_bytes(drawn)


def read_labels(given: Sequence[str] | None) -> dict[str, str]:
    """Return the labels of a command line. Raises UsageError for one that is not KEY=VALUE."""
    labels = {}
    for text in given or ():
        key, equals, value = text.partition("=")
        if not (key and equals):
            raise UsageError(f"--label {text}: not KEY=VALUE")
        labels[key] = value
    return labels


class PipelineHooks(Protocol):
    """What an extension knows of CI servers, found in the environment of this process; it may have no `publish`."""

    def labels(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Return the labels that a build gets by itself; none outside of a CI server."""

    def publish(self, report: Report, *, manifest: Path | None, link: str, quiet: bool) -> None:
        """Show a build's report there; `link` is its page. `quiet`: standard output belongs to a document.

        Raises FarmError, OSError, SubprocessError.
        """


def reports_to(junit: Path | None, summary: Path | None, manifest: Path | None = None) -> Publish:
    """Return what writes the reports that `--junit` and `--summary` ask for, and shows them where a CI server does.

    Raises UsageError, before hours of work, if one cannot be had. Later a verdict stays as it is.
    """
    files = {form: path for form, path in (("junit", junit), ("markdown", summary)) if path}
    for form, path in files.items():
        output.check_folder(path)
        entry_points.required(entry_points.REPORTS, form)

    def publish(report: Report, link: str) -> None:
        steps: list[Callable[[], None]] = [partial(_write, path, form, report, link) for form, path in files.items()]
        for each in _pipelines():
            if hasattr(each, "publish"):
                steps.append(partial(each.publish, report, manifest=manifest, link=link, quiet=output.as_json()))
        for step in steps:
            try:
                step()
            except (FarmError, OSError, subprocess.SubprocessError) as error:
                output.note(f"the verdict stands, but a report is missing: {error}")

    return publish


def pipeline_labels() -> dict[str, str]:
    """Return the labels that a build gets by itself, such as the commit of the pipeline."""
    return {name: value for each in _pipelines() for name, value in each.labels(os.environ).items()}


def _pipelines() -> list[PipelineHooks]:
    return [each for _, each in entry_points.load(entry_points.PIPELINES)]


def _write(path: Path, form: str, report: Report, link: str) -> None:
    render: Callable[[Report, str], str] = entry_points.find(entry_points.REPORTS, form)
    with output.writing(path):
        path.write_text(render(report, link), encoding="utf-8")
