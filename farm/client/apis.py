"""What a client asks a farm besides its builds and artifacts: one class a topic, such as `client.workers`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from farm import entry_points
from farm.artifacts.tokens import Secret, TokenDocument
from farm.client.transport import Api, build_named, database_named, named
from farm.jobs.rows import AuditLine, JobView, PoolView, ReproductionDocument, WorkerView
from farm.results.report import Rebuilt
from farm.tuning.records import TuningDatabaseView, TuningImported, TuningMerged, TuningPruned, TuningStats
from farm.units import by_number
from farm.wire.checking import read

if TYPE_CHECKING:
    from farm.artifacts.inventory import Collected
    from farm.settings import Settings

AUDIT_SILENCE = 600.0  # Seconds that the farm may take to read all documents without finding anything.
LARGEST_SNAPSHOT = 2 << 30  # Bytes of a tuning database, as text.


class JobsApi(Api):
    """Jobs: compiles. Each may serve several cells."""

    def get(self, job_id: str) -> JobView:
        """Return a job with its attempts."""
        return self._transport.get(f"/v1/jobs/{named('job', job_id)}", JobView)

    def log(self, job_id: str) -> bytes:
        """Return a job's log: its last part while it runs, the whole after that."""
        return self._transport.request("GET", f"/v1/jobs/{named('job', job_id)}/log").content

    def reproduction(self, name: str, cell: str = "") -> ReproductionDocument:
        """Return what reruns the last attempt of a job, or of a build's cell, or the one that made a key's artifact.

        `name` is the job, the build (with the identifier of its `cell`) or the cache key. Raises NotFound, Untrusted if
        this client's trust policy refuses the artifact of a key.
        """
        if cell:
            path = f"/v1/builds/{build_named(name)}/reproduction"
            return self._transport.get(path, ReproductionDocument, cell=cell)
        if not re.fullmatch(r"[0-9a-f]{64}", name):
            return self._transport.get(f"/v1/jobs/{named('job', name)}/reproduction", ReproductionDocument)
        signed = self._client.artifacts.signed(name)  # Judged before anything of it is written here.
        return self._client.artifacts.work_order(signed.sidecar if signed else self._client.artifacts.get(name))

    def reproduce(self, name: str, folder: Path, machine: Settings, cell: str = "") -> ReproductionDocument:
        """Write a folder that reruns an attempt (`reproduction`) without the farm, on a machine with these settings.

        Raises UsageError if the folder has other content.
        """
        from farm.client.fetching import into

        document = self.reproduction(name, cell)
        write = entry_points.required(entry_points.REPRODUCERS, "folder")
        with into(folder):
            write(document, folder, machine, self._client.artifacts.bring)
        return document

    def acknowledge(self, cell: str, kind: str, reason: str, until: str, link: str = "") -> None:
        """Expect this failure of a cell in the builds submitted from now on, until a day (ISO); once more is harmless.

        Raises UsageError for what the farm does not take.
        """
        known = {"kind": kind, "reason": reason, "until": until, "link": link}
        self._transport.request("PUT", "/v1/acknowledged", params={"cell": cell}, json=known)

    def forget(self, cell: str) -> None:
        """Expect nothing of a cell any more. Raises NotFound if nothing was acknowledged."""
        self._transport.request("DELETE", "/v1/acknowledged", params={"cell": cell})


class WorkersApi(Api):
    """The live workers, and the nodes that they run on."""

    def all(self) -> list[WorkerView]:
        """Return the live workers; `fenced` and `resting` say why one takes no jobs."""
        return self._transport.items("/v1/workers", WorkerView)

    def troubles(self) -> list[str]:
        """Return what operators have to see to: which node or control plane cannot reach what, and what to do."""
        return self._transport.items("/v1/troubles", str)

    def drain(self, worker: str) -> None:
        """Stop a worker when its running attempts have ended. Raises NotFound."""
        self._transport.request("POST", f"/v1/workers/{named('worker', worker)}/drain")

    def unfence(self, node: str) -> None:
        """Let a fenced node take jobs again, before its health probes do. Raises NotFound."""
        self._transport.request("POST", f"/v1/nodes/{named('node', node)}/unfence")


class PoolsApi(Api):
    """Pools: the workers that can compile for one target."""

    def all(self) -> list[PoolView]:
        """Return the pools that the farm has known."""
        return sorted(self._transport.items("/v1/pools", PoolView), key=lambda pool: by_number(pool["name"]))

    def pause(self, name: str) -> None:
        """Hand out nothing of a pool any more. Raises NotFound."""
        self._transport.request("POST", f"/v1/pools/{named('pool', name)}/pause")

    def resume(self, name: str) -> None:
        """Hand out the jobs of a paused pool again. Raises NotFound."""
        self._transport.request("POST", f"/v1/pools/{named('pool', name)}/resume")


class TokensApi(Api):
    """The farm's tokens."""

    def all(self) -> list[TokenDocument]:
        """Return the farm's tokens, without their secrets."""
        return self._transport.items("/v1/tokens", TokenDocument)

    def create(self, name: str, role: str, namespace: str, *, max_cells: int = 0) -> str:
        """Make a token and return its secret, which the farm does not keep."""
        new = {"name": name, "role": role, "namespace": namespace, "max_cells": max_cells}
        return self._transport.post("/v1/tokens", Secret, new)["secret"]

    def revoke(self, name: str) -> None:
        """Revoke a token. Raises NotFound."""
        self._transport.request("DELETE", f"/v1/tokens/{named('token', name)}")


class TuningApi(Api):
    """The tuning databases. A database's name is `POOL/DEVICE/MODE`."""

    def all(self) -> list[TuningDatabaseView]:
        """Return the tuning databases, including empty ones."""
        return self._transport.items("/v1/tuning", TuningDatabaseView)

    def snapshot(self, database: str) -> bytes:
        """Return all records of a database as text, for `farm.tuning.exchange.read`. Raises NotFound."""
        path = f"{_tuning(database)}/snapshot"
        return self._transport.request("GET", path, timeout=300.0, limit=LARGEST_SNAPSHOT).content

    def stats(self, database: str) -> TuningStats:
        """Return what a database holds, and what tuning took and saved, in all and by the day."""
        return self._transport.get(f"{_tuning(database)}/stats", TuningStats)

    def add(self, database: str, packed: bytes, *, miopen: str = "") -> TuningImported:
        """Add a packed snapshot (`farm.tuning.exchange.pack`) to a database; return what came of it."""
        options = {"content": packed, "headers": {"Content-Type": "application/gzip"}, "params": {"miopen": miopen}}
        return self._transport.post(f"{_tuning(database)}/import", TuningImported, timeout=300.0, **options)

    def merge(self, database: str) -> TuningMerged:
        """Bring what attempts committed into a database's head now."""
        return self._transport.post(f"{_tuning(database)}/merge", TuningMerged, timeout=300.0)

    def prune(
        self,
        database: str,
        *,
        older: float | None = None,
        job: str = "",
        everything: bool = False,
        dry_run: bool = False,
    ) -> TuningPruned:
        """Remove the records that were measured `older` seconds ago or more, or by one job, or everything."""
        params: dict[str, str | bool | float] = {"job": job, "everything": everything, "dry_run": dry_run}
        if older is not None:
            params["older"] = older
        return self._transport.post(f"{_tuning(database)}/prune", TuningPruned, params=params, timeout=300.0)


class UpkeepApi(Api):
    """What an operator of the farm asks for now and then."""

    def audit(self, *, deep: bool = False) -> Iterator[AuditLine]:
        """Yield everything that does not agree in the farm, and the counts last.

        With `deep`, the farm reads and hashes every blob of every artifact.
        """
        with self._transport.lines("/v1/audit", timeout=AUDIT_SILENCE, params={"deep": deep}) as lines:
            for line in lines:
                yield read(line, AuditLine, self._transport.url)

    def gc(self, *, dry_run: bool = False) -> Collected:
        """Mark blobs that nothing has named for a day, and delete those that were marked a day ago.

        Returns how many `blobs` and `bytes` were deleted and how many are `marked`; with `dry_run`, of all that nothing
        names.
        """
        from farm.artifacts.inventory import Collected

        return self._transport.post("/v1/gc", Collected, params={"dry_run": dry_run}, timeout=AUDIT_SILENCE)

    def rebuild_history(self) -> int:
        """Make the server's history of cells again from all reports; return how many there are."""
        return self._transport.post("/v1/history/rebuild", Rebuilt, timeout=AUDIT_SILENCE)["reports"]


def _tuning(database: str) -> str:
    return f"/v1/tuning/{database_named(database)}"
