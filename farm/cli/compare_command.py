"""`farm compare`: which of a model's programs to ship."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from farm.cli import completion, output, render
from farm.cli.connection import connect_or_start
from farm.errors import NotFound

if TYPE_CHECKING:
    from farm.client.client import FarmClient
    from farm.results.report import JudgedCell
    from farm.results.tradeoff import Advice, Contender

LOOKED_AT = 50
"""Builds that are looked at for a model, the newest first."""


def compare(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A model's name.")],
    build: Annotated[
        str,
        typer.Argument(
            metavar="[BUILD]", help="A build; default: the newest with the model.", autocompletion=completion.builds
        ),
    ] = "",
    as_json: output.Json = False,
) -> None:
    """Show which of a model's programs to ship: speed against error and size.

    A `*` marks the Pareto front: no other program of that target and shape is both faster and nearer to the reference.
    """
    from farm.results.tradeoff import advise, choices

    with connect_or_start() as client:
        build_id, cells = _find(client, model, build)
    found = choices(
        (cell["identifier"], cell["state"] == "succeeded", facts) for cell in cells if (facts := cell["facts"])
    )
    advice = advise(found)
    document = {
        "build": build_id,
        "model": model,
        "cells": [each._asdict() for each in found],
        "recommended": [
            {"target": target, "shape": shape, "cell": chosen and chosen.identifier, "reason": reason}
            for (target, shape), chosen, reason in advice
        ],
    }
    output.result(document, lines(build_id, model, found, advice, output.width()), as_json=as_json)


def _find(client: FarmClient, model: str, build: str) -> tuple[str, list[JudgedCell]]:
    known = [client.find_build(build)] if build else [
        each["id"] for each in client.builds(LOOKED_AT) if not each.get("shadows") and each["counts"]["succeeded"]
    ]  # fmt: skip
    for build_id in known:
        cells = [cell for cell in client.cells(build_id) if cell["model"] == model]
        if any(cell["facts"] for cell in cells):
            return build_id, cells
    where = build or f"the newest {LOOKED_AT} builds"
    raise NotFound(
        f"no program of {model} in {where}", hint="`farm ls` lists models; name a build to look further back"
    )


def lines(build: str, model: str, found: Sequence[Contender], advice: Sequence[Advice], columns: int = 0) -> list[str]:
    """Return a model's programs as a table, and what to ship of each target and shape."""
    rows = [("", "cell", "latency", "p99", "throughput", "x fp32", "error", "size", "")]
    for each in found:
        weak = [*each.marks, *([] if each.passed else ["refused"])]
        rough = "~" if "shared" in each.marks else ""
        rows.append((
            "*" if each.on_front else "",
            each.identifier.partition("/")[2],
            rough + render.duration(each.latency) if each.latency else "",
            render.duration(each.p99),
            render.rate(each.throughput),
            f"{rough}{each.gain:.2f}x" if each.gain else "",
            render.error(each.error),
            render.size(each.size),
            ", ".join(weak),
        ))  # fmt: skip
    said = [f"{model} in {build}", *render.align(rows, columns=columns)]
    for place, chosen, reason in advice:
        where = " ".join(place)
        if not chosen:
            said.append(f"{where}: nothing to recommend: {reason}")
            continue
        gain = f"{chosen.gain:.2f}x fp32, " if chosen.gain and chosen.precision != "fp32" else ""
        numbers = f"{gain}error {chosen.error:.1e}, {render.size(chosen.size)}"
        said.append(f"{where}: ship {chosen.precision}: {numbers}; {reason}")
    return said
