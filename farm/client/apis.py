"""What a client asks a farm besides its builds and artifacts: one class a topic, such as `client.workers`."""

from __future__ import annotations

import contextlib
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

from farm.client.conformity import conforming, parsed
from farm.client.former_names import FormerList
from farm.client.paths import build_named, database_named, named
from farm.client.submitted import SubmittedBuild
from farm.client.topic import Api
from farm.errors import Conflict, InputsMissing, NotFound, UsageError

if TYPE_CHECKING:
    from farm.artifacts.ownership import Collected
    from farm.artifacts.refs import RefView
    from farm.artifacts.tokens import TokenDocument
    from farm.client.client import Frozen
    from farm.client.transfers import OnUpload
    from farm.jobs.order import ChosenGates
    from farm.jobs.rows import AuditLine, JobView, PoolView, ReproductionDocument, ToolchainLine, WorkerView
    from farm.matrix.planned import ShownPlan
    from farm.matrix.stored import ShownManifest, StoredManifest
    from farm.results.radar import RadarDocument
    from farm.results.report import BuildView
    from farm.settings import Settings
    from farm.tuning.records import TuningDatabaseView, TuningImported, TuningMerged, TuningPruned, TuningStats
    from farm.webhooks.hooks import DeliveryView, WebhookView

AUDIT_SILENCE = 600.0
"""Seconds that the farm may take to read all documents without finding anything."""

LARGEST_SNAPSHOT = 2 << 30
"""Bytes of a tuning database, as text."""


class ToolchainsApi(Api):
    """The toolchains of each target, and what a ref gives readers of them."""

    def all(self, ref: str = "prod") -> list[ToolchainLine]:
        """Return the toolchains of each target, the oldest first, with what a ref names of them."""
        from farm.jobs.rows import ToolchainLine

        return self._transport.items("/v1/toolchains", ToolchainLine, ref=ref)

    def shadow(
        self,
        ref: str = "prod",
        toolchain: str = "",
        *,
        cells: Sequence[str] = (),
        gates: ChosenGates | None = None,
        against: str = "",
        defaults: bool = True,
        new_id: str = "",
    ) -> BuildView:
        """Create a build that compiles what a ref names under another toolchain, and return it. It moves no ref.

        `toolchain` is the start of its id; without it, it is the newest that has a worker. `cells` are patterns of
        identifiers (all if there are none), `gates` are laid over those that the cells have, `against` is an ended
        build to compare with in place of the ref. Without `defaults` only `gates` count, not those of the manifest.

        Raises NotFound if no such toolchain is known.
        """
        from farm.client.client import new_build_id
        from farm.results.report import BuildView

        body = {
            "build_id": new_id or new_build_id(),
            "ref": ref,
            "toolchain": toolchain,
            "cells": list(cells),
            "gates": gates,
            "against": against,
            "defaults": defaults,
        }
        return self._transport.post("/v1/toolchains/shadows", BuildView, body, timeout=300.0)

    def radar(self, build_id: str) -> RadarDocument:
        """Return what a shadow build found. Raises NotFound for a build that is none."""
        from farm.results.radar import RadarDocument

        return self._transport.get(f"/v1/builds/{build_named(build_id)}/radar", RadarDocument)

    def promote(self, build_id: str, *, force: bool = False) -> RefView:
        """Let the ref of a shadow build give readers its programs, and return the ref.

        Raises GateFailed if something speaks against it, unless `force` is set; Conflict if the ref has moved since.
        """
        from farm.artifacts.refs import RefView
        from farm.results.report import BuildView

        whole_id = self._transport.get(f"/v1/builds/{build_named(build_id)}", BuildView)["id"]
        return self._transport.post("/v1/toolchains/promote", RefView, {"build_id": whole_id, "force": force})

    def roll_back(self, ref: str = "prod", toolchain: str = "", *, generation: int | None = None) -> RefView:
        """Let a ref give readers the programs of a toolchain that it has kept, by default the one before.

        With `generation` only if the ref has that one. Raises NotFound, Conflict.
        """
        from farm.artifacts.refs import RefView

        before = None if toolchain else self._client.refs.get(ref)
        if before and generation is None:
            # Else a request that is repeated, because its answer was lost, would swap the programs again.
            generation = before["generation"]
        query = "" if generation is None else f"?generation={generation}"
        body = {"ref": ref, "toolchain": toolchain}
        try:
            return self._transport.post(f"/v1/toolchains/rollback{query}", RefView, body)
        except Conflict:
            if not before:
                raise
            now, swapped = self._client.refs.get(ref), (generation, before["snapshot"], before["cells"].keys())
            if (now["generation"] - 1, now["previous"], now["cells"].keys()) != swapped:
                raise
            return now  # It was us: the answer to the first request was lost.


class ManifestsApi(Api):
    """The stored manifests of the namespace."""

    def all(self) -> list[StoredManifest]:
        """Return the stored manifests of the namespace."""
        from farm.matrix.stored import StoredManifest

        return self._transport.items("/v1/manifests", StoredManifest)

    def get(self, name: str, version: int | None = None) -> ShownManifest:
        """Return a stored manifest with the content of a version, by default of the newest. Raises NotFound."""
        from farm.matrix.stored import ShownManifest

        return self._transport.get(_manifest(name), ShownManifest, **_version(version))

    def push(self, frozen: Frozen, *, version: int | None = None, progress: OnUpload | None = None) -> StoredManifest:
        """Store a manifest under its own name, upload what the farm lacks, and return it with its versions.

        With `version` only if that is the newest one (0: if there is none). Raises Conflict if it is not.
        """
        from farm.manifest import parse_manifest
        from farm.matrix.stored import StoredManifest

        content = {name: value for name, value in frozen.submission.items() if name != "build_id"}
        path = f"/v1/manifests/{parse_manifest(frozen.submission['manifest'], frozen.submission['file']).name}"

        def push() -> StoredManifest:
            return self._transport.ask(
                "PUT", path, StoredManifest, json=content, params=_version(version), timeout=300.0
            )

        try:
            return push()
        except InputsMissing as error:
            self._client.upload(frozen.files_of(error.blobs), progress)
        return push()

    def remove(self, name: str, *, version: int | None = None) -> None:
        """Remove a stored manifest with all versions; with `version` only if that is the newest. Raises NotFound."""
        self.get(name)
        with contextlib.suppress(NotFound):  # Removed meanwhile, perhaps by our first request, whose answer was lost.
            self._transport.request("DELETE", _manifest(name), params=_version(version))

    def build(
        self,
        name: str,
        *,
        version: int | None = None,
        labels: Mapping[str, str] | None = None,
        gates: ChosenGates | None = None,
        key: str = "",
    ) -> SubmittedBuild:
        """Build a stored manifest and return the build. The same `key` again is answered with the same build.

        Raises NotFound, and Conflict if the key was used for another wish.
        """
        from farm.results.report import BuildView

        body = {"version": version, "labels": dict(labels or {}), "gates": gates}
        headers = {"Idempotency-Key": key or secrets.token_hex(16)}
        found = self._transport.post(f"{_manifest(name)}/builds", BuildView, body, headers=headers, timeout=300.0)
        return SubmittedBuild(self._client, found)

    def plan(
        self,
        name: str,
        *,
        version: int | None = None,
        labels: Mapping[str, str] | None = None,
        gates: ChosenGates | None = None,
    ) -> ShownPlan:
        """Return what `build` would do now; as `FarmClient.plan`. Raises NotFound."""
        from farm.matrix.planned import ShownPlan

        body = {"version": version, "labels": dict(labels or {}), "gates": gates}
        return self._transport.post(f"{_manifest(name)}/plan", ShownPlan, body, timeout=300.0)


class JobsApi(Api):
    """Jobs: compiles, each of which may serve several cells."""

    def get(self, job_id: str) -> JobView:
        """Return a job with its attempts."""
        from farm.jobs.rows import JobView

        return self._transport.get(f"/v1/jobs/{named('job', job_id)}", JobView)

    def log(self, job_id: str) -> bytes:
        """Return a job's log: its last part while it runs, the whole after that."""
        return self._transport.request("GET", f"/v1/jobs/{named('job', job_id)}/log").content

    def reproduction(self, name: str, cell: str = "") -> ReproductionDocument:
        """Return what reruns the last attempt of a job, or of a build's cell, or the one that made a key's artifact.

        `name` is the job, the build (with the identifier of its `cell`) or the cache key. Raises NotFound.
        """
        from farm.jobs.rows import ReproductionDocument

        if cell:
            path = f"/v1/builds/{build_named(name)}/reproduction"
            return self._transport.get(path, ReproductionDocument, cell=cell)
        if not re.fullmatch(r"[0-9a-f]{64}", name):
            return self._transport.get(f"/v1/jobs/{named('job', name)}/reproduction", ReproductionDocument)
        return self._client.artifacts.work_order(self._client.artifacts.get(name))

    def reproduce(self, name: str, folder: Path, machine: Settings, cell: str = "") -> ReproductionDocument:
        """Write a folder that reruns an attempt (`reproduction`) without the farm, on a machine with these settings.

        Raises UsageError if the folder has other content.
        """
        from farm.client.fetching import into
        from farm.compiling import reproduction

        document = self.reproduction(name, cell)

        with into(folder):
            if any(folder.iterdir()):
                raise UsageError(f"{folder} is not empty", hint="choose another folder")
            reproduction.write(document, folder, reproduction.MachineFile.of(machine), self._client.artifacts.bring)
        return document


class WorkersApi(FormerList):
    """The live workers, and the nodes that they run on."""

    def all(self) -> list[WorkerView]:
        """Return the live workers; `fenced` and `resting` say why one takes no jobs."""
        from farm.jobs.rows import WorkerView

        return self._transport.items("/v1/workers", WorkerView)

    def drain(self, worker: str) -> None:
        """Stop a worker when its running attempts have ended. Raises NotFound."""
        self._transport.request("POST", f"/v1/workers/{named('worker', worker)}/drain")

    def unfence(self, node: str) -> None:
        """Let a fenced node take jobs again, before its health probes do. Raises NotFound."""
        self._transport.request("POST", f"/v1/nodes/{named('node', node)}/unfence")


class PoolsApi(FormerList):
    """Pools: the workers that can compile for one target."""

    def all(self) -> list[PoolView]:
        """Return the pools that the farm has known."""
        from farm.jobs.rows import PoolView

        return self._transport.items("/v1/pools", PoolView)

    def pause(self, name: str) -> None:
        """Hand out nothing of a pool any more. Raises NotFound."""
        self._transport.request("POST", f"/v1/pools/{named('pool', name)}/pause")

    def resume(self, name: str) -> None:
        """Hand out the jobs of a paused pool again. Raises NotFound."""
        self._transport.request("POST", f"/v1/pools/{named('pool', name)}/resume")


class TokensApi(FormerList):
    """The farm's tokens."""

    def all(self) -> list[TokenDocument]:
        """Return the farm's tokens, without their secrets."""
        from farm.artifacts.tokens import TokenDocument

        return self._transport.items("/v1/tokens", TokenDocument)

    def create(self, name: str, role: str, namespace: str, *, max_cells: int = 0) -> str:
        """Make a token and return its secret, which the farm does not keep."""
        from farm.artifacts.tokens import Secret

        new = {"name": name, "role": role, "namespace": namespace, "max_cells": max_cells}
        return self._transport.post("/v1/tokens", Secret, new)["secret"]

    def revoke(self, name: str) -> None:
        """Revoke a token. Raises NotFound."""
        self._transport.request("DELETE", f"/v1/tokens/{named('token', name)}")


class WebhooksApi(Api):
    """The webhooks of the namespace, and what was sent to them."""

    def all(self) -> list[WebhookView]:
        """Return the webhooks of the namespace, without their secrets."""
        from farm.webhooks.hooks import WebhookView

        return self._transport.items("/v1/webhooks", WebhookView)

    def create(self, name: str, url: str, events: Iterable[str] = ("build.finished",)) -> str:
        """Make a webhook and return the secret that signs its messages."""
        from farm.webhooks.hooks import NewWebhookView

        new = {"name": name, "url": url, "events": list(events)}
        return self._transport.post("/v1/webhooks", NewWebhookView, new)["secret"]

    def rotate(self, name: str, overlap: float = 86_400.0) -> str:
        """Give a webhook a new secret and return it; the one before signs for `overlap` seconds more, too.

        Raises NotFound, Conflict if too many secrets would sign at once.
        """
        from farm.webhooks.hooks import NewWebhookView

        return self._transport.post(f"{_webhook(name)}/rotate", NewWebhookView, {"overlap": overlap})["secret"]

    def remove(self, name: str) -> None:
        """Remove a webhook with its log. Raises NotFound."""
        self._transport.request("DELETE", _webhook(name))

    def deliveries(self, name: str, limit: int = 50) -> list[DeliveryView]:
        """Return what was sent to a webhook, the newest first. Raises NotFound."""
        from farm.webhooks.hooks import DeliveryView

        return self._transport.items(f"{_webhook(name)}/deliveries", DeliveryView, limit=limit)

    def replay(self, name: str, message: str) -> DeliveryView:
        """Send a message to a webhook again, with the same id. Raises NotFound."""
        from farm.webhooks.hooks import DeliveryView

        path = f"{_webhook(name)}/deliveries/{named('message', message)}/replay"
        return self._transport.post(path, DeliveryView)


class TuningApi(FormerList):
    """The tuning databases. A database's name is `POOL/DEVICE/MODE`."""

    def all(self) -> list[TuningDatabaseView]:
        """Return the tuning databases, including empty ones."""
        from farm.tuning.records import TuningDatabaseView

        return self._transport.items("/v1/tuning", TuningDatabaseView)

    def snapshot(self, database: str) -> bytes:
        """Return all records of a database as text, for `farm.tuning.text.read`. Raises NotFound."""
        path = f"{_tuning(database)}/snapshot"
        return self._transport.request("GET", path, timeout=300.0, limit=LARGEST_SNAPSHOT).content

    def stats(self, database: str) -> TuningStats:
        """Return what a database holds, and what tuning took and saved, in all and by the day."""
        from farm.tuning.records import TuningStats

        return self._transport.get(f"{_tuning(database)}/stats", TuningStats)

    def add(self, database: str, packed: bytes, *, miopen: str = "") -> TuningImported:
        """Add a packed snapshot (`farm.tuning.text.pack`) to a database; return what came of it."""
        from farm.tuning.records import TuningImported

        return self._transport.ask(
            "POST",
            f"{_tuning(database)}/import",
            TuningImported,
            timeout=300.0,
            content=packed,
            headers={"Content-Type": "application/gzip"},
            params={"miopen": miopen},
        )

    def merge(self, database: str) -> TuningMerged:
        """Bring what attempts committed into a database's head now."""
        from farm.tuning.records import TuningMerged

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
        from farm.tuning.records import TuningPruned

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
        from farm.jobs.rows import AuditLine

        url = self._transport.url
        with self._transport.lines("/v1/audit", timeout=AUDIT_SILENCE, params={"deep": deep}) as lines:
            for line in lines:
                yield conforming(parsed(line, url), AuditLine, url)

    def gc(self, *, dry_run: bool = False) -> Collected:
        """Mark blobs that nothing has named for a day, and delete those that were marked a day ago.

        Returns how many `blobs` and `bytes` were deleted and how many are `marked`; with `dry_run`, of all that nothing
        names.
        """
        from farm.artifacts.ownership import Collected

        return self._transport.post("/v1/gc", Collected, params={"dry_run": dry_run}, timeout=AUDIT_SILENCE)

    def rebuild_history(self) -> int:
        """Make the server's history of cells again from all reports; return how many there are."""
        return self._transport.post("/v1/history/rebuild", _Rebuilt, timeout=AUDIT_SILENCE)["reports"]


class _Rebuilt(TypedDict):
    reports: int


def _manifest(name: str) -> str:
    return f"/v1/manifests/{named('manifest', name)}"


def _version(version: int | None) -> dict[str, int]:
    return {} if version is None else {"version": version}


def _webhook(name: str) -> str:
    return f"/v1/webhooks/{named('webhook', name)}"


def _tuning(database: str) -> str:
    return f"/v1/tuning/{database_named(database)}"
