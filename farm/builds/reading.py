"""Reads builds and jobs: from the store while it has them, else from reports in object storage. Answers are plain JSON.

`BuildChanges` follows a build: the cells that its events name, as they are now, for one reader. `troubles` has what is
apart from what, and what else operators have to see to: one list for pages, `farm doctor` and `farm ls`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from time import monotonic
from typing import NamedTuple, cast

from pydantic_core import from_json

from farm import __version__
from farm.artifacts.s3 import S3Store
from farm.artifacts.storage import blob_key, build_key, open_key, reference_key
from farm.builds.past_builds import BuildIndex, EndedCells
from farm.builds.plan import EstimatedCell, outlook
from farm.compiling.asking import reference_recipe, references_of
from farm.compiling.attempt import Attempt
from farm.errors import ArtifactGone, FarmFault, NotFound, StoreUnavailable, UsageError
from farm.files import SHOWN_LOG, left_out
from farm.jobs.estimate import OutlookDocument
from farm.jobs.rows import (
    AttemptView,
    BuildEvent,
    BuildRow,
    EventBatch,
    FailureDocument,
    JobView,
    ReproductionDocument,
    WaitReasons,
)
from farm.jobs.state import PAUSED, WAITS_FOR_STORAGE, WAITS_FOR_TURN, AttemptEnd, AttemptLimits, State
from farm.logging import get_logger
from farm.matrix.planned import CellPlan, PlanDocument
from farm.results.report import BuildChange, BuildView, JudgedCell, Report
from farm.results.tradeoff import sweeps_of
from farm.results.verdict import CellEnd, CellLine, changes_of, judge_cell, verdict_of
from farm.settings import Settings
from farm.spec import FileReference, digest_of
from farm.store import Store
from farm.units import duration, lots, view_of
from farm.wire.asked import BlobSize


def troubles(store: Store, settings: Settings) -> list[str]:
    """Return what needs somebody, as sentences that say what to do. Raises StoreUnavailable."""
    now, said = store.now(), []
    for name, (at, away) in store.planes.list().items():
        if now - at > settings.lease_seconds:
            how = "it ended without a word, or does not reach Redis: see its log and /v1/health"
            said.append(f"control plane {name} has been silent for {duration(now - at)}: {how}")
        elif away:
            said.append(f"control plane {name} cannot reach object storage: {away}: see the network between them")
    for node, at in store.workers.silent().items():
        how = "it is off, has another name now, or does not reach Redis: see its worker's log"
        said.append(f"node {node} has been silent for {duration(now - at)}: {how}")
    for worker in store.workers.list():
        node, release = worker["node"], worker.get("versions", {}).get("farm", __version__)
        if worker["resting"].startswith("object storage"):
            said.append(f"node {node} cannot reach object storage: {worker['resting']}: see the network between them")
        if worker["warning"]:
            said.append(f"node {node}: {worker['warning']}")
        if release != __version__:
            how = f"this control plane {__version__}: upgrade control planes first, then workers"
            said.append(f"node {node} runs release {release} of the farm, {how}")
    return list(dict.fromkeys(said))


PART = 4 << 20  # Bytes of a log that are read at once.
LONGEST_LINE = 64 << 10  # Bytes of a line that stay together at the end of a part.


class JobLog:
    """A log, read in parts: a long one takes no more memory than a short one."""

    def __init__(self, size: int, read: Callable[[int, int], bytes], blob: str = "") -> None:
        """`read` returns the bytes from one place to another; the log has `size` of them, in a blob of this digest."""
        self.size, self._read, self._blob = size, read, blob

    @classmethod
    def of_blob(cls, artifacts: S3Store, digest: str) -> JobLog:
        """Return the log in a blob. Raises ArtifactGone."""
        found = artifacts.head(blob_key(digest))
        if not found:
            raise ArtifactGone(f"the log {digest} is not in object storage", hint="it was deleted")
        return cls(found.size, lambda start, end: artifacts.read_range(digest, start, end), digest)

    @property
    def parts(self) -> int:
        """How many parts the log has, at least one."""
        return max(1, -(-self.size // PART))

    def part(self, number: int) -> str:
        """Return the lines that begin in a part, counted from 0."""
        start, end = number * PART, (number + 1) * PART
        before = max(0, start - 1)
        data = self._read(before, min(self.size, end + LONGEST_LINE))
        # A line that began in the part before belongs to that one.
        first = data.find(b"\n", 0, LONGEST_LINE + 1) + 1 or LONGEST_LINE + 1 if start else 0
        last = data.find(b"\n", end - 1 - before) + 1 or len(data)
        return data[first:last].decode(errors="replace")

    def last(self) -> Iterator[bytes]:
        """Yield the log piece by piece, from its end if it has more than `SHOWN_LOG` bytes; then it says so first."""
        begin = max(0, self.size - SHOWN_LOG)
        if begin:
            yield left_out(begin, self._blob)
        for start in range(begin, self.size, PART):
            yield self._read(start, min(self.size, start + PART))


class JobViews:
    """The jobs of every namespace, while the store has them."""

    def __init__(self, store: Store, artifacts: S3Store) -> None:
        self._store = store
        self._artifacts = artifacts

    def get(self, namespace: str, job_id: str) -> JobView:
        """Return a job with its attempts. Raises NotFound."""
        job = self._store.jobs.get(job_id)
        if job is None or job["namespace"] != namespace:
            raise NotFound(f"no job {job_id} in namespace {namespace}")
        return job

    def log(self, namespace: str, job_id: str, attempt: int = 0) -> JobLog:
        """Return a job's log: its last part while it runs, then the last attempt's.

        With `attempt` that of an attempt that ended. Raises NotFound if it has none.
        """
        job = self.get(namespace, job_id)
        digest = job["log"]
        if attempt:
            digest = next((one["log"] for one in job["attempts"] if one["number"] == attempt), None)
            if not digest:
                raise NotFound(f"attempt {attempt} of job {job_id} has no log")
        elif not digest or job["state"] == State.RUNNING:
            tail = self._store.jobs.log_tail(job_id) or b""
            return JobLog(len(tail), lambda start, end: tail[start:end])
        return JobLog.of_blob(self._artifacts, digest)

    def reproduction(self, namespace: str, job_id: str) -> ReproductionDocument:
        """Return all that determines a job's last attempt, as `Attempt.describe` says it. Raises NotFound."""
        job = self.get(namespace, job_id)
        tried = job["attempts"]
        attempt = Attempt(
            job_id,
            job["attempt"],
            token="",
            order=job["order"],
            limits=tried[-1]["limits"] if tried else AttemptLimits(time=0.0, memory=0),
            namespace=namespace,
            key=job["key"],
            build=job["cells"][0]["build"] if job["cells"] else "",
            worker=tried[-1]["worker"] or "" if tried else "",
            previous=tuple(one["kind"] or "" for one in tried[:-1]),
        )
        return self.described(attempt, job)

    def described(self, attempt: Attempt, ended: JobView | JudgedCell) -> ReproductionDocument:
        """Return everything that determines an attempt; `ended` is the job or cell with its end."""
        namespace, order = attempt.namespace, attempt.order
        failure = view_of(FailureDocument, ended) if ended["kind"] else None
        recipes = (reference_recipe(order, used) for used in references_of(order) or ("",))
        known = (self._artifacts.get_object(reference_key(namespace, digest_of(recipe))) for recipe in recipes)
        made: BlobSize | None = next((json.loads(found.data) for found in known if found), None)
        reference: FileReference | None = (
            {"path": "reference.npz", "digest": made["digest"], "size": made["size"]} if made else None
        )
        return attempt.describe(reference=reference, ended=failure)


log = get_logger(__name__)

EXPLAINED = 20  # Queued cells whose wait a build's report explains; the others wait for the same reasons.

JUDGED_AT_ONCE = 2000  # Cells that are read and judged at once.
PLANS = 100_000  # Cells of the plans that are kept in memory, some kilobytes each.

Identifiers = list[str]
JudgedCells = list[JudgedCell]
Builds = list[BuildView]


class BuildReader:
    """Reads builds. All answers are plain JSON."""

    def __init__(self, store: Store, artifacts: S3Store, jobs: JobViews, index: BuildIndex) -> None:
        self._store = store
        self._artifacts = artifacts
        self._jobs = jobs
        self._index = index
        self._plans: dict[tuple[str, str], _KnownPlan] = {}  # The plans that were used last, the last one at the end.

    def resolve(self, namespace: str, build_id: str) -> str:
        """Return the whole id of a build that is named by id, unique prefix or `@latest`. Raises NotFound.

        `@latest` is the newest submitted build, never a follow-up or a shadow build, which no manifest submitted.
        """
        if self._live(namespace, build_id):
            return build_id
        known = self._known(namespace)
        if build_id == "@latest":
            newest = next((row["id"] for row in known if not is_aside(row)), None)
            if newest is None:
                raise NotFound(f"no build in namespace {namespace}", hint="`farm submit MANIFEST` makes one")
            return newest
        matches = [row["id"] for row in known if row["id"].startswith(build_id)]
        if len(matches) > 1:
            raise UsageError(f"{build_id} is the start of {len(matches)} builds", hint=", ".join(matches[:5]))
        if matches:
            return matches[0]
        if re.fullmatch(r"b-[0-9a-f]{16}", build_id) and self._artifacts.get_object(
            build_key(namespace, build_id, "manifest.yaml")
        ):
            return build_id
        raise NotFound(f"no build {build_id} in namespace {namespace}", hint="`farm status` lists the builds")

    def report(self, namespace: str, build_id: str) -> Report:
        """Return a build with its cells, from the store while it has it, else from its report. Raises NotFound."""
        build_id = self.resolve(namespace, build_id)
        row = self._live(namespace, build_id)
        # A report is final: a restored store may have other cells, and an expectation may expire.
        final = self.read_report(namespace, build_id) if row and row["state"] == "reported" else None
        return final or self.live_report(namespace, build_id) or self._stored_report(namespace, build_id)

    def get(self, namespace: str, build_id: str) -> BuildView:
        """Return a build without its cells. Raises NotFound.

        Until its report is written, `counts` are those of the jobs: a cell that failed a gate counts as succeeded.
        """
        build_id = self.resolve(namespace, build_id)
        row = self._live(namespace, build_id)
        if row is None:
            return self._stored_report(namespace, build_id)["build"]
        return _build_document(row, self.follower(build_id))

    def cells(self, namespace: str, build_id: str) -> list[JudgedCell]:
        """Return a build's cells, judged, in the order of its manifest. Raises NotFound."""
        return self.report(namespace, build_id)["cells"]

    def list(self, namespace: str, limit: int = 50, *, label: str = "") -> list[BuildView]:
        """Return the newest builds of a namespace; with `label` those that have it.

        A label is KEY=VALUE; of `commit`, the start of its value is enough. Follow-ups have the labels of their builds;
        they and shadow builds are left out.
        """
        rows = self._known(namespace)
        if label:
            rows = [row for row in rows if not is_aside(row) and _has(row, label)]
        return rows[:limit]

    def _known(self, namespace: str) -> Builds:
        """Return the builds of a namespace, newest first: finished ones from the index, others from the store."""
        finished: dict[str, BuildView] = {}
        with suppress(FarmFault):
            finished = self._index.builds(namespace)
        others = [each for each in self._store.builds.ids(namespace) if each not in finished]
        rows = map(_build_document, self._store.builds.list(namespace, others))
        return sorted([*finished.values(), *rows], key=lambda row: row["created_at"], reverse=True)

    def events(self, namespace: str, build_id: str, after: str | None, block_seconds: float) -> EventBatch:
        """Return a build's events after an event id, waiting up to `block_seconds` for the first.

        `reset` means that the position is unknown to the store (trimmed, or of a store that was lost): read the state.
        """
        return self._store.events.read(self.resolve(namespace, build_id), after, int(block_seconds * 1000))

    def reproduction_of_cell(self, namespace: str, build_id: str, identifier: str) -> ReproductionDocument:
        """Return `JobViews.reproduction` of a cell's job; if the store no longer has it, from its build's documents.

        Raises NotFound, also for a cell that was a hit when it was planned: its artifact has a reproduction.
        """
        build_id = self.resolve(namespace, build_id)
        cell = next((cell for cell in self.cells(namespace, build_id) if cell["identifier"] == identifier), None)
        if cell is None:
            raise NotFound(f"no cell {identifier} in build {build_id}")
        if cell["job"] and self._store.jobs.get(cell["job"]):
            return self._jobs.reproduction(namespace, cell["job"])
        planned = next(row for row in self.read_plan(namespace, build_id)["cells"] if row["identifier"] == identifier)
        if planned["order"] is None:
            raise NotFound(f"{identifier} existed before build {build_id}", hint=f"`farm reproduce {cell['key']}`")
        attempt = Attempt(
            cell["job"] or "",
            cell["attempt"],
            token="",
            order=planned["order"],
            limits=planned["limits"],
            namespace=namespace,
            key=cell["key"],
            build=build_id,
            worker=cell["worker"] or "",
        )
        return self._jobs.described(attempt, cell)

    def live_report(self, namespace: str, build_id: str) -> Report | None:
        """Return a build with its cells as the store has them; None if the store has lost it or some of them."""
        row = self._live(namespace, build_id)
        if row is None:
            return None
        planned = self._plan(namespace, build_id)
        known, cells = self._judged(build_id, planned)
        if known < row["accepted"]:
            return None  # The store lost them since it answered about the build.
        verdict = verdict_of(cells)
        build = _build_document(row, self.follower(build_id))
        build |= {"counts": verdict["counts"], "verdict": verdict if row["state"] != "open" else None}
        build["outlook"] = self.outlook(cells, row["max_parallel"], paused=build_id if row["paused"] else "")
        report = Report(schema=1, build=build, cells=cells, sweeps=sweeps_of(cells), changes=changes_of(cells))
        if shadow := planned.document.get("shadow"):
            report["shadow"] = shadow
        return report

    def running(self, namespace: str, build_id: str) -> Identifiers:
        """Return the identifiers of a build's running cells."""
        row = self._live(namespace, build_id)
        states = self._store.builds.states(build_id) if row else {}
        return [name for name, state in states.items() if state == State.RUNNING]

    def accepted(self, namespace: str, build_id: str, total: int, count: int) -> Identifiers:
        """Return the identifiers of the `count` cells that were accepted last, when `total` were there."""
        return [cell["identifier"] for cell in self.read_plan(namespace, build_id)["cells"][total - count : total]]

    def some_cells(self, namespace: str, build_id: str, identifiers: Sequence[str]) -> JudgedCells:
        """Return these cells of a build, judged, as far as the store has them."""
        if not identifiers:
            return []
        return self._judged(build_id, self._plan(namespace, build_id), identifiers)[1]

    def _judged(self, build_id: str, plan: _KnownPlan, only: Sequence[str] | None = None) -> tuple[int, JudgedCells]:
        """Return how many cells the store has, and all of a plan, judged; or those in `only` that the store has."""
        rows = {row["identifier"]: row for row in self._store.builds.cells(build_id, only)}
        names = plan.place if only is None else rows
        cells = [judge_cell(plan.document["cells"][plan.place[name]], rows.get(name)) for name in names]
        self._explain(cells)
        return len(rows), cells

    def lines(self, namespace: str, build_id: str) -> EndedCells:
        """Return a build with its cells in short. Raises NotFound.

        The cells of an open build are judged some at a time: the report of a large one would take a gigabyte of memory.
        """
        build_id = self.resolve(namespace, build_id)
        row = self._live(namespace, build_id)
        unjudged = self.unjudged_lines(namespace, build_id)
        if row is None or unjudged is None:
            if found := self._index.cells(namespace, build_id, CellLine):
                return EndedCells(*found)
            report = self.report(namespace, build_id)
            if report["build"]["state"] == "reported":
                return self._index.add(report)
            return EndedCells(report["build"], list(map(CellLine.of, report["cells"])))
        build, cells = unjudged
        planned, jobs = self._plan(namespace, build_id), self._store.builds.jobs(build_id)
        cells = [cell._replace(job=jobs.get(cell.identifier, "")) for cell in cells]
        waiting = [cell.identifier for cell in cells if cell.look == "queued"]
        under_way = [cell.identifier for cell in cells if cell.look != "queued"]
        times: dict[str, tuple[str, float | None, float]] = {}
        for some in lots([*under_way, *waiting[:EXPLAINED]], JUDGED_AT_ONCE):
            for cell in self.some_cells(namespace, build_id, some):
                cells[planned.place[cell["identifier"]]] = CellLine.of(cell)
                times[cell["identifier"]] = (cell["state"], cell["elapsed"], cell["spent"])
        work = _work(planned.document["cells"], cells, times)
        build["outlook"] = self.outlook(work, row["max_parallel"], paused=build_id if row["paused"] else "")
        return EndedCells(build, cells)

    def ends(self, namespace: str, build_id: str) -> tuple[BuildView, Sequence[CellEnd]]:
        """Return a build with how its cells ended. Raises NotFound."""
        if found := self._index.cells(namespace, build_id, CellEnd):
            return found
        build, cells = self.lines(namespace, build_id)
        return build, list(map(CellEnd.of, cells))

    def unjudged_lines(self, namespace: str, build_id: str) -> EndedCells | None:
        """Return an open build with its cells as the store has them, before any is judged; None for others."""
        row = self._live(namespace, build_id)
        if row is None or row["state"] == "reported":
            return None
        states = self._store.builds.states(build_id)
        if len(states) < row["accepted"]:
            return None  # The store lost them since it answered about the build.
        cells = [
            CellLine.planned(cell, states.get(cell["identifier"], State.QUEUED))
            for cell in self.read_plan(namespace, build_id)["cells"]
        ]
        return EndedCells(_build_document(row, self.follower(build_id)), cells)

    def read_plan(self, namespace: str, build_id: str) -> PlanDocument:
        """Return a build's plan. Raises NotFound."""
        return self._plan(namespace, build_id).document

    def keep_plan(self, document: PlanDocument) -> None:
        """Keep a plan in memory, and forget those that were not used for long: large ones take long to read."""
        build = document["build"]
        kept = _KnownPlan(document, {cell["identifier"]: place for place, cell in enumerate(document["cells"])})
        plans = {**self._plans, (build["namespace"], build["id"]): kept}
        while len(plans) > 1 and sum(len(plan.place) for plan in plans.values()) > PLANS:
            plans.pop(next(iter(plans)))
        self._plans = plans

    def current_outlook(self, namespace: str, build_id: str) -> OutlookDocument | None:
        """Return when the current workers are expected to finish a build; None if the store has lost it."""
        report = self.live_report(namespace, build_id)
        return report["build"].get("outlook") if report else None

    def pauses(self, namespace: str, build_id: str) -> frozenset[str]:
        """Return what is paused now: pools, and the build itself."""
        row = self._live(namespace, build_id)
        return frozenset({*self._store.workers.paused_pools(), *([build_id] if row and row["paused"] else [])})

    def read_report(self, namespace: str, build_id: str) -> Report | None:
        """Return a finished build's report from object storage, if it is readable."""
        found = self._artifacts.get_object(build_key(namespace, build_id, "report.json"))
        if found is None:
            return None
        try:
            read = from_json(found.data)
            read["build"]["verdict"]["exit_code"]
            report: Report = read
        except (ValueError, KeyError, TypeError) as error:
            log.warning("report unreadable", key=found.key, error=repr(error))
            return None
        return report

    def outlook(self, cells: Iterable[EstimatedCell], parallel: int | None, *, paused: str = "") -> OutlookDocument:
        """Return when the current workers are expected to finish these cells; `paused` is the build's id if it is."""
        return outlook(cells, self._store.workers.pools(), paused=paused, parallel=parallel)

    def follower(self, build_id: str) -> str | None:
        """Return the id of a build's follow-up, if it was submitted."""
        follower = self._artifacts.build_id_of("follow-up", build_id)
        return follower if self._store.builds.get(follower) else None

    def _live(self, namespace: str, build_id: str) -> BuildRow | None:
        """Return a build from the store, unless another namespace has it: clients choose the ids."""
        row = self._store.builds.get(build_id)
        return row if row and row["namespace"] == namespace else None

    def _stored_report(self, namespace: str, build_id: str) -> Report:
        report = self.read_report(namespace, build_id)
        if report:
            return report
        if self._artifacts.get_object(open_key(namespace, build_id)):
            hint = "the control plane restores it within seconds"
            raise StoreUnavailable(f"the store lost build {build_id}, but object storage has it", hint=hint)
        raise NotFound(f"build {build_id} was not accepted", hint="submit it again")

    def _plan(self, namespace: str, build_id: str) -> _KnownPlan:
        if known := self._plans.get((namespace, build_id)):
            return known
        found = self._artifacts.get_object(build_key(namespace, build_id, "plan.json"))
        if found is None:
            hint = "it is kept for `keep_days` after the build's end; submit the manifest again"
            raise NotFound(f"build {build_id} has no plan in object storage", hint=hint)
        self.keep_plan(from_json(found.data, cache_strings="all"))
        return self._plans[namespace, build_id]

    def _explain(self, cells: Iterable[JudgedCell]) -> None:
        """Say why cells wait: the first queued ones, and running ones that stand still."""
        queued: JudgedCells = []
        for cell in cells:
            if cell["state"] == State.QUEUED and len(queued) < EXPLAINED:
                queued.append(cell)
            elif cell["state"] == State.RUNNING and cell["detail"].startswith(
                (WAITS_FOR_STORAGE, WAITS_FOR_TURN, PAUSED)
            ):
                cell["waiting"] = f"on {cell['worker']}: {cell['detail']}"
        explained = self._store.jobs.explain([cell["job"] or "" for cell in queued]) if queued else []
        for cell, facts in zip(queued, explained, strict=True):
            cell["waiting"] = self._waiting(cell, facts)

    def _waiting(self, cell: JudgedCell, facts: WaitReasons | None) -> str:
        """Return one sentence: why a queued cell waits, and how its last attempt ended, if there was one."""
        if facts is None:
            return "the farm is still accepting the build"
        pool, name, then = cell["pool"], facts["paused"], facts["delayed_until"]
        ahead, slots = facts["ahead"], facts["slots"]
        reasons = [
            (name, f"{name} is paused; `farm resume {name}` resumes it"),
            (not facts["live_workers"], f"no live worker serves {pool}"),
            (facts["resting"], f"{facts['resting']}"),
            (then, f"tries again in {max(0.0, (then or 0.0) - self._store.now()):.0f} s"),
            (facts["bounded_by"], f"build {facts['bounded_by']} already runs as many as its max-parallel"),
            (facts["handed_out"], "handed out; the next free slot takes it"),
            (True, f"{ahead} job{'s' * (ahead != 1)} ahead for {slots} slot{'s' * (slots != 1)} of {pool}"),
        ]
        return next(reason for holds, reason in reasons if holds) + _after(facts["before"])


def is_aside(build: Mapping[str, object]) -> bool:
    """Whether a build was not submitted by a manifest: it follows another build, or is the shadow of a ref."""
    return bool(build.get("follows") or build.get("shadows"))


class _KnownPlan(NamedTuple):
    document: PlanDocument
    place: Mapping[str, int]  # The place of each cell in the order of the manifest, by its identifier.


def _work(
    planned: Sequence[CellPlan], cells: Sequence[CellLine], known: Mapping[str, tuple[str, float | None, float]]
) -> Iterator[EstimatedCell]:
    """Yield what an outlook needs of cells: those that nobody judged yet wait."""
    for cell, line in zip(planned, cells, strict=True):
        state, elapsed, spent = known.get(line.identifier, (State.QUEUED, None, 0.0))
        part = {"state": state, "job": line.job, "key": cell["key"], "pool": cell["pool"]}
        more = {"estimate": cell.get("estimate"), "elapsed": elapsed, "spent": spent}
        yield cast(EstimatedCell, {**part, **more})


def _has(row: BuildView, label: str) -> bool:
    key, _, value = label.partition("=")
    found = str((row.get("labels") or {}).get(key, ""))
    return bool(found) and (found == value or (key == "commit" and len(value) > 6 and found.startswith(value)))


def _after(attempt: AttemptView | None) -> str:
    """Return the end of the previous attempt as the second half of a sentence."""
    if attempt is None:
        return ""
    who = attempt["worker"]
    match attempt["end"]:
        case AttemptEnd.FAILED:
            how = f"failed: {attempt['kind']}: {attempt['message']}"
        case AttemptEnd.RELEASED:
            how = f"was given back: {attempt['message'] or f'{who} stops'}"
        case _:
            how = f"was lost: {attempt['message'] or who}"
    return f"; attempt {attempt['number']} {how}"


def _build_document(row: BuildRow, followed_by: str | None = None) -> BuildView:
    """Return a build as people and scripts see it; once it has a verdict, with the verdict's counts."""
    counts = row["verdict"]["counts"] if row["verdict"] else {"hits": row.get("hits", 0), **row["counts"]}
    known = {**dict.fromkeys(("created_by", "follows", "retries")), "warnings": [], **row}
    known.pop("plan", None)  # It answers a submission.
    return view_of(BuildView, {**known, "followed_by": followed_by, "counts": counts})


AT_ONCE = 50  # Most cells of one change, and most events that it covers: a reader that is cut off repeats no more.

OUTLOOK_REST = 200  # An estimate of the end looks at all cells; the next comes after so many times its duration.


class BuildChanges:
    """The changes of one build for one reader, who knows everything up to `position`.

    An empty position stands for a reader who knows nothing. Such a reader, and one whose position the store does not
    know, first gets a change of type `reset`, reads the whole report, and then follows the changes.
    """

    def __init__(self, reader: BuildReader, namespace: str, build_id: str, position: str | None) -> None:
        self._reader = reader
        self._key = namespace, build_id
        self._position = position or "none"
        self._running: dict[str, tuple[object, ...]] = {}  # How far each running cell was when it was last sent.
        self._estimate_from = 0.0
        self._pauses: frozenset[str] | None = None  # What was paused at the last look; None before the first one.

    def after(self, seconds: float) -> Iterator[BuildChange]:
        """Yield the next changes; wait up to `seconds` for the first event."""
        if self._pauses is None:
            self._look()
        found = self._reader.events(*self._key, self._position, seconds)
        for lot in lots(found["items"], AT_ONCE):
            last = lot[-1]
            if last["type"] == "reset":
                self._look()
                yield {"type": "reset", "id": last["id"]}
            else:
                yield from self._changed(lot)
                if last["type"] == "build" and last.get("state") == "reported":
                    yield {"type": "build", "id": last["id"], "state": "reported"}
            self._position = last["id"]
        # A phase has an event, but not what happens within it.
        before = dict(self._running)
        cells = [cell for cell in self._cells(list(before)) if _progress_of(cell) != before[cell["identifier"]]]
        for some in lots(cells, AT_ONCE):
            yield {"type": "cells", "cells": some}
        # Nothing else may happen for long when something was paused or resumed.
        pauses, self._pauses = self._pauses, self._reader.pauses(*self._key)
        if self._pauses != pauses and (estimate := self._reader.current_outlook(*self._key)):
            yield {"type": "cells", "cells": [], "outlook": estimate}

    def _look(self) -> None:
        """Find the running cells of a reader who may know them already."""
        self._running = dict.fromkeys(self._reader.running(*self._key), ())
        self._pauses = self._reader.pauses(*self._key)

    def _changed(self, events: Sequence[BuildEvent]) -> Iterator[BuildChange]:
        """Yield the cells that these events name; the last change has the last event's id."""
        names = dict.fromkeys(name for event in events for name in self._names(event))
        parts = list(lots(names, AT_ONCE))
        for number, lot in enumerate(parts, 1):
            change: BuildChange = {"type": "cells", "cells": self._cells(lot)}
            if number == len(parts):
                change["id"] = events[-1]["id"]
                if (began := monotonic()) >= self._estimate_from:
                    if estimate := self._reader.current_outlook(*self._key):
                        change["outlook"] = estimate
                    self._estimate_from = monotonic() + OUTLOOK_REST * (monotonic() - began)
            yield change

    def _names(self, event: BuildEvent) -> Iterable[str]:
        if "identifier" in event:
            return (event["identifier"],)
        if event["type"] == "accepted":
            return self._reader.accepted(*self._key, event["accepted"], event["cells"])
        return ()

    def _cells(self, names: Sequence[str]) -> list[JudgedCell]:
        cells = self._reader.some_cells(*self._key, names)
        for cell in cells:
            if cell["state"] == State.RUNNING:
                self._running[cell["identifier"]] = _progress_of(cell)
            else:
                self._running.pop(cell["identifier"], None)
        return cells


def _progress_of(cell: JudgedCell) -> tuple[object, ...]:
    return cell["attempt"], cell["phase"], cell["progress"], cell["detail"]
