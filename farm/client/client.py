"""The Python client: the farm over HTTP, with the same verbs as the command line.

    with FarmClient.from_settings(load_settings()) as client:
        report = client.submit(freeze("farm.yaml")).wait()
        print(report["build"]["verdict"]["text"])
        client.fetch("resnet50", "onnxruntime/cpu", "fp16", folder=Path("out"))

Errors are those of `farm.errors`, as the farm raised them. Needs neither Redis, S3 nor Celery.
"""

from __future__ import annotations

import contextlib
import json
import re
import secrets
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, Self, TypedDict, TypeVar, cast

from farm import errors
from farm.client.cache import KeptAnswers, default_cache
from farm.client.conformity import conforming, parsed
from farm.client.downloads import Downloads, OnDownload, WantedBlob
from farm.client.submitted import SubmittedBuild
from farm.client.transport import OlderFarm, Transport, document_of, file_name
from farm.errors import ArtifactGone, Conflict, FarmFault, InputsMissing, NotAllowed, NotFound, Untrusted, UsageError
from farm.files import read_private
from farm.units import by_number

if TYPE_CHECKING:
    import httpx

    from farm.artifacts.ownership import Collected
    from farm.artifacts.refs import RefView, ShownRef, SnapshotCell
    from farm.artifacts.sidecar import SidecarDocument
    from farm.artifacts.storage import Put, Upload
    from farm.artifacts.tokens import TokenDocument
    from farm.client.family import FamilyMember
    from farm.client.fetching import Fetched, FetchedFamily
    from farm.client.verifying import SignedArtifact, Trust
    from farm.jobs.order import ChosenGates
    from farm.jobs.rows import (
        AuditLine,
        BuildEvent,
        JobView,
        PoolView,
        ReproductionDocument,
        ToolchainLine,
        WorkerView,
    )
    from farm.matrix.planned import ShownPlan, SubmissionDocument
    from farm.matrix.stored import ShownManifest, StoredManifest
    from farm.results.radar import RadarDocument
    from farm.results.report import (
        BuildChange,
        BuildView,
        CellDifference,
        Differences,
        JudgedCell,
        PastCell,
        Report,
    )
    from farm.settings import Settings
    from farm.signing.bundles import SignedSidecar
    from farm.signing.judging import TrustCheck
    from farm.spec import FileReference
    from farm.tuning.records import TuningDatabaseView, TuningImported, TuningMerged, TuningPruned, TuningStats
    from farm.webhooks.hooks import DeliveryView, WebhookView

T = TypeVar("T")
OnUpload = Callable[[int, int], None]
"""Called while inputs are uploaded: bytes sent so far, bytes in all."""

FOLLOW_DELAYS = (0.2, 0.5, 1.0, 2.0, 5.0, 5.0, 5.0, 5.0)
"""Seconds between tries to follow a build's events again; after the last one the farm counts as gone."""

SILENCE = 20.0
"""Seconds without a byte after which an event stream is taken for dead; the server sends something every two."""

POLL = 5.0
"""Seconds without a byte after which the state is read instead, once a stream has failed."""

AUDIT_SILENCE = 600.0
"""Seconds that the farm may take to read all documents without finding anything."""

SLOWEST_HASH = 20e6
"""Bytes a second that the farm hashes at least, of a large upload."""

LARGEST_SNAPSHOT = 2 << 30
"""Bytes of a tuning database, as text."""

UPLOADS = 4
BLOBS_AT_ONCE = 1000
PARTS_AT_ONCE = 2000
"""Parts of large blobs that one answer of the farm has room for; it cuts them at 128 MiB, into 1000 at most."""


@dataclass(frozen=True, slots=True)
class Frozen:
    """A manifest with everything that it names read and hashed: what `submit` sends."""

    submission: SubmissionDocument
    files: Mapping[str, Path]
    """Digest of every blob that the submission names, and a local file that has its bytes."""

    @property
    def build_id(self) -> str:
        """The id that the build will have; submitting the same object twice makes one build."""
        return self.submission["build_id"]


def freeze(
    manifest: str | Path | Mapping[str, Any],
    *,
    folder: str | Path | None = None,
    labels: Mapping[str, str] | None = None,
    cache: Path | None = None,
    pythons: Mapping[str, str] | None = None,
    gates: ChosenGates | None = None,
    untrusted: bool = False,
) -> Frozen:
    """Read a manifest with its models and data, as they are now; `cache` is a folder for what has to be kept of them.

    The manifest is a file, or its content as a mapping. Relative paths in it start at `folder`: by default that of the
    file, or the current one.

    `gates` are laid over those of the manifest (`farm.manifest.choice.read_gates` makes them). `pythons` names the
    interpreters that convert models, by extra: `{"torch": …, "tensorflow": …}`; this one if there is none. An
    `untrusted` manifest runs no code and names no file outside its folder (`farm.client.strangers`).

    Raises ManifestError with everything that is wrong, each with its place in the manifest.
    """
    from farm.client.freezing import as_submission
    from farm.client.freezing import freeze as freeze_files
    from farm.client.strangers import refused
    from farm.manifest import load_manifest, manifest_of
    from farm.matrix.cells import check

    if isinstance(manifest, Mapping):
        place = Path(folder or ".")
        read = manifest_of(manifest, place)
    else:
        place = Path(folder or Path(manifest).parent)
        read = load_manifest(manifest, place)
    if untrusted and (problems := refused(read, place)):
        raise errors.ManifestError(problems)
    found = freeze_files(read, place, cache=cache, pythons=pythons)
    if problems := check(read, found.models, found.data):
        raise errors.ManifestError(problems)
    inputs = as_submission(found)
    submission: SubmissionDocument = {
        "build_id": new_build_id(),
        "manifest": read.text,
        "file": read.file,
        "labels": dict(labels or {}),
        "models": inputs["models"],
        "data": inputs["data"],
        "files": inputs["files"],
    }
    if gates:  # An older farm does not know the field.
        submission["gates"] = gates
    return Frozen(submission, found.files)


def new_build_id() -> str:
    """Return an id for a build: clients make them, so that a request that was repeated makes one build."""
    return f"b-{secrets.token_hex(8)}"


class _Event(TypedDict):
    type: str


BUILD = re.compile(r"@latest|(b-)?[0-9a-f]{1,16}")
"""How a build may be named: its id, the start of it, or the latest."""


class FarmClient:
    """A connection to one farm, in one namespace. Use it as a context manager; it may be shared by threads."""

    def __init__(
        self,
        url: str,
        token: str = "",
        *,
        namespace: str = "",
        timeout: float = 30.0,
        cache: Path | None = None,
        trust: Trust | None = None,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        """Connect to the farm at `url`; `timeout` is in seconds and for each answer, not for a whole build.

        Without a `namespace` it is that of the token, for the administrator's `main`. `cache` is a folder that keeps
        what is downloaded. `trust` says whose signatures count; without it none is asked for.
        """
        self._use(Transport(url, token, namespace=namespace, timeout=timeout, transport=transport), cache, trust)
        self.kept = KeptAnswers(cache, f"{self.url} {namespace}", token)

    def _use(self, transport: Transport, cache: Path | None, trust: Trust | None) -> None:
        self._transport = transport
        self.url = transport.url
        self._trust = trust
        self._refreshed = False
        self._downloads = Downloads(cache)
        self.on_download: OnDownload | None = None
        """Called while a blob is downloaded."""

    @classmethod
    def from_settings(cls, settings: Settings, **options: Any) -> Self:
        """Connect to the farm that the settings name, else to the one that `farm up` runs in `data_dir`.

        Raises NotFound if there is neither.
        """
        url, token = settings.api_url, settings.api_token.get_secret_value()
        if not url:
            running = running_farm(settings.data_dir)
            if running is None:
                raise NotFound(
                    f"no farm: api_url is not set, and none runs in {settings.data_dir}",
                    hint="set FARM_API_URL, start one with `farm up`, or use `farm run MANIFEST`",
                )
            url, token = running[0], token or running[1]
        defaults = {"cache": default_cache(), "trust": trust_of(settings)}
        return cls(url, token, namespace=settings.namespace, **{**defaults, **options})

    def when_silent(self, say: Callable[[], object]) -> None:
        """Let `say` be called, from another thread, whenever an answer takes more than a few seconds."""
        self._transport.on_silence = say

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._transport.close()

    # --- builds -------------------------------------------------------------------------------------------------

    def health(self) -> dict[str, str]:
        """Check that the farm answers. Raises FarmFault if it does not."""
        return conforming(self._transport.get("/v1/health"), dict[str, str], self.url)

    def plan(self, frozen: Frozen) -> ShownPlan:
        """Return what a submission would do: cells, hits, misses and why, missing blobs. Changes nothing.

        Raises ManifestError with every problem found.
        """
        from farm.matrix.planned import ShownPlan

        return conforming(self._transport.post("/v1/plan", frozen.submission, timeout=300.0), ShownPlan, self.url)

    def submit(
        self, frozen: Frozen, *, plan: ShownPlan | None = None, progress: OnUpload | None = None
    ) -> SubmittedBuild:
        """Upload what the farm lacks, create the build and return it. Repeating it makes no second build.

        `plan` is what `plan` returned for it, if that was asked already.
        """
        if plan:
            self._bring(frozen, plan["missing_blobs"], progress)
        try:
            return self._create(frozen)
        except InputsMissing as error:  # Something may have gone since the plan, too.
            missing = error.blobs
        self._bring(frozen, missing, progress)
        return self._create(frozen)

    def _bring(self, frozen: Frozen, missing: Iterable[str], progress: OnUpload | None) -> None:
        self.upload({digest: frozen.files[digest] for digest in missing if digest in frozen.files}, progress)

    def _create(self, frozen: Frozen) -> SubmittedBuild:
        from farm.results.report import BuildView

        headers = {"Idempotency-Key": frozen.build_id}
        found = conforming(
            self._transport.post("/v1/builds", frozen.submission, timeout=300.0, headers=headers), BuildView, self.url
        )
        return SubmittedBuild(self, found)

    def attach(self, named: str) -> SubmittedBuild:
        """Return a build that was submitted before, named as in `find_build`. Raises NotFound."""
        return SubmittedBuild(self, self.build(self.find_build(named)))

    def upload(self, files: Mapping[str, Path], progress: OnUpload | None = None) -> int:
        """Bring blobs (by digest) to object storage; return the bytes sent.

        Skips existing blobs, and parts of large blobs that an earlier try has uploaded.
        """
        from farm.artifacts.storage import Missing

        sizes = {digest: path.stat().st_size for digest, path in files.items()}
        uploads: list[Upload] = []
        for lot in _lots(sizes):
            blobs = [{"digest": digest, "size": sizes[digest]} for digest in lot]
            missing = conforming(self._transport.post("/v1/blobs", {"blobs": blobs}), Missing, self.url)
            uploads += missing["missing"]
        puts = [(put, files[upload["digest"]]) for upload in uploads for put in upload["puts"]]
        total, sent, lock = sum(put["size"] for put, _ in puts), 0, Lock()

        def count(size: int) -> None:
            nonlocal sent
            with lock:
                sent += size
                if progress:
                    progress(sent, total)

        stopped = False

        def count_or_stop(size: int) -> None:
            if stopped:
                raise KeyboardInterrupt
            count(size)

        def send(put: Put, path: Path) -> None:
            self._transport.put(put, path, count_or_stop)

        from concurrent.futures import ThreadPoolExecutor

        with ThreadPoolExecutor(UPLOADS) as threads:
            try:
                for done in [threads.submit(send, put, path) for put, path in puts]:
                    done.result()
            except BaseException:
                stopped = True  # Else the block would end only when all of it is sent.
                threads.shutdown(wait=False, cancel_futures=True)
                raise
        for upload in uploads:
            if upload["finish"]:
                # The farm reads all of it once, to hash it.
                timeout = 120.0 + upload["size"] / SLOWEST_HASH
                body = {"size": upload["size"]}
                self._transport.request("POST", f"/v1/blobs/{upload['digest']}/finish", json=body, timeout=timeout)
        return total

    def build(self, build_id: str) -> BuildView:
        """Return a build by id, unique start of an id, or `@latest`. Raises NotFound."""
        from farm.results.report import BuildView

        return conforming(self._transport.get(f"/v1/builds/{_build(build_id)}"), BuildView, self.url)

    def builds(self, limit: int = 50, *, label: str = "") -> list[BuildView]:
        """Return the newest builds; with `label` (KEY=VALUE) those that have it."""
        from farm.results.report import BuildView

        named = {"label": label} if label else {}
        return conforming(self._transport.items("/v1/builds", limit=limit, **named), list[BuildView], self.url)

    def find_build(self, named: str) -> str:
        """Return the id of a build: by id, unique start of an id, `@latest`, a label (KEY=VALUE) or a git commit.

        A commit is the label `commit`, by its whole name or the first 17 digits or more; commands in a pipeline set it.
        Of several builds it is the newest. Raises NotFound.
        """
        if not re.fullmatch(rf"{BUILD.pattern}|[0-9a-f]{{17,64}}|.*=.*", named):
            return self._find_by_name(named)
        commit = f"commit={named}" if re.fullmatch(r"[0-9a-f]{17,64}", named) else ""
        label = commit or (named if "=" in named else "")
        if not label:
            return self.build(named)["id"]
        found = self.builds(1, label=label)
        if not found:
            raise NotFound(f"no build has the label {label}", hint="`farm status` lists the newest builds")
        return found[0]["id"]

    def _find_by_name(self, name: str) -> str:
        """Return the id of the newest build of a manifest's name. Raises UsageError for what is no name, NotFound."""
        if not re.fullmatch(r"[a-z0-9][a-z0-9._-]*", name):
            _build(name)
        found = next((build["id"] for build in self.builds(1000) if build["name"] == name), None)
        if not found:
            raise NotFound(f"no build is named {name}", hint="`farm status` lists the newest builds")
        return found

    def cells(self, build_id: str) -> list[JudgedCell]:
        """Return a build's cells, judged, in the order of its manifest."""
        from farm.results.report import JudgedCell

        return conforming(self._transport.items(f"/v1/builds/{_build(build_id)}/cells"), list[JudgedCell], self.url)

    def diff(self, left: str, right: str) -> Differences:
        """Return in what two builds differ."""
        from farm.spec import CompileSpec, changes

        reports = [self.report(build_id) for build_id in (left, right)]
        before, after = ({cell["identifier"]: cell for cell in report["cells"]} for report in reports)
        names = [name for name in before | after if _ended(before.get(name)) != _ended(after.get(name))]
        found: list[CellDifference] = []
        for name in names:
            cells = before.get(name), after.get(name)
            keys = [facts["key"] for cell in cells if cell and (facts := cell["facts"])]
            changed: list[str] = []
            if len(set(keys)) > 1:
                with contextlib.suppress(NotFound, ArtifactGone):
                    one, other = (self.artifact(key)["spec"] for key in keys)
                    changed = changes(one, CompileSpec.from_dict(other))
            found.append({"identifier": name, "left": cells[0], "right": cells[1], "changes": changed})
        return {
            "left": reports[0]["build"],
            "right": reports[1]["build"],
            "same": len(before | after) - len(names),
            "cells": found,
            "left_out": {
                "left": [name for name in before if name not in after],
                "right": [name for name in after if name not in before],
            },
        }

    def toolchains(self, ref: str = "prod") -> list[ToolchainLine]:
        """Return the toolchains of each target, the oldest first, with what a ref names of them."""
        from farm.jobs.rows import ToolchainLine

        return conforming(self._transport.items("/v1/toolchains", ref=ref), list[ToolchainLine], self.url)

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
        return conforming(self._transport.post("/v1/toolchains/shadows", body, timeout=300.0), BuildView, self.url)

    def radar(self, build_id: str) -> RadarDocument:
        """Return what a shadow build found. Raises NotFound for a build that is none."""
        from farm.results.radar import RadarDocument

        return conforming(self._transport.get(f"/v1/builds/{_build(build_id)}/radar"), RadarDocument, self.url)

    def promote_toolchain(self, build_id: str, *, force: bool = False) -> RefView:
        """Let the ref of a shadow build give readers its programs, and return the ref.

        Raises GateFailed if something speaks against it, unless `force` is set; Conflict if the ref has moved since.
        """
        from farm.artifacts.refs import RefView

        body = {"build_id": self.build(build_id)["id"], "force": force}
        return conforming(self._transport.post("/v1/toolchains/promote", body), RefView, self.url)

    def roll_back_toolchain(self, ref: str = "prod", toolchain: str = "", *, generation: int | None = None) -> RefView:
        """Let a ref give readers the programs of a toolchain that it has kept, by default the one before.

        With `generation` only if the ref has that one. Raises NotFound, Conflict.
        """
        from farm.artifacts.refs import RefView

        query = "" if generation is None else f"?generation={generation}"
        return conforming(
            self._transport.post(f"/v1/toolchains/rollback{query}", {"ref": ref, "toolchain": toolchain}),
            RefView,
            self.url,
        )

    def history(self, cell: str, limit: int = 50) -> list[PastCell]:
        """Return how a cell (by its identifier) ended in the newest builds that had it, the newest first."""
        from farm.results.report import PastCell

        return conforming(self._transport.items("/v1/history", cell=cell, limit=limit), list[PastCell], self.url)

    def rebuild_history(self) -> int:
        """Make the server's history of cells again from all reports; return how many there are."""
        return conforming(self._transport.post("/v1/history/rebuild", timeout=AUDIT_SILENCE)["reports"], int, self.url)

    def page_of(self, build: BuildView) -> str:
        """Return the URL of a build's page, for a browser; `/cells/IDENTIFIER` after it is that of a cell."""
        return f"{self.url}/ui/ns/{build['namespace']}/builds/{build['id']}"

    def cancel(self, build_id: str) -> int:
        """End every cell of a build that has not ended; return how many those were."""
        answer = self._transport.post(f"/v1/builds/{_build(build_id)}/cancel")
        return conforming(answer["cancelled"], int, self.url)

    def plan_retry(self, build_id: str, *, failed: bool = False, new_id: str = "") -> ShownPlan:
        """Say what `retry` would do; as `plan`."""
        from farm.matrix.planned import ShownPlan

        body = {"build_id": new_id or new_build_id(), "failed": failed}
        return conforming(
            self._transport.post(f"/v1/builds/{_build(build_id)}/retry/plan", body, timeout=300.0), ShownPlan, self.url
        )

    def retry(self, build_id: str, *, failed: bool = False, new_id: str = "") -> SubmittedBuild:
        """Create a build with an ended build's cells as they were planned, and return it; what is published is a hit.

        With `failed` it has only the cells that did not succeed. `new_id` is its id (`new_build_id`).

        Raises NotFound if there is nothing to do, Conflict if the build has not ended.
        """
        from farm.results.report import BuildView

        body = {"build_id": new_id or new_build_id(), "failed": failed}
        found = conforming(
            self._transport.post(f"/v1/builds/{_build(build_id)}/retry", body, timeout=300.0), BuildView, self.url
        )
        return SubmittedBuild(self, found)

    def pause(self, build_id: str) -> BuildView:
        """Hand out no more of a build's jobs, and return it. Raises Conflict if it has ended."""
        from farm.results.report import BuildView

        return conforming(self._transport.post(f"/v1/builds/{_build(build_id)}/pause"), BuildView, self.url)

    def resume(self, build_id: str) -> BuildView:
        """Hand out the jobs of a paused build again, and return it. Raises Conflict if it has ended."""
        from farm.results.report import BuildView

        return conforming(self._transport.post(f"/v1/builds/{_build(build_id)}/resume"), BuildView, self.url)

    def pause_pool(self, name: str) -> None:
        """Hand out nothing of a pool any more. Raises NotFound."""
        self._transport.request("POST", f"/v1/pools/{_named('pool', name)}/pause")

    def resume_pool(self, name: str) -> None:
        """Hand out the jobs of a paused pool again. Raises NotFound."""
        self._transport.request("POST", f"/v1/pools/{_named('pool', name)}/resume")

    def report(self, build_id: str) -> Report:
        """Return a build with its cells as one document."""
        from farm.results.report import Report

        return conforming(self._transport.get(f"/v1/builds/{_build(build_id)}/report"), Report, self.url)

    def junit(self, build_id: str) -> str:
        """Return a build's report as JUnit XML."""
        return self._transport.request("GET", f"/v1/builds/{_build(build_id)}/junit").text

    def watch(self, build_id: str, *, after: str | None = None) -> Iterator[BuildEvent]:
        """Yield a build's events until its report is written, from the first one or from the one after `after`.

        A lost connection is made again without gap or repeat. An event of type `reset` says that events were missed
        (or that none come through, as behind some proxies): read the state.

        Raises FarmFault when the farm stays away.
        """
        from farm.jobs.rows import BuildEvent

        for data in self._follow(build_id, after):
            yield conforming(parsed(data, self.url), BuildEvent, self.url)

    def changes(self, build_id: str, *, after: str | None = None) -> Iterator[BuildChange]:
        """Yield what changes in a build until its report is written: cells as they are now, not the whole report.

        Without `after`, the first change is a `reset`: read the report then. Any change but `cells` means the same, so
        that this works with an older farm, which sends plain events. A lost connection is made again without gap or
        repeat. Raises as `watch`.
        """
        from farm.results.report import BuildChange

        for data in self._follow(build_id, after, cells=True):
            change = conforming(parsed(data, self.url), _Event, self.url)
            # Of an older farm's events only the type counts.
            yield (
                conforming(change, BuildChange, self.url) if change["type"] == "cells" else cast("BuildChange", change)
            )

    def _follow(self, build_id: str, after: str | None, **params: bool) -> Iterator[str]:
        """Yield the data of a build's server-sent events until its report is written; see `watch`."""
        if build_id == "@latest":
            build_id = self.build(build_id)["id"]  # One build to its end, whatever is submitted meanwhile.
        path = f"/v1/builds/{_build(build_id)}/events"
        position, failures = after, 0
        while True:
            silence = POLL if failures else SILENCE
            try:
                for name, identifier, data in self._transport.events(path, position, silence, **params):
                    failures = 0
                    if name == "end":
                        return
                    position = identifier or position
                    yield data
            except FarmFault:
                failures += 1
                if failures > len(FOLLOW_DELAYS):
                    raise
            time.sleep(FOLLOW_DELAYS[max(failures - 1, 0)])
            if failures > 1:
                with contextlib.suppress(FarmFault):
                    if self.build(build_id)["state"] == "reported":
                        return
                    # The farm answers and only its events do not come through: go on asking, for as long as it takes.
                    failures = 1
                    yield json.dumps({"type": "reset", "id": position or "", "at": time.time(), "build": build_id})

    # --- stored manifests ---------------------------------------------------------------------------------------

    def manifests(self) -> list[StoredManifest]:
        """Return the stored manifests of the namespace."""
        from farm.matrix.stored import StoredManifest

        return conforming(self._transport.items("/v1/manifests"), list[StoredManifest], self.url)

    def manifest(self, name: str, version: int | None = None) -> ShownManifest:
        """Return a stored manifest with the content of a version, by default of the newest. Raises NotFound."""
        from farm.matrix.stored import ShownManifest

        given = {} if version is None else {"version": version}
        return conforming(
            self._transport.get(f"/v1/manifests/{_named('manifest', name)}", **given), ShownManifest, self.url
        )

    def push_manifest(
        self, frozen: Frozen, *, version: int | None = None, progress: OnUpload | None = None
    ) -> StoredManifest:
        """Store a manifest under its own name, upload what the farm lacks, and return it with its versions.

        With `version` only if that is the newest one (0: if there is none). Raises Conflict if it is not.
        """
        from farm.manifest import parse_manifest
        from farm.matrix.stored import StoredManifest

        content = {name: value for name, value in frozen.submission.items() if name != "build_id"}
        path = f"/v1/manifests/{parse_manifest(frozen.submission['manifest'], frozen.submission['file']).name}"
        params = {} if version is None else {"version": version}

        def push() -> StoredManifest:
            return conforming(
                document_of(self._transport.request("PUT", path, json=content, params=params, timeout=300.0)),
                StoredManifest,
                self.url,
            )

        try:
            return push()
        except InputsMissing as error:
            self._bring(frozen, error.blobs, progress)
        return push()

    def remove_manifest(self, name: str, *, version: int | None = None) -> None:
        """Remove a stored manifest with all versions; with `version` only if that is the newest. Raises NotFound."""
        self.manifest(name)
        params = {} if version is None else {"version": version}
        with contextlib.suppress(NotFound):  # Removed meanwhile, perhaps by our first request, whose answer was lost.
            self._transport.request("DELETE", f"/v1/manifests/{_named('manifest', name)}", params=params)

    def build_manifest(
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
        path = f"/v1/manifests/{_named('manifest', name)}/builds"
        found = conforming(self._transport.post(path, body, headers=headers, timeout=300.0), BuildView, self.url)
        return SubmittedBuild(self, found)

    def plan_manifest(
        self,
        name: str,
        *,
        version: int | None = None,
        labels: Mapping[str, str] | None = None,
        gates: ChosenGates | None = None,
    ) -> ShownPlan:
        """Return what `build_manifest` would do now; as `plan`. Raises NotFound."""
        from farm.matrix.planned import ShownPlan

        body = {"version": version, "labels": dict(labels or {}), "gates": gates}
        path = f"/v1/manifests/{_named('manifest', name)}/plan"
        return conforming(self._transport.post(path, body, timeout=300.0), ShownPlan, self.url)

    # --- jobs, workers ------------------------------------------------------------------------------------------

    def job(self, job_id: str) -> JobView:
        """Return a job with its attempts."""
        from farm.jobs.rows import JobView

        return conforming(self._transport.get(f"/v1/jobs/{_named('job', job_id)}"), JobView, self.url)

    def log(self, job_id: str) -> bytes:
        """Return a job's log: its last part while it runs, the whole after that."""
        return self._transport.request("GET", f"/v1/jobs/{_named('job', job_id)}/log").content

    def reproduction(self, name: str, cell: str = "") -> ReproductionDocument:
        """Return what reruns the last attempt of a job, or of a build's cell, or the one that made a key's artifact.

        `name` is the job, the build (with the identifier of its `cell`) or the cache key. Raises NotFound.
        """
        from farm.jobs.rows import ReproductionDocument

        if cell:
            return conforming(
                self._transport.get(f"/v1/builds/{_build(name)}/reproduction", cell=cell),
                ReproductionDocument,
                self.url,
            )
        if not re.fullmatch(r"[0-9a-f]{64}", name):
            return conforming(
                self._transport.get(f"/v1/jobs/{_named('job', name)}/reproduction"), ReproductionDocument, self.url
            )
        return self._made_by(self.artifact(name))

    def _made_by(self, sidecar: SidecarDocument) -> ReproductionDocument:
        from farm.jobs.order import WorkOrder

        blob = sidecar["blobs"].get("reproduction")
        if not blob:
            raise NotFound(f"the artifact {sidecar['key']} was published without its work order")
        with tempfile.TemporaryDirectory() as folder:
            document = self.download(blob, Path(folder)).read_bytes()
        found = conforming(parsed(document, self.url), dict[str, Any], self.url)
        conforming(found["order"], WorkOrder, self.url)
        return cast("ReproductionDocument", found)

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
            reproduction.write(document, folder, reproduction.MachineFile.of(machine), self.bring)
        return document

    def workers(self) -> list[WorkerView]:
        """Return the live workers; `fenced` and `resting` say why one takes no jobs."""
        from farm.jobs.rows import WorkerView

        return conforming(self._transport.items("/v1/workers"), list[WorkerView], self.url)

    def drain(self, worker: str) -> None:
        """Stop a worker when its running attempts have ended. Raises NotFound."""
        self._transport.request("POST", f"/v1/workers/{_named('worker', worker)}/drain")

    def unfence(self, node: str) -> None:
        """Let a fenced node take jobs again, before its health probes do. Raises NotFound."""
        self._transport.request("POST", f"/v1/nodes/{_named('node', node)}/unfence")

    def pools(self) -> list[PoolView]:
        """Return the pools that the farm has known."""
        from farm.jobs.rows import PoolView

        return conforming(self._transport.items("/v1/pools"), list[PoolView], self.url)

    # --- upkeep -------------------------------------------------------------------------------------------------

    def audit(self, *, deep: bool = False) -> Iterator[AuditLine]:
        """Yield everything that does not agree in the farm, and the counts last.

        With `deep`, the farm reads and hashes every blob of every artifact.
        """
        from farm.jobs.rows import AuditLine

        with self._transport.lines("/v1/audit", timeout=AUDIT_SILENCE, params={"deep": deep}) as lines:
            for line in lines:
                yield conforming(parsed(line, self.url), AuditLine, self.url)

    def gc(self, *, dry_run: bool = False) -> Collected:
        """Mark blobs that nothing has named for a day, and delete those that were marked a day ago.

        Returns how many `blobs` and `bytes` were deleted and how many are `marked`; with `dry_run`, of all that nothing
        names.
        """
        from farm.artifacts.ownership import Collected

        return conforming(
            self._transport.post("/v1/gc", params={"dry_run": dry_run}, timeout=AUDIT_SILENCE), Collected, self.url
        )

    def tokens(self) -> list[TokenDocument]:
        """Return the farm's tokens, without their secrets."""
        from farm.artifacts.tokens import TokenDocument

        return conforming(self._transport.items("/v1/tokens"), list[TokenDocument], self.url)

    def create_token(self, name: str, role: str, namespace: str, *, max_cells: int = 0) -> str:
        """Make a token and return its secret, which the farm does not keep."""
        from farm.artifacts.tokens import Secret

        new = {"name": name, "role": role, "namespace": namespace, "max_cells": max_cells}
        answer = conforming(self._transport.post("/v1/tokens", new), Secret, self.url)
        return answer["secret"]

    def revoke_token(self, name: str) -> None:
        """Revoke a token. Raises NotFound."""
        self._transport.request("DELETE", f"/v1/tokens/{_named('token', name)}")

    # --- webhooks -----------------------------------------------------------------------------------------------

    def webhooks(self) -> list[WebhookView]:
        """Return the webhooks of the namespace, without their secrets."""
        from farm.webhooks.hooks import WebhookView

        return conforming(self._transport.items("/v1/webhooks"), list[WebhookView], self.url)

    def create_webhook(self, name: str, url: str, events: Iterable[str] = ("build.finished",)) -> str:
        """Make a webhook and return the secret that signs its messages."""
        from farm.webhooks.hooks import NewWebhookView

        answer = conforming(
            self._transport.post("/v1/webhooks", {"name": name, "url": url, "events": list(events)}),
            NewWebhookView,
            self.url,
        )
        return answer["secret"]

    def rotate_webhook(self, name: str, overlap: float = 86_400.0) -> str:
        """Give a webhook a new secret and return it; the one before signs for `overlap` seconds more, too.

        Raises NotFound, Conflict if too many secrets would sign at once.
        """
        from farm.webhooks.hooks import NewWebhookView

        path = f"/v1/webhooks/{_named('webhook', name)}/rotate"
        answer = conforming(self._transport.post(path, {"overlap": overlap}), NewWebhookView, self.url)
        return answer["secret"]

    def remove_webhook(self, name: str) -> None:
        """Remove a webhook with its log. Raises NotFound."""
        self._transport.request("DELETE", f"/v1/webhooks/{_named('webhook', name)}")

    def deliveries(self, webhook: str, limit: int = 50) -> list[DeliveryView]:
        """Return what was sent to a webhook, the newest first. Raises NotFound."""
        from farm.webhooks.hooks import DeliveryView

        path = f"/v1/webhooks/{_named('webhook', webhook)}/deliveries"
        return conforming(self._transport.items(path, limit=limit), list[DeliveryView], self.url)

    def replay(self, webhook: str, message: str) -> DeliveryView:
        """Send a message to a webhook again, with the same id. Raises NotFound."""
        from farm.webhooks.hooks import DeliveryView

        path = f"/v1/webhooks/{_named('webhook', webhook)}/deliveries/{_named('message', message)}/replay"
        return conforming(self._transport.post(path), DeliveryView, self.url)

    # --- tuning -------------------------------------------------------------------------------------------------

    def tuning(self) -> list[TuningDatabaseView]:
        """Return the tuning databases, including empty ones. A database's name is `POOL/DEVICE/MODE`."""
        from farm.tuning.records import TuningDatabaseView

        return conforming(self._transport.items("/v1/tuning"), list[TuningDatabaseView], self.url)

    def tuning_snapshot(self, database: str) -> bytes:
        """Return all records of a tuning database as text, for `farm.tuning.text.read`. Raises NotFound."""
        return self._transport.request(
            "GET", f"{_tuning(database)}/snapshot", timeout=300.0, limit=LARGEST_SNAPSHOT
        ).content

    def tuning_stats(self, database: str) -> TuningStats:
        """Return what a tuning database holds, and what tuning took and saved, in all and by the day."""
        from farm.tuning.records import TuningStats

        return conforming(self._transport.get(f"{_tuning(database)}/stats"), TuningStats, self.url)

    def tuning_import(self, database: str, packed: bytes, *, miopen: str = "") -> TuningImported:
        """Add a packed snapshot (`farm.tuning.text.pack`) to a tuning database; return what came of it."""
        from farm.tuning.records import TuningImported

        headers = {"Content-Type": "application/gzip"}
        return conforming(
            document_of(
                self._transport.request(
                    "POST",
                    f"{_tuning(database)}/import",
                    timeout=300.0,
                    content=packed,
                    headers=headers,
                    params={"miopen": miopen},
                )
            ),
            TuningImported,
            self.url,
        )

    def tuning_merge(self, database: str) -> TuningMerged:
        """Bring what attempts committed into a tuning database's head now."""
        from farm.tuning.records import TuningMerged

        return conforming(self._transport.post(f"{_tuning(database)}/merge", timeout=300.0), TuningMerged, self.url)

    def tuning_prune(
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
        return conforming(
            self._transport.post(f"{_tuning(database)}/prune", params=params, timeout=300.0), TuningPruned, self.url
        )

    # --- artifacts ----------------------------------------------------------------------------------------------

    def artifact(self, key: str) -> SidecarDocument:
        """Return the sidecar of a cache key. Raises NotFound, or ArtifactGone if it is damaged."""
        from farm.artifacts.sidecar import validate

        found: SidecarDocument = self._transport.get(f"/v1/artifacts/{_named('artifact', key)}")
        try:
            validate(found)
        except UsageError as error:
            raise UsageError(f"{self.url} answers what no farm does: {error.message}") from None
        return found

    def signed(self, key: str, *, tag: str = "", needs: tuple[str, ...] = ()) -> SignedArtifact | None:
        """Return the sidecar of a cache key as it is stored, and what is signed about it; None if nothing is.

        `tag` is the ref by which it was found, `needs` are kinds of statements that it needs besides the policy's.

        Raises Untrusted with the reasons if this client has a trust policy that refuses it.
        """
        from farm.client.verifying import SignedArtifact

        asks = self._trust is not None and self._trust.policy is not None
        try:
            found = self._statements(key)
        except (OlderFarm, FarmFault) as error:  # It knows no statements, or is away and has never said any.
            if not asks:
                return None
            if isinstance(error, FarmFault):
                raise
            found = {"sidecar": json.dumps(self.artifact(key)), "statements": []}
        if not (asks or found["statements"]):
            return None
        text, statements = found["sidecar"].encode(), [each.encode() for each in found["statements"]]
        if self._trust and asks:
            self._refresh(self._trust)
            judged = self._trust.judge(text, statements, tag=tag, needs=needs)
            judged.require(key)
            return SignedArtifact(text, statements, judged)
        return SignedArtifact(text, statements)

    def _statements(self, key: str) -> SignedSidecar:
        path = f"/v1/artifacts/{_named('artifact', key)}/statements"
        from farm.signing.bundles import SignedSidecar

        found = self.kept.ask(f"statements {key}", lambda: self._transport.get(path))
        return conforming(found, SignedSidecar, self.url)

    def _revocations(self) -> bytes:
        return json.dumps(self._transport.get("/v1/revocations")).encode()

    def _refresh(self, trust: Trust) -> None:
        """Take over a newer revocation document that the farm has, once for each client."""
        if not self._refreshed:
            self._refreshed = True
            with contextlib.suppress(NotFound, OlderFarm, FarmFault):  # The policy says how old its own may be.
                trust.refresh(self._revocations())

    def publish_revocations(self, document: bytes) -> None:
        """Publish a signed revocation document for all readers. Raises UsageError, Conflict for an older one."""
        try:
            body = json.loads(document)
        except ValueError:
            body = {}
        self._transport.request("POST", "/v1/revocations/issue", json=body)

    def judged(self, key: str, trust: Trust, *, tag: str = "") -> list[TrustCheck]:
        """Return the checks of an artifact by somebody's trust, whatever this client trusts. Raises NotFound."""
        found = self._statements(key)
        self._refresh(trust)
        return trust.judge(found["sidecar"].encode(), [each.encode() for each in found["statements"]], tag=tag).checks

    def artifact_log(self, key: str) -> bytes:
        """Return the log of the attempt that made an artifact. Raises NotFound if none was kept."""
        blob = self.artifact(key)["blobs"].get("log")
        if not blob:
            raise NotFound(f"the artifact {key} was published without a log")
        with tempfile.TemporaryDirectory() as folder:
            return self.download(blob, Path(folder)).read_bytes()

    def refs(self) -> list[str]:
        """Return the tags of the refs."""
        return conforming(self._transport.items("/v1/refs"), list[str], self.url)

    def ref(self, tag: str) -> ShownRef:
        """Return a ref and the cells that it names. Raises NotFound."""
        from farm.artifacts.refs import ShownRef

        return conforming(self._transport.get(f"/v1/refs/{_named('ref', tag)}"), ShownRef, self.url)

    def tag(self, tag: str, source: str, *, previous: bool = False, generation: int | None = None) -> RefView:
        """Let a ref point to what `source` names, or with `previous` named before its last move; return it.

        `generation` makes it conditional: only where the ref is of that one (0: where there is none).

        Raises NotFound without such a source, Conflict if the condition does not hold.
        """
        from farm.artifacts.refs import RefView

        rolls_back = previous and source == tag
        before = self.ref(tag) if rolls_back else None
        if before and generation is None:
            # Else a request that is repeated, because its answer was lost, would roll forward again.
            generation = before["generation"]
        body = {"source": source, "previous": previous}
        path = f"/v1/refs/{_named('ref', tag)}"
        try:
            moved = conforming(
                document_of(self._transport.request("PUT", path, json=body, params=_condition(generation))),
                RefView,
                self.url,
            )
        except Conflict:
            now = self.ref(tag) if rolls_back else None
            if not before or not now or (now["generation"] - 1, now["snapshot"]) != (generation, before["previous"]):
                raise
            return now  # It was us: the answer to the first request was lost.
        return moved

    def delete_tag(self, tag: str, *, generation: int | None = None) -> None:
        """Forget a ref; the artifacts that it names stay. Raises as `tag`."""
        self.ref(tag)
        with contextlib.suppress(NotFound):  # Deleted meanwhile, perhaps by our first request, whose answer was lost.
            self._transport.request("DELETE", f"/v1/refs/{_named('ref', tag)}", params=_condition(generation))

    def ls(self, ref: str = "latest") -> list[SnapshotCell]:
        """Return the cells that a ref names, each with cache key and program. Raises NotFound.

        If the farm is away, what it answered last counts (`kept`).
        """
        found: ShownRef = self.kept.ask(f"ref {ref}", lambda: self.ref(ref))
        return sorted(found["cells"].values(), key=lambda cell: by_number(cell["identifier"]))

    def fetch(
        self,
        name: str,
        target: str,
        precision: str,
        shape: str | None = None,
        *,
        ref: str = "latest",
        folder: Path,
        toolchain: str = "",
        log: bool = False,
        with_kernels: bool = False,
        sample: bool = False,
        force: bool = False,
        layout: str = "plain",
        python: str = "",
    ) -> Fetched:
        """Write a compiled program and its sidecar (`<program>.artifact.json`) into `folder`, checked byte by byte.

        Models and shapes may share a folder. `shape` may be left out where the model has one. `toolchain` is the start
        of its id; without it the artifact that was made last is taken. `with_kernels` places MIOpen's kernel binaries
        in `<program>.kernels`, `sample` one input with its expected outputs next to the program. Only with `force` it
        overwrites files that no fetch has written. Another `layout` (`farm.packs.layouts.Layout`) writes what a serving
        stack loads instead; `python` is the interpreter whose ONNX Runtime will serve, if it is not this one.

        Raises NotFound if nothing matches, UsageError if several do or a file of the user's is in the way,
        ArtifactGone if the bytes are not those that the ref names.
        """
        from farm.client.fetching import choose, place_kernels, require_one, write_artifact

        packed = layout != "plain"
        candidates = choose(self.ls(ref), name, target, precision, shape, toolchain, ref=ref, packed=packed)
        require_one(candidates, "shape", "--shape")
        # After a toolchain's upgrade a ref names the artifacts of both until the older ones go.
        cell, sidecar = max(
            ((cell, self.sidecar_of(cell)) for cell in candidates), key=lambda found: found[1]["created"]
        )
        if packed:
            return self._fetch_pack(cell, sidecar, folder, layout, python, ref=ref, force=force)
        signed = self._signed_of(cell, ref)
        sidecar = signed.document if signed else sidecar
        found = write_artifact(
            self.bring, cell, sidecar, folder, ref=ref, log=log, sample=sample, force=force, signed=signed
        )
        blob = sidecar["blobs"].get("kernel_cache") if with_kernels else None
        if not blob:
            return found
        kernels = found.program.with_name(f"{found.program.name}.kernels")
        place_kernels(self.bring, blob, kernels)
        return replace(found, kernels=kernels)

    def _fetch_pack(
        self,
        cell: SnapshotCell,
        sidecar: SidecarDocument,
        folder: Path,
        layout: str,
        python: str,
        *,
        ref: str,
        force: bool,
    ) -> Fetched:
        from farm.artifacts.sidecar import validate
        from farm.client.fetching import bring_model, into, require_model, write_artifact
        from farm.packs.layouts import Layout, require_fit
        from farm.packs.writing import SIDECAR, write_pack

        wanted = Layout(layout)
        # The wrapper that the farm signed; the files of the other layouts depend on what is installed here.
        own = wanted is Layout.ONNXRUNTIME and sidecar["spec"]["compiler"]["name"] == "migraphx"
        signed = self._signed_of(cell, ref, ("pack",) if own else ())
        sidecar = signed.document if signed else sidecar
        checked = validate(sidecar)
        require_fit(wanted, checked)
        with into(folder), tempfile.TemporaryDirectory() as scratch:
            found = write_artifact(self.bring, cell, sidecar, Path(scratch), ref=ref, log=False)

            def model(place: Path) -> Path:
                order = self._made_by(sidecar)["order"]
                require_model(order, checked)
                return bring_model(partial(self.bring, alone=True), order, place)

            pack = write_pack(wanted, checked, found.program, folder, model, python=python, force=force, signed=signed)
            if signed and self._trust:
                self._trust.sign_pack(pack, signed)
        program = next(path for path in pack.files if path.suffix == found.program.suffix)
        return replace(found, folder=folder, program=program, sidecar=folder / SIDECAR, pack=pack)

    def fetch_family(
        self,
        name: str,
        target: str,
        precision: str,
        *,
        ref: str = "latest",
        folder: Path,
        toolchain: str = "",
        log: bool = False,
        force: bool = False,
    ) -> FetchedFamily:
        """Write a model's programs for every shape, each with its sidecar into `folder/<shape>`, and `family.json`.

        All members are of one model file and one toolchain (of those that `toolchain` begins), the ones of which an
        artifact was made last; `left_out` names the others. Raises as `fetch`.
        """
        from farm.client.fetching import FetchedFamily, choose, write_family

        candidates = choose(self.ls(ref), name, target, precision, None, toolchain, ref=ref)
        families: dict[tuple[str, str], list[FamilyMember]] = {}
        for cell in candidates:
            sidecar = self.sidecar_of(cell)
            made_of = cell["toolchain"], sidecar["spec"]["model"]["digest"]
            families.setdefault(made_of, []).append((cell, sidecar))
        members = max(
            families.values(), key=lambda found: (max(sidecar["created"] for _, sidecar in found), len(found))
        )
        shapes = {cell["shape"] for cell, _ in members}
        left_out = sorted({cell["identifier"] for cell in candidates if cell["shape"] not in shapes})
        signed = {cell["key"]: self._signed_of(cell, ref) for cell, _ in members}
        members = [(cell, each.document if (each := signed[cell["key"]]) else sidecar) for cell, sidecar in members]
        index, document = write_family(self.bring, members, folder, ref=ref, log=log, force=force, signed=signed)
        return FetchedFamily(folder, index, document, left_out)

    def download(self, blob: FileReference, folder: Path) -> Path:
        """Write a sidecar's blob into a folder, under its own name, and return its path. Raises as `bring`."""
        place = folder / file_name(blob["path"])
        self.bring(blob, place)
        return place

    def bring(self, blob: FileReference, place: Path, *, alone: bool = False) -> None:
        """Write a blob, which a sidecar or a work order names, to `place`; its folder exists.

        With `alone` the file shares nothing with the cache, as a model that is going to be checked must not.

        Raises ArtifactGone if it is not in object storage, or damaged there.
        """
        wanted = WantedBlob(blob["digest"], blob["size"], place.name)
        location, lock = "", Lock()

        def reads(start: int, end: int, write: Callable[[bytes], None]) -> None:
            nonlocal location
            with lock:
                url = location = location or self._transport.location(wanted.digest, wanted.name)
            try:
                self._transport.read(url, wanted.name, start, end, write, whole=end - start == wanted.size)
            except FarmFault:
                location = ""  # It may have expired.
                raise

        self._downloads.bring(wanted, place, reads, self.on_download, alone=alone)

    def _signed_of(self, cell: SnapshotCell, ref: str, needs: tuple[str, ...] = ()) -> SignedArtifact | None:
        try:
            return self.signed(cell["key"], tag=ref, needs=needs)
        except Untrusted as error:
            raise Untrusted(error.message.replace(cell["key"], cell["identifier"]), hint=error.hint) from None

    def sidecar_of(self, cell: SnapshotCell) -> SidecarDocument:
        """Return the sidecar of a ref's cell, kept as `ls` does it. Raises ArtifactGone."""
        try:
            found: SidecarDocument = self.kept.ask(f"artifact {cell['key']}", lambda: self.artifact(cell["key"]))
            return found
        except NotFound as error:
            raise ArtifactGone(f"{cell['identifier']}: {error.message}", hint=error.hint) from None


def trust_of(settings: Settings) -> Trust | None:
    """Return whom a client trusts by its settings; None if they say nothing. Raises UsageError for bad files."""
    if not (settings.trust_policy or settings.signing_key):
        return None
    from farm.client.verifying import Trust

    return Trust.from_settings(settings)


# --- a farm of one's own --------------------------------------------------------------------------------------------


def running_farm(data_dir: Path) -> tuple[str, str] | None:
    """Return address and token of the farm that `farm up` or `farm run` runs in a data folder, None if none does.

    Raises NotAllowed for a record that no farm of this user wrote: a token would go wherever it says.
    """
    path = data_dir / "farm.json"
    try:
        document = json.loads(read_private(path, 1 << 20))
        url, token = str(document["api_url"]), str(document["api_token"])
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError):
        return None
    except OSError as error:
        url, token = error.strerror or "", ""
    if not re.fullmatch(r"http://127\.0\.0\.1:[0-9]+", url):
        raise NotAllowed(
            f"{path} is not of a farm of yours: {url}",
            hint="it came with the folder: delete the file, or set FARM_API_URL",
        )
    return url, token


# --- details --------------------------------------------------------------------------------------------------------


def _lots(sizes: Mapping[str, int]) -> Iterator[list[str]]:
    """Yield blobs (by digest) that one request may ask for."""
    lot: list[str] = []
    room = PARTS_AT_ONCE
    for digest, size in sizes.items():
        parts = min(1000, 1 + (size >> 27))
        if lot and (len(lot) == BLOBS_AT_ONCE or parts > room):
            yield lot
            lot, room = [], PARTS_AT_ONCE
        lot.append(digest)
        room -= parts
    if lot:
        yield lot


def _build(build_id: str) -> str:
    if not BUILD.fullmatch(build_id):
        raise UsageError(
            f"{build_id!r} is not a build id", hint="b- and hex digits, a unique start of them, or @latest"
        )
    return build_id if build_id.startswith(("b-", "@")) else f"b-{build_id}"


def _ended(cell: JudgedCell | None) -> tuple[object, ...]:
    """What two cells have to have in common to be the same."""
    return (cell["state"], cell["kind"], cell["facts"]["key"] if cell["facts"] else cell["key"]) if cell else ()


def _condition(generation: int | None) -> dict[str, int]:
    return {} if generation is None else {"generation": generation}


def _tuning(database: str) -> str:
    """Return the path of a tuning database."""
    if not re.fullmatch(r"[A-Za-z0-9][\w.:+-]*(/[A-Za-z0-9][\w.:+-]*){2}", database, re.ASCII):
        raise NotFound(f"no tuning database is named {database!r}", hint="the name is POOL/DEVICE/MODE")
    return f"/v1/tuning/{database}"


def _named(what: str, name: str) -> str:
    """Return a name as part of a path; what cannot be a name is not there."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
        raise NotFound(f"no {what} is named {name!r}", hint="names are made of a-z, 0-9, '.', '_' and '-'")
    return name
