"""Keep manifests by name, with what builds them."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import typer
from typer import Argument, Option

from farm.cli import build_commands, output, render
from farm.cli.connection import connect
from farm.client.freezing import freeze
from farm.errors import NotFound
from farm.extras.triggers.manifests_api import ManifestsApi
from farm.extras.triggers.stored_manifests import StoredManifest
from farm.inert import inert
from farm.manifest.parsing import read_gates
from farm.matrix.planned import FrozenManifest
from farm.settings import load_settings

commands = output.commands(__doc__)

ManifestName = Annotated[str, Argument(metavar="NAME", help="A stored manifest: `farm manifest ls` lists them.")]
IfVersion = Annotated[
    int | None,
    Option("--if-version", metavar="N", min=0, help="Only if this is the newest version; 0: if there is none."),
]
OneVersion = Annotated[int | None, Option("--version", metavar="N", min=1, help="A version; default: the newest.")]


@commands.command()
def push(
    manifest: build_commands.ManifestArgument, if_version: IfVersion = None, untrusted: build_commands.Untrusted = False
) -> None:
    """Store a manifest under its own name, with the digests of its models and data.

    What equals the newest version makes no new one.
    """
    frozen = freeze(manifest, pythons=load_settings().converters, untrusted=untrusted)
    with connect() as client:
        stored = ManifestsApi.of(client).push(frozen, version=if_version)
    output.result(stored, f"{stored['name']}@{stored['version']}")


@commands.command()
def ls() -> None:
    """List the stored manifests."""
    with connect() as client:
        found = ManifestsApi.of(client).all()
    rows = [("NAME", "VERSION", "PUSHED (UTC)", "BY")]
    rows += [
        (each["name"], str(each["version"]), render.when(newest["pushed"]), newest["by"])
        for each in found
        for newest in each["versions"][-1:]
    ]
    output.table(rows, "no manifest is stored yet: farm manifest push FILE", {"items": found})


@commands.command()
def show(name: ManifestName, version: OneVersion = None) -> None:
    """Print a stored manifest, as it was pushed; its versions and digests go to standard error."""
    with connect() as client:
        found = ManifestsApi.of(client).get(name, version)
    if output.as_json():
        output.emit(found)
        return
    for each in found["versions"]:
        mark = "*" if each["version"] == found["shown"] else " "
        output.note(f"{mark} {name}@{each['version']}  {render.when(each['pushed'])}  {each['by']}")
    for line in _frozen(found["content"]):
        output.note(f"  {line}")
    output.say(inert(found["content"]["manifest"].rstrip("\n")))


@commands.command()
def diff(
    name: ManifestName,
    left: Annotated[int, Argument(metavar="VERSION", min=0, help="A version; 0: the one before OTHER.")] = 0,
    right: Annotated[int, Argument(metavar="OTHER", min=0, help="Another version; 0: the newest.")] = 0,
) -> None:
    """Show what changed from one version to another: the text, and the digests of models and data."""
    with connect() as client:
        newer = ManifestsApi.of(client).get(name, right or None)
        before = [each["version"] for each in newer["versions"] if each["version"] < newer["shown"]]
        if not left and not before:
            raise NotFound(f"{name} has no version before {newer['shown']}")
        older = ManifestsApi.of(client).get(name, left or before[-1])
    names = f"{name}@{older['shown']}", f"{name}@{newer['shown']}"
    lines = list(difflib.unified_diff(_lines(older["content"]), _lines(newer["content"]), *names, lineterm=""))
    said = map(inert, lines or [f"{names[0]} and {names[1]} are the same"])
    output.result({"left": older["shown"], "right": newer["shown"], "lines": lines}, said)


@commands.command()
def rm(name: ManifestName, if_version: IfVersion = None) -> None:
    """Remove a stored manifest with all its versions, so that nothing builds it any more. Its builds stay."""
    with connect() as client:
        ManifestsApi.of(client).remove(name, version=if_version)
    output.result({"removed": name}, f"{name} is removed")


@commands.command()
def build(
    name: ManifestName,
    version: OneVersion = None,
    detach: build_commands.Detach = False,
    key: Annotated[str, Option(metavar="TEXT", help="The same key again is answered with the same build.")] = "",
    label: build_commands.Labels = None,
    gate: build_commands.Limits = None,
    budget: build_commands.MostOf = None,
    baseline: build_commands.BaselineTag = "",
    first: build_commands.FirstRun = False,
    junit: build_commands.Junit = None,
    summary: build_commands.Summary = None,
    dry_run: build_commands.DryRun = False,
) -> None:
    """Build a stored manifest and follow the build to its verdict."""
    publish = build_commands.reports_to(junit, summary)
    labels = {**build_commands.pipeline_labels(), **build_commands.read_labels(label)}
    gates = read_gates(gate or (), budget or (), baseline, first=first)
    with connect() as client:
        if dry_run:
            build_commands.show_plan(ManifestsApi.of(client).plan(name, version=version, labels=labels, gates=gates))
            return
        build_id = ManifestsApi.of(client).build(name, version=version, labels=labels, gates=gates, key=key)["id"]
        build_commands.say_before([f"build {build_id}"], detach=detach)
        code = build_commands.follow_to_verdict(client, build_id, publish, detach=detach)
    raise typer.Exit(code)


@commands.command()
def triggers(name: Annotated[str, Argument(metavar="NAME", help="A stored manifest; default: all.")] = "") -> None:
    """Show what builds stored manifests by itself: the last run, the next one, and why one made no build."""
    with connect() as client:
        found: list[StoredManifest] = [ManifestsApi.of(client).get(name)] if name else ManifestsApi.of(client).all()
    rows = [("MANIFEST", "WHEN", "NEXT (UTC)", "LAST (UTC)", "BUILD")]
    items, said = [], list[str]()
    for each in found:
        for trigger in each["triggers"]:
            name, last = each["name"], trigger["last"]
            items.append({"manifest": name, **trigger})
            when = " ".join(filter(None, (trigger["kind"], trigger["text"], trigger["timezone"])))
            came = (render.when(last["at"]), last["build"]) if last else ("", "")
            rows.append((name, when, render.when(trigger["next"]), *came))
            if last and last["error"]:
                said.append(f"{name}: {trigger['text']}: no build at {came[0]}: {last['error']}")
            if trigger["problem"]:
                said.append(f"{name}: {trigger['text']}: waits: {trigger['problem']}")
    output.table(rows, "no trigger: `triggers:` in a manifest has them", {"items": items})
    output.say_all([] if output.as_json() else map(inert, said))


def _lines(content: FrozenManifest) -> list[str]:
    return [*content["manifest"].splitlines(), *(f"# {line}" for line in _frozen(content))]


def _frozen(content: FrozenManifest) -> Iterator[str]:
    """Yield what a version is frozen to, a line for each model, data set and file."""
    parts: list[tuple[str, Mapping[str, Any]]] = [
        ("model", content["models"]),
        ("data", content["data"]),
        ("file", content["files"]),
    ]
    for what, named in parts:
        for each in sorted(named):
            yield f"{what} {each} sha256:{named[each]['digest']}"
