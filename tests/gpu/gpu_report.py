"""The report of a run on cards, for people."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.gpu.stages import Run


def draw(run: Run, path: Path) -> None:
    """Processes on each card over time."""
    from matplotlib.figure import Figure

    if not run.sampler.cards:
        return
    figure = Figure(figsize=(10, 1.2 + 0.7 * len(run.cards)), layout="constrained")
    axes = figure.subplots()
    end = run.sampler.now
    for card in range(len(run.cards)):
        changes = [(at, len(pids)) for at, where, pids in run.sampler.changes if where == card]
        times, counts = [0.0, *(at for at, _ in changes), end], [0, *(count for _, count in changes)]
        axes.stairs([card + 0.35 * count for count in counts], times, baseline=card, fill=True)
    axes.set_yticks(range(len(run.cards)), [f"card {card}" for card in range(len(run.cards))])
    axes.set_ylim(0, len(run.cards))
    axes.set_xlabel("seconds")
    axes.set_title(
        f"processes on each card, by {'KFD' if run.maker == 'amd' else 'NVML'} (the height of a step is one)"
    )
    for name, found in run.found.items():
        axes.axvline(found["from"], color="grey", linewidth=0.5)
        axes.text(found["from"], len(run.cards) - 0.05, name, fontsize=7, rotation=90, va="top", ha="right")
    figure.savefig(path, dpi=110)


def seen(found: dict[str, Any]) -> str:
    """Say in a few words what a stage saw."""
    cells = [*found.get("cells", []), *found.get("next", [])] if isinstance(found.get("next", []), list) else []
    cells = cells or found.get("cells", [])
    words = [
        found.get("seen") or found.get("left_out", ""),
        f"{sum(cell['state'] == 'succeeded' for cell in cells)} of {len(cells)} cells succeeded" if cells else "",
        f"{len(found['kills'])} kills" if "kills" in found else "",
        f"{len(found['probes']) - len(found['reached'])} of {len(found['probes'])} probes refused"
        if found.get("probes")
        else "",
        f"done by {' and by '.join(map(str, found['seconds']))} cards"
        if isinstance(found.get("seconds"), dict)
        else "",
        f"ratio {found['ratio']}" if found.get("ratio") else "",
        "it broke" if "broke" in found else "",
    ]
    return "; ".join(filter(None, words)).replace("|", "/")


def table(run: Run) -> str:
    """The report for people."""
    cards = f"{run.maker.upper()} cards"
    what = f"A rehearsal of the farm on {cards}, without one" if run.rehearsal else f"The farm on {cards}"
    lines = [
        f"# {what}",
        "",
        f"Written by `python -m tests.gpu --maker {run.maker}`, with {run.compiler}/{run.device}.",
    ]
    if run.rehearsal:
        lines.append(f"**{run.played}.** It shows that the stages work, and says nothing of a card.")
    lines += ["", "| stage | claim | seen | as claimed | seconds |", "| --- | --- | --- | --- | --- |"]
    for name, found in run.found.items():
        claim = (getattr(type(run), name).__doc__ or "").strip().splitlines()[0]
        good = "not tried" if "left_out" in found else "yes" if found["ok"] else "NO"
        shown = seen(found if run.measured else {**found, "ratio": None})
        lines.append(f"| {name} | {claim} | {shown} | {good} | {found['to'] - found['from']:.0f} |")
    machine = run.found.get("machine", {})
    lines += ["", *(f"- {line}" for line in machine.get("gpus", []))]
    lines += [f"- driver {machine['driver']}", ""] if machine.get("driver") else [""]
    cells = run.found.get("matrix", {}).get("cells", [])
    if cells:
        lines += ["| cell | state | latency, ms | rel_l2 | weak |", "| --- | --- | --- | --- | --- |"]
    for cell in cells:
        latency = f"{cell['latency'] * 1e3:.3f}" if cell["latency"] and run.measured else ""
        error = f"{cell['error']:.2g}" if cell["error"] is not None else ""
        weak = "weak" if cell["weak"] else ""
        lines.append(f"| {cell['identifier']} | {cell['kind'] or cell['state']} | {latency} | {error} | {weak} |")
    if ratio := run.found.get("loop", {}).get("ratio"):
        times = run.found["loop"]
        lines += [
            "",
            f"One card took {ratio} times as long as a plain loop: {times['farm']} and {times['loop']} s.",
        ]
    if (scaling := run.found.get("scaling", {}).get("ratio")) and run.measured:
        lines += ["", "Times the work of one card: " + ", ".join(f"{n} cards {r}" for n, r in scaling.items())]
    for name, found in run.found.items():
        if found.get("broke"):
            lines += ["", f"## {name} broke", "", "```", found["broke"], "```"]
    return "\n".join(lines) + "\n"
