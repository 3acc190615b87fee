"""Finish builds: write the report, move `latest` to the cells that passed, submit background tuning."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial

from pydantic_core import to_json

from farm.artifacts.refs import Cells, Refs
from farm.artifacts.s3 import S3Store
from farm.artifacts.storage import build_key, open_key
from farm.builds.known_failures import KnownFailures
from farm.builds.past_builds import BuildIndex
from farm.builds.plan import background_cells, plan_follow_up
from farm.builds.planner import KnownArtifacts
from farm.builds.reading import BuildReader
from farm.builds.service import Admission
from farm.errors import Conflict, FarmError, FarmFault, NotFound, UsageError
from farm.logging import get_logger
from farm.matrix.planned import CellPlan, PlanDocument
from farm.metrics.instruments import BUILDS_ENDED, CELLS_ENDED
from farm.results import ref_rules
from farm.results.ref_rules import LATEST, has_passed, is_proven
from farm.results.report import JudgedCell, Report
from farm.results.tradeoff import draw
from farm.results.verdict import changes_of, judge_instead, verdict_of
from farm.store import Store

log = get_logger(__name__)

GRACE = 3600.0  # Seconds after a build's end in which followers still find each event, and late workers their attempts.


@dataclass(eq=False)
class BuildFinisher:
    """Finishes builds that have ended."""

    _store: Store
    _artifacts: S3Store
    _admission: Admission
    _reader: BuildReader
    _known: KnownArtifacts
    _index: BuildIndex
    _known_failures: KnownFailures
    _refs: Refs
    _notify: Callable[[str, Report], object]
    """Calls a hook with a report, perhaps again: `on_judged` before refs name cells, `on_finished` last.

    A FarmFault lets the end be repeated.
    """

    def finish(self, build_id: str) -> None:
        """Write an ended build's report, move `latest` to the cells that passed, and mark the build reported.

        Also submits its background tuning. Every step can be repeated; a build with a report never
        reopens: its verdict stays, and it moves no ref.
        """
        row = self._store.builds.get(build_id)
        if row is None or row["state"] != "ended":
            return
        namespace = row["namespace"]
        report = self._reader.read_report(namespace, build_id) or self._write_report(namespace, build_id)
        if report is None:
            return
        try:
            self._index.add(report)
        except (FarmFault, ValueError, LookupError) as error:
            log.warning("a report is not in the index", build=build_id, error=repr(error))
        self._notify("on_finished", report)
        self._admission.let_go(namespace, build_id, report)
        verdict = report["build"]["verdict"]
        log.info("build finished", build=build_id, verdict=verdict["text"] if verdict else "")

    def pack_reported(self) -> None:
        """Pack the store's records of builds that ended long ago and have a readable report."""
        for namespace, build_id in self._store.builds.unpacked(GRACE):
            if report := self._reader.read_report(namespace, build_id):
                self._store.jobs.pack(build_id, (cell["job"] for cell in report["cells"] if cell["job"]))
                self._store.builds.pack(build_id)

    def _write_report(self, namespace: str, build_id: str) -> Report | None:
        """Finish an ended build, its report last. Return the report that counts; None if the store lost the build."""
        report = self._reader.live_report(namespace, build_id)
        if report is None:
            return None
        report["build"]["state"] = "reported"
        self._draw(namespace, report)
        refused = () if report["build"].get("shadows") else self._hold(namespace, report)
        passed = [cell for cell in report["cells"] if has_passed(cell, refused)]
        self._notify("on_judged", report)
        if report["build"].get("shadows"):
            pass  # Only `promote` names what it made.
        elif passed and report["build"]["follows"]:
            self._replace_slower(namespace, build_id, passed)
        elif passed:
            self._name_latest(namespace, build_id, passed)
        report["build"]["followed_by"] = self._reader.follower(build_id)
        key, data = build_key(namespace, build_id, "report.json"), to_json(report)
        try:
            self._artifacts.put_object(key, data, create=True)
        except Conflict:
            if first := self._reader.read_report(namespace, build_id):  # Another control plane was faster.
                return first
            self._artifacts.put_object(key, data)
        _count(report)
        return report

    def _hold(self, namespace: str, report: Report) -> Collection[str]:
        """Return the cache keys of what gates have refused, and say which cells have one."""
        cells = report["cells"]
        refused = self._known_failures.hold(namespace, report["build"]["id"], cells)
        if any(cell.get("held") for cell in cells):
            report["changes"], report["build"]["verdict"] = changes_of(cells), verdict_of(cells)
        return refused

    def _name_latest(self, namespace: str, build_id: str, passed: Sequence[JudgedCell]) -> None:
        """Move `latest` to the cells that passed, and submit the build's follow-up.

        Where a follow-up has shown a program to be faster, and it passes the gates of this build, `latest` names that.
        """
        planned = self._reader.read_plan(namespace, build_id)
        behind = background_cells(planned["cells"], passed)
        known = self._known.whole(namespace, {cell["key"]: [cell["key"]] for cell in behind})
        by_name = {cell["identifier"]: cell for cell in passed}
        faster = {
            cell["identifier"]: judge_instead(cell, by_name[cell["identifier"]], facts)
            for cell in behind
            if (facts := known.get(cell["key"])) and (order := cell["order"]) and is_proven(facts, order["against"])
        }
        refused = self._known_failures.hold(namespace, build_id, list(faster.values())) if faster else ()
        proven = {name: cell for name, cell in faster.items() if has_passed(cell, refused)}
        build = planned["build"]
        new = ref_rules.entries_of(build, ref_rules.submitted(build), (by_name | proven).values())
        entered = partial(ref_rules.entered, new=new, is_given_up=ref_rules.given_up(planned, passed))
        self._refs.move(namespace, LATEST, entered)
        if missing := [cell for cell in behind if cell["key"] not in known]:
            self._follow_up(planned, missing)

    def _follow_up(self, planned: PlanDocument, missing: Sequence[CellPlan]) -> None:
        """Submit a build's follow-up with these cells, or accept a recorded one that was refused before."""
        namespace, build_id = planned["build"]["namespace"], planned["build"]["id"]
        follower = self._artifacts.build_id_of("follow-up", build_id)
        if self._reader.read_report(namespace, follower):
            return
        try:
            if not self._artifacts.get_object(open_key(namespace, follower)):
                manifest = self._artifacts.get_object(build_key(namespace, build_id, "manifest.yaml"))
                self._admission.accept(
                    plan_follow_up(planned, missing, follower, self._store.next_moment()),
                    manifest.data if manifest else b"",
                )
                log.info("background tuning submitted", build=follower, follows=build_id, cells=len(missing))
            elif not self._admission.is_whole(follower):
                self._admission.resume_one(namespace, follower)
        except FarmFault:
            raise  # The build's end is repeated.
        except FarmError as error:
            log.error("no background tuning", build=follower, follows=build_id, error=error.message)

    def _replace_slower(self, namespace: str, build_id: str, passed: Sequence[JudgedCell]) -> None:
        """Replace programs in `latest` by a follow-up's programs that were shown to be faster."""
        build = self._reader.read_plan(namespace, build_id)["build"]
        faster, slower = list[JudgedCell](), dict[str, str]()
        for cell in passed:
            if (facts := cell["facts"]) and (against := facts.get("against")) and is_proven(facts, against["key"]):
                faster.append(cell)
                slower[cell["identifier"]] = against["key"]
        if faster and self._refs.find(namespace, LATEST):  # Without one it would be empty, and hide that of `main`.
            new = ref_rules.entries_of(build, ref_rules.submitted(build), faster)
            self._refs.move(namespace, LATEST, lambda there: ref_rules.replaced(there, new, slower))

    def _draw(self, namespace: str, report: Report) -> None:
        if report["sweeps"]:
            try:
                picture = draw(report["sweeps"], report["build"]["name"])
            except UsageError as error:
                log.warning("sweep not drawn", build=report["build"]["id"], error=error.message, hint=error.hint)
                return
            key = build_key(namespace, report["build"]["id"], "sweep.svg")
            self._artifacts.put_object(key, picture, content_type="image/svg+xml")

    def snapshot(self, namespace: str, build_id: str) -> Cells:
        """Return the cells of a finished build that passed, as a ref names them.

        Raises NotFound without such a build, Conflict if it has not ended, NotFound if none of its cells passed.
        """
        report = self._reader.report(namespace, build_id)
        build = report["build"]
        if build["state"] != "reported":
            raise Conflict(f"build {build['id']} has not ended", hint="wait with `farm watch`")
        named = ref_rules.passed_entries(report)
        if not named:
            why = build["verdict"]["text"] if build["verdict"] else "it has none"
            raise NotFound(f"no cell of build {build['id']} passed: {why}")
        return named


def _count(report: Report) -> None:
    for (state, kind), cells in Counter((cell["state"], cell["kind"] or "") for cell in report["cells"]).items():
        CELLS_ENDED.labels(state, kind).inc(cells)
    verdict = report["build"]["verdict"]
    BUILDS_ENDED.labels(str(verdict["exit_code"] if verdict else 0)).inc()
