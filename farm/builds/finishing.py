"""Finish builds: write the report, move `latest` to the cells that passed, submit background tuning."""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from farm.artifacts import build_key, open_key
from farm.artifacts.refs import Refs, SnapshotCell
from farm.artifacts.s3 import S3Store
from farm.builds import large_builds
from farm.builds.cell_history import CellHistory
from farm.builds.follow_up import background_cells, follow_up_id, is_proven, plan_follow_up
from farm.builds.known import KnownArtifacts
from farm.builds.latest import LATEST, given_up, submitted
from farm.builds.reading import BuildReader
from farm.builds.service import BuildService
from farm.errors import Conflict, FarmError, FarmFault, NotFound, UsageError
from farm.logging import get_logger
from farm.matrix.planned import CellPlan, PlanDocument
from farm.metrics.instruments import BUILDS_ENDED, CELLS_ENDED
from farm.results import junit
from farm.results.naming import has_passed, named_cell, named_cells
from farm.results.report import JudgedCell, Report
from farm.results.sweep import draw
from farm.signing.notary import THREADS, GatesFound, Notary
from farm.store import Store
from farm.webhooks.hooks import Webhooks

log = get_logger(__name__)


class BuildFinisher:
    """Finishes builds that have ended."""

    def __init__(
        self,
        store: Store,
        artifacts: S3Store,
        *,
        builds: BuildService,
        reader: BuildReader,
        known: KnownArtifacts,
        history: CellHistory,
        webhooks: Webhooks,
        notary: Notary | None = None,
    ) -> None:
        self._store = store
        self._artifacts = artifacts
        self._builds = builds
        self._reader = reader
        self._known = known
        self._history = history
        self._webhooks = webhooks
        self._refs = Refs(artifacts)
        self._notary = notary

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
        if len(report["cells"]) >= large_builds.LARGE:
            self._reader.large.add_ended(report)
        try:
            self._history.add(report)
        except FarmFault as error:
            log.warning("a report is not in the history yet", build=build_id, error=error.message)
        self._webhooks.tell(namespace, "build.finished", build_id, _told(report))
        self._builds.let_go(namespace, build_id, report)
        verdict = report["build"]["verdict"]
        log.info("build finished", build=build_id, verdict=verdict["text"] if verdict else "")

    def _write_report(self, namespace: str, build_id: str) -> Report | None:
        """Finish an ended build and write its report last; return the report that counts.

        None if the store has lost the build meanwhile.
        """
        report = self._reader.live_report(namespace, build_id)
        if report is None:
            return None
        report["build"]["state"] = "reported"
        self._artifacts.put_object(build_key(namespace, build_id, "junit.xml"), junit.render(report).encode())
        self._draw(namespace, report)
        passed = [cell for cell in report["cells"] if has_passed(cell)]
        self._sign(namespace, build_id, passed)
        if report["build"].get("shadows"):
            pass  # Only `promote` names what it made.
        elif passed and report["build"]["follows"]:
            self._replace_slower(namespace, build_id, passed)
        elif passed:
            self._name_latest(namespace, build_id, passed)
        report["build"]["followed_by"] = self._reader.follower(build_id)
        key, data = build_key(namespace, build_id, "report.json"), json.dumps(report).encode()
        try:
            self._artifacts.put_object(key, data, create=True)
        except Conflict:
            if first := self._reader.read_report(namespace, build_id):  # Another control plane was faster.
                return first
            self._artifacts.put_object(key, data)
        _count(report)
        return report

    def _sign(self, namespace: str, build_id: str, passed: Sequence[JudgedCell]) -> None:
        """Sign what the build's gates made of the cells that passed them, if this server has a key."""
        notary = self._notary
        if notary is None:
            return

        def sign(cell: JudgedCell) -> None:
            if facts := cell["facts"]:
                gates = GatesFound(cell["gate"]["tolerance"], cell.get("compared", []))
                notary.attest_gates(self._artifacts, namespace, build_id, facts, gates)

        with ThreadPoolExecutor(THREADS) as threads:
            list(threads.map(sign, passed))

    def _name_latest(self, namespace: str, build_id: str, passed: Sequence[JudgedCell]) -> None:
        """Move `latest` to the cells that passed, or that a follow-up has shown to be faster; submit the follow-up."""
        planned = self._reader.read_plan(namespace, build_id)
        behind = background_cells(planned["cells"], passed)
        known = self._known.facts(namespace, [cell["key"] for cell in behind])
        proven = {
            cell["identifier"]: known[cell["key"]]
            for cell in behind
            if cell["key"] in known and cell["order"] and is_proven(known[cell["key"]], cell["order"]["against"])
        }
        named = [
            named_cell(planned["build"]["name"], submitted(planned["build"]), cell, facts)
            for cell in passed
            if (facts := proven.get(cell["identifier"], cell["facts"]))
        ]
        self._refs.add_cells(namespace, LATEST, named, drop=given_up(planned, passed))
        if missing := [cell for cell in behind if cell["key"] not in known]:
            self._follow_up(planned, missing)

    def _follow_up(self, planned: PlanDocument, missing: Sequence[CellPlan]) -> None:
        """Submit a build's follow-up with these cells, or accept a recorded one that was refused before."""
        namespace, build_id = planned["build"]["namespace"], planned["build"]["id"]
        follower = follow_up_id(build_id)
        if self._reader.read_report(namespace, follower):
            return
        try:
            if not self._artifacts.get_object(open_key(namespace, follower)):
                manifest = self._artifacts.get_object(build_key(namespace, build_id, "manifest.yaml"))
                self._builds.accept(
                    plan_follow_up(planned, missing, self._store.now()), manifest.data if manifest else b""
                )
                log.info("background tuning submitted", build=follower, follows=build_id, cells=len(missing))
            elif not self._builds.is_whole(follower):
                self._builds.resume_one(namespace, follower)
        except FarmFault:
            raise  # The build's end is repeated.
        except FarmError as error:
            log.error("no background tuning", build=follower, follows=build_id, error=error.message)

    def _replace_slower(self, namespace: str, build_id: str, passed: Sequence[JudgedCell]) -> None:
        """Replace programs in `latest` by a follow-up's programs that were shown to be faster."""
        build = self._reader.read_plan(namespace, build_id)["build"]
        faster = [
            (against["key"], named_cell(build["name"], submitted(build), cell, facts))
            for cell in passed
            if (facts := cell["facts"]) and (against := facts.get("against")) and is_proven(facts, against["key"])
        ]
        if faster:
            self._refs.replace_cells(namespace, LATEST, faster)

    def _draw(self, namespace: str, report: Report) -> None:
        """Store a picture of the build's sweeps next to its report."""
        if report["sweeps"]:
            try:
                picture = draw(report["sweeps"], report["build"]["name"])
            except UsageError as error:
                log.warning("sweep not drawn", build=report["build"]["id"], error=error.message, hint=error.hint)
                return
            key = build_key(namespace, report["build"]["id"], "sweep.svg")
            self._artifacts.put_object(key, picture, content_type="image/svg+xml")

    def snapshot(self, namespace: str, build_id: str) -> list[SnapshotCell]:
        """Return the cells of a finished build that passed, as a ref names them.

        Raises NotFound without such a build, Conflict if it has not ended, NotFound if none of its cells passed.
        """
        report = self._reader.report(namespace, build_id)
        build = report["build"]
        if build["state"] != "reported":
            raise Conflict(f"build {build['id']} has not ended", hint="wait with `farm watch`")
        named = named_cells(report)
        if not named:
            why = build["verdict"]["text"] if build["verdict"] else "it has none"
            raise NotFound(f"no cell of build {build['id']} passed: {why}")
        return named


def _count(report: Report) -> None:
    for cell in report["cells"]:
        CELLS_ENDED.labels(cell["state"], cell["kind"] or "").inc()
    verdict = report["build"]["verdict"]
    BUILDS_ENDED.labels(str(verdict["exit_code"] if verdict else 0)).inc()


def _told(report: Report) -> dict[str, object]:
    """Return what webhooks get of a build: what a list of builds has, and the path of its page."""
    build = report["build"]
    hidden = ("state", "paused", "outlook")
    shown: dict[str, object] = {name: value for name, value in build.items() if name not in hidden}
    return {**shown, "page": f"/ui/ns/{build['namespace']}/builds/{build['id']}"}
