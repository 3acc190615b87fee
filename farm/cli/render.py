"""Cells, plans and verdicts as text. Pure: JSON in, lines out."""

from __future__ import annotations

import re
import textwrap
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, cast

import typer

from farm import units
from farm.inert import one_line

if TYPE_CHECKING:
    from farm.client.fetching import Family
    from farm.jobs.estimate import OutlookDocument, RangeDocument
    from farm.jobs.facts import ArtifactFacts, TuningCounts, TuningSummary
    from farm.matrix.planned import CellPlan, ShownCell, ShownPlan
    from farm.results.report import (
        BuildView,
        CellDifference,
        Changes,
        Differences,
        JudgedCell,
        Remark,
        Report,
        SweepResult,
    )
    from farm.wire.program import Conditions, TuningFacts

size, duration, rate, error, plural = units.size, units.duration, units.rate, units.error, units.plural

STYLES = {
    "succeeded": "green",
    "hit": "green",
    "running": "cyan",
    "joined": "cyan",
    "miss": "yellow",
    "cancelled": "yellow",
    "failed": "red",
    "passed": "green",
    "FAIL": "red",
    "ok": "green",
}
"""Colours of state words."""

AS_EXPECTED = "as expected"  # Ends the state of a failure that the manifest or somebody expected: it alarms nobody.
COLOUR = re.compile(r"\x1b\[\d+m")  # What a terminal obeys and does not show.

ROWS = 40
FAILURES = 20
DETAIL_LINES = 2

COMPUTES_IN_FP32 = {"fp16", "bf16"}
"""Precisions that ONNX Runtime's CPU kernels compute in fp32, with casts around them."""


# --- quantities -----------------------------------------------------------------------------------------------------


def clock(seconds: float | None) -> str:
    """Return elapsed time that does not jump while it runs: `0:07`, `1:02:03`."""
    whole = int(seconds or 0)
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours}:{minutes:02}:{whole % 60:02}" if hours else f"{minutes}:{whole % 60:02}"


def align(rows: Sequence[Sequence[str]], indent: str = "", columns: int = 0) -> list[str]:
    """Return rows as lines with aligned columns; state words get their colour.

    If that is wider than so many `columns` (0: any number), the last columns go below each row; then the first row has
    to be the header, and names their values.
    """
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))] if rows else []
    if columns and len(indent) + sum(widths) + 2 * (len(widths) - 1) > columns:
        return _narrow(rows, widths, indent, columns)
    lines = []
    for row in rows:
        padded = [text.ljust(width) for text, width in zip(row, widths, strict=True)]
        padded[-1] = padded[-1].rstrip()
        lines.append((indent + "  ".join(map(_styled, padded))).rstrip())
    return lines


def wrap(line: str, columns: int) -> str:
    """Return a line in pieces that fit, if it has spaces to break at. Colours take no room.

    The pieces of `name  value` stand below the value, if its words fit there.
    """
    plain = COLOUR.sub("", line)
    if len(plain) <= columns:
        return line
    indent = line[: len(line) - len(line.lstrip())]
    name = re.match(r"\s*\S.*?\s{2,}(?=\S)", plain)
    below = len(name[0]) if name else 0
    if not 0 < below <= columns // 3 or max(map(len, plain[below:].split())) > columns - below:
        below = len(indent) + 2
    return textwrap.fill(
        line.strip(), max(columns, 20), initial_indent=indent, subsequent_indent=" " * below,
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip


def _narrow(rows: Sequence[Sequence[str]], widths: Sequence[int], indent: str, columns: int) -> list[str]:
    """Return the first columns, as many as fit, and below each row its other values with the names of their columns."""
    fit = 1
    while len(indent) + sum(widths[: fit + 1]) + 2 * fit <= columns:
        fit += 1
    header, *tops = align([row[:fit] for row in rows], indent)
    lines = [header]
    for row, top in zip(rows[1:], tops, strict=True):
        lines.append(top)
        others = [f"{name} {value}".strip() for name, value in zip(rows[0][fit:], row[fit:], strict=True) if value]
        below = ""
        for other in others:
            if below and len(f"{indent}    {below}, {other}") >= columns:
                lines.append(f"{indent}    {below},")
                below = other
            else:
                below = f"{below}, {other}" if below else other
        if below:
            lines.append(f"{indent}    {below}")
    return lines


def when(seconds: float | None) -> str:
    """Return a moment as people write it, in UTC: `2026-11-22 21:03`."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M") if seconds else ""


def minute(moment: str) -> str:
    """Return a moment of a document (ISO 8601, in UTC) as `when` writes it."""
    return moment[:16].replace("T", " ")


def _styled(text: str) -> str:
    colour = style(text)
    return typer.style(text, fg=colour) if colour else text


def style(state: str) -> str:
    """Return the colour of a text that begins with a state word; empty without one, and for a failure as expected."""
    return "" if state.rstrip().endswith(AS_EXPECTED) else STYLES.get(state.partition(" ")[0], "")


def state(state: str, kind: str | None, expected: bool) -> str:
    """Return how a cell ended: `succeeded`, `failed accuracy`, `failed accuracy as expected`."""
    return " ".join(filter(None, (state, kind, AS_EXPECTED if expected and state == "failed" else "")))


# --- a plan ---------------------------------------------------------------------------------------------------------


def plan(document: ShownPlan, starting: Collection[str] = ()) -> list[str]:
    """Return what a submission would do: counts, one line for every cell that has a job, warnings.

    `starting` are pools whose workers are about to take jobs.
    """
    cells = document["cells"]
    counts = Counter(cell["state"] for cell in cells)
    parts = [plural(counts["hit"], "hit"), plural(counts["miss"], "miss", "misses")]
    parts += [f"{counts['joined']} joined"] if counts["joined"] else []
    lines = [f"{document['name']}: {plural(len(cells), 'cell')}, {', '.join(parts)}"]
    shown = [cell for cell in cells if cell["state"] != "hit" or cell["reason"]]
    lines += _first([(cell["state"], cell["identifier"], _why(cell)) for cell in shown])
    lines += outlook(document.get("outlook"), starting)
    for name, conversion in document.get("conversions", {}).items():
        made_by = ", ".join(f"{library} {version}" for library, version in conversion["libraries"].items())
        source, kind, to = conversion["name"], conversion["kind"], conversion["options"]["to"]
        lines.append(f"{name}: converted from {source} ({kind}) to {to} by {made_by}")
    warnings = document["warnings"]
    lines += [f"warning: {text}" for text in warnings[:ROWS]]
    if len(warnings) > ROWS:
        lines.append(f"warning: {len(warnings) - ROWS} more warnings (--json has all)")
    return lines


def offline_plan(name: str, cells: Sequence[str]) -> list[str]:
    """Return the cells of a manifest that no farm has planned."""
    return [
        f"{name}: {plural(len(cells), 'cell')}; only a farm knows which are hits",
        *_first([(cell,) for cell in cells]),
    ]


def plan_changes(shown: Sequence[ShownCell | CellPlan], accepted: Sequence[JudgedCell]) -> list[str]:
    """Return how an accepted plan differs from the one shown before: workers came or left meanwhile."""
    before = {cell["identifier"]: (cell["pool"], cell["key"]) for cell in shown}
    rows = []
    for cell in accepted:
        pool, key = before.get(cell["identifier"], ("", ""))
        if cell["pool"] != pool:
            rows.append((cell["identifier"], f"{pool or 'not planned'} -> {cell['pool']}"))
        elif cell["key"] != key:
            rows.append((cell["identifier"], "another cache key"))
    if not rows:
        return []
    return [f"the farm changed after it showed the plan: {plural(len(rows), 'cell')} now differ", *_first(rows)]


def _first(rows: Sequence[tuple[str, ...]], head: Sequence[tuple[str, ...]] = (), columns: int = 0) -> list[str]:
    more = [f"  and {len(rows) - ROWS} more (--json has all)"] if len(rows) > ROWS else []
    return [*align([*head, *rows[:ROWS]], "  ", columns), *more]


def _why(cell: ShownCell | CellPlan) -> str:
    reason = cell["reason"] or ("another build compiles it now" if cell["state"] == "joined" else "")
    return reason if cell["live_workers"] else f"{reason}; waits: no live worker".removeprefix("; ")


def outlook(document: OutlookDocument | None, starting: Collection[str] = ()) -> list[str]:
    """Return when a build will be done and what it costs, as one line; empty if nothing is left or known."""
    if not document:
        return []
    parts = []
    if document["eta"]:
        parts.append(f"done in {_about(document['eta'])}")
    paused = document.get("paused") or []
    if paused:
        names = one_line(", ".join(paused))
        verb = "is" if len(paused) == 1 else "are"
        parts.append(f"end unknown: {names} {verb} paused (`farm resume {one_line(paused[0])}`)")
    if unserved := [pool for pool in document["unserved"] if pool not in starting and pool not in paused]:
        parts.append(f"end unknown: no worker takes jobs of {one_line(', '.join(unserved))} now")
    elif starting and document["unserved"]:
        parts.append("a worker is starting")
    if document["slot_seconds"]:
        parts.append(f"{_about(document['slot_seconds'])} of compiling to come")
    if document["gpu_hours"]:
        parts.append(f"{document['gpu_hours']['expected']:.2g} GPU-hours")
    if document["spent_seconds"]:
        parts.append(f"{duration(document['spent_seconds'])} spent")
    if document["unknown"]:
        parts.append(f"{plural(document['unknown'], 'cell')} of unknown duration: nothing like that was compiled yet")
    return ["; ".join(parts)] if parts else []


def _about(range_: RangeDocument) -> str:
    low, expected, high = (duration(seconds) for seconds in (range_["low"], range_["expected"], range_["high"]))
    return f"about {expected} ({low} to {high})" if low != high else f"about {expected}"


# --- while it runs --------------------------------------------------------------------------------------------------


def counts(cells: Iterable[JudgedCell]) -> str:
    """Return `3 succeeded, 1 failed, 2 running, 1 uploading, 10 queued`: what uploads seldom holds a slot."""
    found = Counter(
        "uploading" if cell["state"] == "running" and cell.get("phase") == "uploading" else _state(cell)
        for cell in cells
    )
    order = ("succeeded", "failed", f"failed {AS_EXPECTED}", "cancelled", "running", "uploading", "queued")
    return ", ".join(f"{found[state]} {state}" for state in order if found[state]) or "no cells"


def change(cell: JudgedCell) -> str:
    """Return the log line for a change of a cell's state."""
    parts = [cell["identifier"], _state(cell)]
    match cell["state"]:
        case "running":
            parts.append(f"on {cell['worker']}" if cell.get("worker") else "")
            parts.append(f"(attempt {cell['attempt']})" if (cell.get("attempt") or 0) > 1 else "")
        case "succeeded":
            parts.append("(hit)" if cell.get("hit") else f"in {duration(cell.get('elapsed'))}")
        case "failed":
            parts.append(f"{cell.get('kind')}: {one_line(cell.get('message'))}")
        case "queued":
            parts.append(f"({cell['waiting']})" if cell.get("waiting") else "")
    return " ".join(filter(None, parts))


def activity(cell: JudgedCell) -> tuple[str, str, str, str, str]:
    """Return a cell's line of the live display: identifier, state, phase, elapsed, worker, progress of tuning."""
    phase = cell.get("phase") or "" if cell["state"] == "running" else ""
    if phase and cell.get("progress") is not None:
        phase = f"{phase} {cell['progress']:.0%}"
    where = cell.get("worker") or "" if cell["state"] == "running" else ""
    if cell.get("phase") == "tuning" and where and cell.get("detail"):
        where += f"  {one_line(cell['detail'])}"
    if cell["state"] == "failed":
        phase = cell.get("kind") or ""
    elapsed = "hit" if cell.get("hit") else clock(cell["elapsed"]) if cell.get("elapsed") else ""
    return cell["identifier"], _state(cell), phase, elapsed, where


def under_way(cells: Iterable[JudgedCell]) -> list[str]:
    """Return a line for each cell that has not succeeded, running cells first."""
    rows = [cell for cell in cells if cell["state"] != "succeeded"]
    return _first([activity(cell) for cell in sorted(rows, key=lambda cell: cell["state"] != "running")])


# --- what came out --------------------------------------------------------------------------------------------------


def table(cells: Sequence[JudgedCell], columns: int = 0) -> list[str]:
    """Return the final table: size, latency and error of every cell, compared with its fp32 sibling."""
    base = _baselines(cells)
    rows = [("cell", "state", "size", "latency", "error", "time")]
    for cell in cells:
        facts, sibling = cell.get("facts"), base.get(_sibling(cell))
        gained = _size_column(facts, sibling), _latency_column(facts, sibling)
        took = "hit" if cell.get("hit") else duration(cell.get("elapsed"))
        rows.append((cell["identifier"], _state(cell), *gained, _error_column(facts), took))
    return align(rows, columns=columns)


def builds(found: Sequence[BuildView]) -> Sequence[tuple[str, ...]]:
    """Return the rows of a table of builds, the newest first."""
    rows = [("BUILD", "STATE", "SUBMITTED (UTC)", "NAME", "LABELS", "")]
    for build in found:
        counts = build["counts"]
        ended = build["verdict"]["text"] if build["verdict"] else ""
        open_text = units.counted(counts)
        others = {how: build.get(how) for how in ("follows", "retries", "shadows")}
        follows = "".join(f"; {how} {other}" for how, other in others.items() if other)
        labels = " ".join(f"{name}={one_line(value, 20)}" for name, value in build["labels"].items() if name != "ci")
        state = f"{build['state']}, paused" if build.get("paused") else build["state"]
        if build["verdict"]:
            state = "failed" if build["verdict"]["exit_code"] else "passed"
        submitted = when(build["created_at"])
        rows.append((build["id"], state, submitted, build["name"], labels, (ended or open_text) + follows))
    return rows


def differences(found: Differences, columns: int = 0) -> list[str]:
    """Return how two builds differ, as `FarmClient.diff` found it."""
    left, right = found["left"]["id"], found["right"]["id"]
    both = [(cell, cell["left"], cell["right"]) for cell in found["cells"] if cell["left"] and cell["right"]]
    total = found["same"] + len(both)
    lines = [f"{left} -> {right}: {len(both)} of {plural(total, 'cell')} that both have differ"]
    lines += _around(found["cells"], compared=any(each["share"] is not None for each in found["cells"]))
    rows = [("cell", "state", "size", "latency", "change")]
    for cell, before, after in both:
        facts = [before["facts"], after["facts"]]
        rows.append(
            (
                cell["identifier"],
                _moved([state(each["state"], each["kind"], each["as_expected"]) for each in (before, after)]),
                _moved([_size_column(each, None) for each in facts]),
                _moved([_latency_column(each, None) for each in facts]),
                "; ".join([*_speed(cell), *cell["changes"]]),
            )
        )
    lines += align(rows, "  ", columns) if both else []
    for build, side in ((left, "left"), (right, "right")):
        if names := [cell["identifier"] for cell in found["cells"] if not cell["left" if side == "right" else "right"]]:
            lines += [f"left out, only in {build}: {plural(len(names), 'cell')}", *_first([(name,) for name in names])]
    return lines


def _around(cells: Sequence[JudgedCell | CellDifference], *, compared: bool) -> list[str]:
    from farm.results.gates import UNCHANGED

    alike = units.together((cell["identifier"], text) for cell in cells for text in cell.get("around", ()))
    if compared and not alike:
        return [f"  {UNCHANGED}"]
    more = [f"  also changed: {len(alike) - FAILURES} more (--json has all)"] if len(alike) > FAILURES else []
    return [f"  also changed: {one_line(text)}: {units.named(names)}" for names, text in alike[:FAILURES]] + more


def _speed(cell: CellDifference) -> list[str]:
    """Return by how much a cell's program is slower or faster: if the two took turns, with the interval, else in words
    and if that is more than the noise.
    """
    from farm.results.gates import moved_latency

    before, after = ((each and each["facts"]) for each in (cell["left"], cell["right"]))
    said = moved_latency(before, after) if before and after else None
    return [said.change] if said and (cell["effect"] in ("worse", "better") or "in turns" in said.change) else []


def _moved(values: Sequence[str]) -> str:
    before, after = values
    return after if before == after else f"{before or 'none'} -> {after or 'none'}"


def _state(cell: JudgedCell) -> str:
    return state(cell["state"], "", cell.get("as_expected", False))


def _size_column(facts: ArtifactFacts | None, sibling: ArtifactFacts | None) -> str:
    if not facts:
        return ""
    own, base = facts["program"]["size"], sibling["program"]["size"] if sibling else 0
    return f"{size(own)}  {own / base:.0%}" if base else size(own)


def _latency_column(facts: ArtifactFacts | None, sibling: ArtifactFacts | None) -> str:
    own, base = facts.get("latency") if facts else None, sibling.get("latency") if sibling else None
    if not facts or not own:
        return ""
    if not sibling or not base:
        return f"{duration(own)}{' shared' if facts.get('shared') else ''}"
    if facts.get("shared") or sibling.get("shared"):
        return f"{duration(own)}  ~{base / own:.1f}x shared"
    return f"{duration(own)}  {base / own:.2f}x"


def _error_column(facts: ArtifactFacts | None) -> str:
    from farm.results.tradeoff import error_of

    if not facts:
        return ""
    worst = error_of(facts)
    text = "not verified" if worst is None else error(worst)
    if facts.get("nonfinite"):
        text = "not finite"
    return f"{text} weak" if facts.get("weak") else text


def _sibling(cell: JudgedCell) -> tuple[str, str, str]:
    return cell["model"], cell["target"], cell["shape"]


def _baselines(cells: Sequence[JudgedCell]) -> dict[tuple[str, str, str], ArtifactFacts]:
    return {_sibling(cell): facts for cell in cells if cell["precision"] == "fp32" and (facts := cell.get("facts"))}


def family(index: Family) -> list[str]:
    """Return the members of a family from its index."""
    rows = [("shape", "program", "latency", "throughput")]
    for member in index["members"]:
        latency = duration(member["latency"]) + (" shared" if member["shared"] and member["latency"] else "")
        rows.append((member["shape"], member["program"], latency, rate(member["throughput"])))
    return align(rows)


def gains(cells: Sequence[JudgedCell]) -> list[str]:
    """Return one line for every target and precision: its gain over fp32, and why it is not higher."""
    from statistics import median

    base = _baselines(cells)
    groups: dict[tuple[str, str], list[tuple[ArtifactFacts, ArtifactFacts]]] = {}
    for cell in cells:
        facts, sibling = cell.get("facts"), base.get(_sibling(cell))
        if facts and sibling and cell["precision"] != "fp32":
            groups.setdefault((cell["precision"], cell["target"]), []).append((facts, sibling))
    lines = []
    for (precision, target), pairs in groups.items():
        share = median(own["program"]["size"] / fp32["program"]["size"] for own, fp32 in pairs)
        text = f"{precision} on {target}: {share:.0%} of the fp32 size"
        # Only figures that were measured alone: a mean of rough figures is misleading.
        speeds = [
            before / now
            for own, fp32 in pairs
            if (now := own.get("latency")) and (before := fp32.get("latency"))
            if not own.get("shared") and not fp32.get("shared")
        ]
        if speeds:
            text += f", {median(speeds):.2f}x the fp32 speed"
        if len(pairs) > 1:
            text += f" (median of {len(pairs)} cells)"
        if target == "onnxruntime/cpu" and precision in COMPUTES_IN_FP32:
            text += "; the CPU casts to fp32 to compute, so the gain is size"
        lines.append(text)
    return lines


def tuned(work: TuningCounts | TuningFacts) -> str:
    """Return the result of tuning: `26 operations, 12 known (saved 40 s), 14 tuned in 9 s`."""
    parts = [plural(work["operations"] or 0, "operation")]
    if work["known"]:
        parts.append(f"{work['known']} known" + (f" (saved {duration(work['saved'])})" if work["saved"] else ""))
    if work["tuned"]:
        parts.append(f"{work['tuned']} tuned in {duration(work['seconds'])}")
    if work["untunable"]:
        parts.append(f"{work['untunable']} not tunable")
    return ", ".join(parts)


def tunings(cells: Sequence[JudgedCell]) -> list[str]:
    """Return the result of tuning in the cells that a build tuned, in total and for each."""
    made = [
        (cell["identifier"], facts, work)
        for cell in cells
        if (facts := cell.get("facts")) and (work := facts.get("tuning")) and not cell.get("hit")
    ]
    if len(made) < 2:
        return [f"tuning: {_tuning(facts, work)}" for _, facts, work in made]
    works = cast("list[Mapping[str, float]]", [work for _, _, work in made])
    counts = ("operations", "known", "tuned", "untunable", "seconds", "saved")
    total = {name: sum(work[name] or 0 for work in works) for name in counts}
    return [
        f"tuning: {tuned(cast('TuningCounts', total))}",
        *align([(f"  {name}", _tuning(facts, work)) for name, facts, work in made]),
    ]


def _tuning(facts: ArtifactFacts, work: TuningSummary) -> str:
    text = tuned(work) + ("" if work.get("finished", True) else ", cut short by its budget")
    if facts.get("ratio"):
        text += f"; {facts['ratio']:.2f}x the untuned program"
        text += ", which is published" if work.get("published") == "untuned" else ""
    return text


def not_alone(conditions: Sequence[Conditions], what: str) -> list[tuple[str, str]]:
    """Return rows about other processes that held memory of the GPU before and after an activity, and after its turns
    with other programs.
    """
    return [
        ("not alone", f"{plural(others['count'], 'process', 'processes')} with {size(others['memory'])} {when} {what}")
        for when, found in zip(("before", "after", "after the turns of"), conditions, strict=False)
        if (others := found["processes"]) and others["count"]
    ]


def legend(cells: Sequence[JudgedCell]) -> list[str]:
    """Return the meaning of the remarks in the table."""
    facts = [found for cell in cells if (found := cell.get("facts"))]
    lines = []
    if count := sum(bool(work and work.get("carried") is False) for each in facts if (work := each.get("tuning"))):
        lines.append(
            f"not carried: without the tuning databases the programs of {plural(count, 'cell')} are slower, "
            "or tune again; `farm inspect` says how much"
        )
    if any(each.get("shared") and each.get("latency") for each in facts):
        lines.append(
            "shared: others ran on the host or used the GPU while it was measured, or that is not known; "
            "the speed is rough"
        )
    if busy := [others for each in facts if (others := each.get("processes")) and others["count"]]:
        most = max(busy, key=lambda found: (found["count"], found["memory"]))
        lines.append(
            f"not alone: other processes, up to {most['count']} with {size(most['memory'])} of its memory, "
            f"used the GPU when {plural(len(busy), 'cell was', 'cells were')} tuned or measured; "
            "measure again when it is idle"
        )
    if any(each.get("weak") for each in facts):
        lines.append("weak: outputs hardly differ between samples, a constant would pass; add more varied `samples:`")
    return lines


def sweeps(swept: Iterable[SweepResult]) -> list[str]:
    """Return a table for every batch sweep, with the best batch marked."""
    from farm.results.tradeoff import title

    lines: list[str] = []
    for found in swept:
        limit = f" within {duration(found['max_latency'])}" if found["max_latency"] else ""
        lines.append(f"sweep of {title(found)}: best {found['metric']}{limit}")
        rows = [("batch", "latency", "throughput", "")]
        for point in found["points"]:
            remark = "best" if point["identifier"] == found["best"] else ""
            latency = duration(point["latency"]) + (" shared" if point["shared"] else "")
            rows.append((str(point["batch"]), latency, rate(point["throughput"]), remark))
        lines += align(rows, "  ")
        if not found["best"]:
            lines.append(f"  no batch was measured{limit}")
        elif found["weak"]:
            lines.append("  weak: others ran at the same time, another may be best")
    return lines


def failures(cells: Sequence[JudgedCell], build_id: str, page: str = "") -> list[str]:
    """Return at most eight lines for every failure: where, what, whose fault, what to try, its log.

    Cells that failed alike, but for numbers, are one failure, shown with the first of them. `page` is the URL of the
    build's page; a cell's page is below it.
    """
    unexpected = [cell for cell in cells if cell["state"] == "failed" and not cell.get("as_expected")]
    failed = units.alike(unexpected, lambda cell: tuple(map(cell.get, ("kind", "fault", "phase", "message"))))
    lines: list[str] = []
    for alike in failed[:FAILURES]:
        cell, which = alike[0], units.named([cell["identifier"] for cell in alike])
        whose = "the farm's fault" if cell.get("fault") == "farm" else "yours to fix"
        phase = f" while {cell['phase']}" if cell.get("phase") else ""
        lines.append(f"{_styled('failed')} {which}{phase}: {cell['kind']} ({whose})")
        said = units.together((each["identifier"], one_line(each.get("message"))) for each in alike)
        lines += [f"  {f'{units.named(names)}: ' * (len(said) > 1)}{text}" for names, text in said[:FAILURES] if text]
        lines += [f"  and {len(said) - FAILURES} more messages"] if len(said) > FAILURES else []
        details = [line for line in (cell.get("detail") or "").splitlines() if line.strip()]
        lines += [f"  | {one_line(line)}" for line in details[:DETAIL_LINES]]
        if cell.get("advice"):
            lines.append(f"  try: {one_line(cell['advice'])}")
        if cell.get("job") or cell.get("log") or cell.get("facts"):
            lines.append(f"  log: farm logs {build_id} {cell['identifier']}")
        if alone := cell.get("job") or (f"{build_id} {cell['identifier']}" if cell.get("facts") else ""):
            lines.append(f"  alone: farm reproduce {alone} -o DIR")
        if page:
            lines.append(f"  page: {page}/cells/{cell['identifier']}")
    if more := sum(map(len, failed[FAILURES:])):
        lines.append(f"and {more} more failed cells: farm status {build_id} --json")
    return lines


def moved(cells: Sequence[JudgedCell], columns: int = 0) -> list[str]:
    """Return the numbers that are worse or better than a baseline's, or too close to tell, worst first."""
    from farm.results.gates import movements

    rows = [(name, *said[:5]) for name, said in movements(cells)]
    head = ("cell", "", "before (fastest to p90)", "after", "change (99 %)", "")
    return _first(rows, [head], columns) if rows else []


def remarks(cells: Sequence[JudgedCell], found: Changes | None) -> list[str]:
    """Return the warnings of cells that passed, what got better or fixed, and what gates could not judge."""
    rows: list[str] = []
    known = cast("Mapping[str, list[Remark]]", found or {})  # An older farm wrote none.
    warned = [{"identifier": cell["identifier"], "text": text} for cell in cells if (text := cell.get("warning"))]
    for word, name in (
        ("warning", ""),
        ("better", "improvements"),
        ("fixed", "fixed"),
        ("no longer judged", "unjudged"),
        ("not in latest", "held"),
        ("not judged", "undecided"),
        ("new", "new"),
    ):
        said = known.get(name, []) if name else warned
        alike = units.together((remark["identifier"], one_line(remark["text"])) for remark in said)
        rows += [f"{word}: {units.named(names)}: {text}" for names, text in alike[:FAILURES]]
        if more := sum(len(names) for names, _ in alike[FAILURES:]):
            rows.append(f"{word}: {more} more cells (--json has all)")
    return rows


def compared(build: BuildView, cells: Sequence[JudgedCell]) -> list[str]:
    """Return how a follow-up's programs compare with those published before; nothing for other builds."""
    lines = []
    for cell in cells if build.get("follows") else ():
        facts = cell.get("facts")
        if against := facts.get("against") if facts else None:
            low, high = against["interval"]
            faster = "`latest` names it, unless something newer was published"
            named = faster if against["verdict"] == "faster" else "`latest` stays"
            lines.append(
                f"{cell['identifier']}: {against['ratio']:.2f}x the program of {build['follows']} "
                f"({low:.2f} to {high:.2f}), {against['verdict']}: {named}"
            )
    return lines


def outcome(report: Report, page: str = "", columns: int = 0) -> list[str]:
    """Return the full text at the end of a build; `page` is the URL of its page, `columns` the terminal's width."""
    build, cells = report["build"], report["cells"]
    blocks = [
        table(cells, columns),
        tunings(cells),
        [*gains(cells), *legend(cells)],
        sweeps(report["sweeps"]),
        [*_around(cells, compared=bool(rows := moved(cells, columns))), *rows],
        failures(cells, build["id"], page),
        remarks(cells, report.get("changes")),
    ]
    verdict = build.get("verdict") or {"text": counts(cells)}
    blocks += [compared(build, cells), [f"{build['name']} {build['id']}: {verdict['text']}"]]
    if follower := build.get("followed_by"):
        blocks[-1].append(
            f"build {follower} follows: it tunes further while the farm runs and nothing else waits; "
            f"`farm status {follower}`"
        )
    return [line for block in blocks if block for line in ("", *block)][1:]


def waiting(cells: Sequence[JudgedCell]) -> list[str]:
    """Return why cells wait, queued or running: one sentence per reason, with the jobs ahead as a range."""
    queued = [cell.get("waiting") or "" for cell in cells if cell["state"] == "queued" or cell.get("waiting")]
    reasons: dict[str, list[int]] = {}
    for text in filter(None, queued):
        number = re.match(r"(\d+) jobs? (?=ahead)", text)
        reasons.setdefault(text[number.end() :] if number else text, []).append(int(number[1]) if number else -1)
    lines = []
    for reason, ahead in reasons.items():
        least, most = min(ahead), max(ahead)
        numbers = "" if most < 0 else f"{least} to {most} jobs " if least < most else f"{plural(most, 'job')} "
        lines.append(f"{plural(len(ahead), 'cell')} waiting: {numbers}{reason}")
    if lines and (more := queued.count("")):
        lines.append(f"{plural(more, 'cell')} waiting behind them")
    return lines
