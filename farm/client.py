"""The Python client: the farm over HTTP, with the same verbs as the command line.

    with FarmClient.from_settings(load_settings()) as client:
        build = client.submit(freeze("farm.yaml"))
        for event in client.watch(build["id"]):
            print(event["type"], event.get("identifier"))
        client.fetch("resnet50", "onnxruntime/cpu", "fp16", folder=Path("out"))

Errors are those of `farm.errors`, as the farm raised them. Needs neither Redis, S3 nor Celery.
"""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import json
import os
import re
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, Self, TypeVar

from farm import errors
from farm.errors import ArtifactGone, FarmError, FarmFault, NotFound, Problem, StorageUnavailable, UsageError
from farm.family import INDEX, family_index

if TYPE_CHECKING:
    import httpx

    from farm.settings import Settings

T = TypeVar("T")
Document = dict[str, Any]
OnUpload = Callable[[int, int], None]
"""Told while inputs are uploaded: bytes sent so far, bytes in all."""

RETRY_DELAYS = (0.2, 0.5, 1.0, 2.0)
"""Seconds between tries of one request. Every verb may be repeated, so every verb is."""

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

CHUNK = 1 << 20
UPLOADS = 4
BLOBS_AT_ONCE = 1000


@dataclass(frozen=True, slots=True)
class Frozen:
    """A manifest with everything that it names read and hashed: what `submit` sends."""

    submission: Document
    files: Mapping[str, Path]
    """Digest of every blob that the submission names, and a local file that has its bytes."""

    @property
    def build_id(self) -> str:
        """The id that the build will have; submitting the same object twice makes one build."""
        return str(self.submission["build_id"])


def freeze(
    path: str | Path,
    *,
    labels: Mapping[str, str] | None = None,
    cache: Path | None = None,
    pythons: Mapping[str, str] | None = None,
) -> Frozen:
    """Read a manifest with its models and data, as they are now; `cache` is a folder for what has to be kept of them.

    `pythons` names the interpreters that convert models, by extra: `{"torch": …, "tensorflow": …}`; this one where
    there is none.

    Raises ManifestError with everything that is wrong, each with its place in the manifest.
    """
    from farm import matrix, sources
    from farm.manifest import load_manifest

    manifest = load_manifest(path)
    found = sources.freeze(manifest, Path(path).parent, cache=cache, pythons=pythons)
    if problems := matrix.check(manifest, found.models, found.data):
        raise errors.ManifestError(problems)
    submission = {
        "build_id": f"b-{secrets.token_hex(8)}",
        "manifest": manifest.text,
        "file": str(path),
        "labels": dict(labels or {}),
        **sources.as_submission(found),
    }
    return Frozen(submission, found.files)


@dataclass(frozen=True, slots=True)
class Fetched:
    """What `fetch` wrote: the program, its sidecar, and the log where it was asked for."""

    folder: Path
    program: Path
    sidecar: Path
    log: Path | None
    artifact: Document
    texts: tuple[Path, ...] = ()
    """The program's text before and after compilation, where the log was asked for and a manifest's `debug` kept it."""
    kernels: Path | None = None
    """The folder of MIOpen's kernel binaries, where they were asked for and the artifact has some."""


@dataclass(frozen=True, slots=True)
class FetchedFamily:
    """What `fetch_family` wrote: a folder for each member, and the index."""

    folder: Path
    index: Path
    document: Document
    left_out: list[str]
    """Cells that the ref names too, but of another model file or toolchain."""


class FarmClient:
    """A connection to one farm, in one namespace. Use it as a context manager; it may be shared by threads."""

    def __init__(
        self,
        url: str,
        token: str = "",
        *,
        namespace: str = "main",
        timeout: float = 30.0,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        """Connect to the farm at `url`; `timeout` is in seconds and for each answer, not for a whole build."""
        import httpx

        self.url = url.rstrip("/")
        if not re.match(r"https?://[^/]", self.url):
            raise UsageError(f"{url!r} is no farm's address", hint="FARM_API_URL is such as https://farm.example:8080")
        headers = {"Farm-Namespace": namespace, "User-Agent": "migraphx-farm"}
        if token:
            headers["Authorization"] = f"Bearer {token}"
        self._http = httpx.Client(base_url=self.url, headers=headers, timeout=timeout, transport=transport)
        # Presigned URLs carry their own permission: they never see the farm's token.
        self._storage = httpx.Client(timeout=httpx.Timeout(timeout, write=300.0, read=300.0))

    @classmethod
    def from_settings(cls, settings: Settings, **options: Any) -> Self:
        """Connect to the farm that the settings name, else to the one that `farm up` runs in `data_dir`.

        Raises NotFound where there is neither.
        """
        url, token = settings.api_url, settings.api_token.get_secret_value()
        if not url:
            running = running_farm(settings.data_dir)
            if running is None:
                raise NotFound(
                    f"no farm: api_url is not set, and none runs in {settings.data_dir}",
                    hint="set FARM_API_URL, start one with `farm up`, or use `farm run MANIFEST`",
                )
            url, token = running
        return cls(url, token, namespace=settings.namespace, **options)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._http.close()
        self._storage.close()

    # --- builds -------------------------------------------------------------------------------------------------

    def health(self) -> Document:
        """Say that the farm answers. Raises FarmFault where it does not."""
        return self._get("/v1/health")

    def plan(self, frozen: Frozen) -> Document:
        """Say what a submission would do: cells, hits, misses and why, missing blobs. Changes nothing.

        Raises ManifestError with every problem found.
        """
        return self._post("/v1/plan", frozen.submission, timeout=300.0)

    def submit(self, frozen: Frozen, *, plan: Document | None = None, progress: OnUpload | None = None) -> Document:
        """Upload what the farm lacks, create the build and return it. Repeating it makes no second build.

        `plan` is what `plan` returned for it, if that was asked already.
        """
        missing = (plan or self.plan(frozen))["missing_blobs"]
        self.upload({digest: frozen.files[digest] for digest in missing if digest in frozen.files}, progress)
        headers = {"Idempotency-Key": frozen.build_id}
        return self._post("/v1/builds", frozen.submission, timeout=300.0, headers=headers)

    def upload(self, files: Mapping[str, Path], progress: OnUpload | None = None) -> int:
        """Bring blobs (by digest) to object storage; return the bytes sent.

        Left out are blobs that are there already, and of large ones the parts that an earlier try has brought.
        """
        sizes = {digest: path.stat().st_size for digest, path in files.items()}
        uploads: list[Document] = []
        names = list(files)
        for start in range(0, len(names), BLOBS_AT_ONCE):
            lot = [{"digest": digest, "size": sizes[digest]} for digest in names[start : start + BLOBS_AT_ONCE]]
            uploads += self._post("/v1/blobs", {"blobs": lot})["missing"]
        puts = [(put, files[upload["digest"]]) for upload in uploads for put in upload["puts"]]
        total, sent, lock = sum(int(put["size"]) for put, _ in puts), 0, Lock()

        def count(size: int) -> None:
            nonlocal sent
            with lock:
                sent += size
                if progress:
                    progress(sent, total)

        with ThreadPoolExecutor(UPLOADS) as threads:
            for done in [threads.submit(self._put, put, path, count) for put, path in puts]:
                done.result()
        for upload in uploads:
            if upload["finish"]:
                # The farm reads all of it once, to hash it.
                timeout = 120.0 + upload["size"] / SLOWEST_HASH
                self._post(f"/v1/blobs/{upload['digest']}/finish", {"size": upload["size"]}, timeout=timeout)
        return total

    def build(self, build_id: str) -> Document:
        """Return a build by id, unique start of an id, or `@latest`. Raises NotFound."""
        return self._get(f"/v1/builds/{_build(build_id)}")

    def builds(self, limit: int = 50) -> list[Document]:
        """Return the newest builds."""
        return self._items("/v1/builds", limit=limit)

    def cells(self, build_id: str) -> list[Document]:
        """Return a build's cells, judged, in the order of its manifest."""
        return self._items(f"/v1/builds/{_build(build_id)}/cells")

    def cancel(self, build_id: str) -> int:
        """End every cell of a build that has not ended; return how many those were."""
        return int(self._post(f"/v1/builds/{_build(build_id)}/cancel")["cancelled"])

    def pause(self, build_id: str) -> Document:
        """Hand out no more of a build's jobs, and return it. Raises Conflict where it has ended."""
        return self._post(f"/v1/builds/{_build(build_id)}/pause")

    def resume(self, build_id: str) -> Document:
        """Hand out the jobs of a paused build again, and return it. Raises Conflict where it has ended."""
        return self._post(f"/v1/builds/{_build(build_id)}/resume")

    def pause_pool(self, name: str) -> None:
        """Hand out nothing of a pool any more. Raises NotFound."""
        self._request("POST", f"/v1/pools/{_named('pool', name)}/pause")

    def resume_pool(self, name: str) -> None:
        """Hand out the jobs of a paused pool again. Raises NotFound."""
        self._request("POST", f"/v1/pools/{_named('pool', name)}/resume")

    def report(self, build_id: str) -> Document:
        """Return a build with its cells as one document."""
        return self._get(f"/v1/builds/{_build(build_id)}/report")

    def junit(self, build_id: str) -> str:
        """Return a build's report as JUnit XML."""
        return self._request("GET", f"/v1/builds/{_build(build_id)}/junit").text

    def watch(self, build_id: str, *, after: str | None = None) -> Iterator[Document]:
        """Yield a build's events until its report is written, from the first one or from the one after `after`.

        A lost connection is made again without gap or repeat. An event of type `reset` says that events were missed
        (or that none come through, as behind some proxies): read the state.

        Raises FarmFault when the farm stays away.
        """
        path = f"/v1/builds/{_build(build_id)}/events"
        position, failures = after, 0
        while True:
            try:
                for name, identifier, data in self._stream(path, position, POLL if failures else SILENCE):
                    failures = 0
                    if name == "end":
                        return
                    position = identifier or position
                    yield {"type": name, **json.loads(data)}
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
                    yield {"type": "reset"}

    # --- jobs, workers ------------------------------------------------------------------------------------------

    def job(self, job_id: str) -> Document:
        """Return a job with its attempts."""
        return self._get(f"/v1/jobs/{_named('job', job_id)}")

    def log(self, job_id: str) -> bytes:
        """Return a job's log: its last part while it runs, the whole after that."""
        return self._request("GET", f"/v1/jobs/{_named('job', job_id)}/log").content

    def reproduction(self, name: str, cell: str = "") -> Document:
        """Return what reruns the last attempt of a job, or of a build's cell, or the one that made a key's artifact.

        `name` is the job, the build (with the identifier of its `cell`) or the cache key. Raises NotFound.
        """
        if cell:
            return self._get(f"/v1/builds/{_build(name)}/reproduction", cell=cell)
        if not re.fullmatch(r"[0-9a-f]{64}", name):
            return self._get(f"/v1/jobs/{_named('job', name)}/reproduction")
        blob = self.artifact(name)["blobs"].get("reproduction")
        if not blob:
            raise NotFound(f"the artifact {name} was published without its work order")
        with tempfile.TemporaryDirectory() as folder:
            document: Document = json.loads(self.download(blob, Path(folder)).read_bytes())
        return document

    def reproduce(self, name: str, folder: Path, machine: Settings, cell: str = "") -> Document:
        """Write a folder that reruns an attempt (`reproduction`) without the farm, on a machine with these settings.

        Raises UsageError where the folder has other content.
        """
        from farm import reproduction

        document = self.reproduction(name, cell)

        def bring(file: Mapping[str, Any], place: Path) -> None:
            self.download({**file, "path": file["digest"]}, place.parent).replace(place)

        with _into(folder):
            if any(folder.iterdir()):
                raise UsageError(f"{folder} is not empty", hint="choose another folder")
            reproduction.write(document, folder, reproduction.MachineFile.of(machine), bring)
        return document

    def workers(self) -> list[Document]:
        """Return the live workers; `fenced` and `resting` say why one takes no jobs."""
        return self._items("/v1/workers")

    def drain(self, worker: str) -> None:
        """Have a worker finish what it runs, and stop. Raises NotFound."""
        self._request("POST", f"/v1/workers/{_named('worker', worker)}/drain")

    def unfence(self, node: str) -> None:
        """Let a fenced node take jobs again, before its health probes do. Raises NotFound."""
        self._request("POST", f"/v1/nodes/{_named('node', node)}/unfence")

    def pools(self) -> list[Document]:
        """Return the pools that the farm has known."""
        return self._items("/v1/pools")

    # --- upkeep -------------------------------------------------------------------------------------------------

    def audit(self, *, deep: bool = False) -> Iterator[Document]:
        """Yield `{"where", "problem", "remedy"}` of everything that does not agree in the farm, last `{"counts"}`.

        With `deep`, the farm reads and hashes every blob of every artifact.
        """
        with self._streaming("/v1/audit", timeout=AUDIT_SILENCE, params={"deep": deep}) as lines:
            yield from map(json.loads, lines)

    def gc(self, *, dry_run: bool = False) -> Document:
        """Delete blobs that nothing has named for a day; return how many `blobs` and `bytes` those were."""
        return self._post("/v1/gc", params={"dry_run": dry_run}, timeout=AUDIT_SILENCE)

    def tokens(self) -> list[Document]:
        """Return the farm's tokens, without their secrets."""
        return self._items("/v1/tokens")

    def create_token(self, name: str, role: str, namespace: str, *, max_cells: int = 0) -> str:
        """Make a token and return its secret, which the farm does not keep."""
        new = {"name": name, "role": role, "namespace": namespace, "max_cells": max_cells}
        return str(self._post("/v1/tokens", new)["secret"])

    def revoke_token(self, name: str) -> None:
        """Revoke a token. Raises NotFound."""
        self._request("DELETE", f"/v1/tokens/{_named('token', name)}")

    # --- tuning -------------------------------------------------------------------------------------------------

    def tuning(self) -> list[Document]:
        """Return the tuning databases, also those that are still empty. A database's name is `POOL/DEVICE/MODE`."""
        return self._items("/v1/tuning")

    def tuning_snapshot(self, database: str) -> bytes:
        """Return all records of a tuning database as text, for `farm.tuning.text.read`. Raises NotFound."""
        return self._request("GET", f"{_tuning(database)}/snapshot", timeout=300.0).content

    def tuning_stats(self, database: str) -> Document:
        """Return what a tuning database holds, and what tuning took and saved, in all and by the day."""
        return self._get(f"{_tuning(database)}/stats")

    def tuning_import(self, database: str, packed: bytes, *, miopen: str = "") -> Document:
        """Add a packed snapshot (`farm.tuning.text.pack`) to a tuning database; return what came of it."""
        headers = {"Content-Type": "application/gzip"}
        options: dict[str, Any] = {"content": packed, "headers": headers, "params": {"miopen": miopen}}
        found: Document = self._request("POST", f"{_tuning(database)}/import", timeout=300.0, **options).json()
        return found

    def tuning_merge(self, database: str) -> Document:
        """Bring what attempts committed into a tuning database's head now."""
        return self._post(f"{_tuning(database)}/merge", timeout=300.0)

    def tuning_prune(
        self,
        database: str,
        *,
        older: float | None = None,
        job: str = "",
        everything: bool = False,
        dry_run: bool = False,
    ) -> Document:
        """Remove the records that were measured `older` seconds ago or more, or by one job, or everything."""
        params: dict[str, Any] = {"job": job, "everything": everything, "dry_run": dry_run}
        if older is not None:
            params["older"] = older
        return self._post(f"{_tuning(database)}/prune", params=params, timeout=300.0)

    # --- artifacts ----------------------------------------------------------------------------------------------

    def artifact(self, key: str) -> Document:
        """Return the sidecar of a cache key. Raises NotFound, or ArtifactGone where it is damaged."""
        return self._get(f"/v1/artifacts/{_named('artifact', key)}")

    def artifact_log(self, key: str) -> bytes:
        """Return the log of the attempt that made an artifact. Raises NotFound where none was kept."""
        blob = self.artifact(key)["blobs"].get("log")
        if not blob:
            raise NotFound(f"the artifact {key} was published without a log")
        with tempfile.TemporaryDirectory() as folder:
            return self.download(blob, Path(folder)).read_bytes()

    def refs(self) -> list[str]:
        """Return the tags of the refs."""
        return [str(tag) for tag in self._items("/v1/refs")]

    def ls(self, ref: str = "latest") -> list[Document]:
        """Return the cells that a ref names, each with cache key and program. Raises NotFound."""
        cells: Mapping[str, Document] = self._get(f"/v1/refs/{_named('ref', ref)}")["cells"]
        return sorted(cells.values(), key=lambda cell: str(cell["identifier"]))

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
    ) -> Fetched:
        """Write a compiled program and its sidecar (`artifact.json`) into `folder`, checked byte by byte.

        `shape` may be left out where the model has one. `toolchain` is the start of its id; without it the artifact
        that was made last is taken. `with_kernels` places MIOpen's kernel binaries in `folder/kernels`.

        Raises NotFound where nothing matches, UsageError where several do or where the folder holds another artifact,
        ArtifactGone where the bytes are not those that the ref names.
        """
        candidates = choose(self.ls(ref), name, target, precision, shape, toolchain, ref=ref)
        _require_one(candidates, "shape", "--shape")
        # After a toolchain's upgrade a ref names the artifacts of both until the older ones go.
        cell, sidecar = max(
            ((cell, self._sidecar_of(cell)) for cell in candidates), key=lambda found: str(found[1]["created"])
        )
        found = self._write(cell, sidecar, folder, ref=ref, log=log)
        packed = sidecar["blobs"].get("kernel_cache") if with_kernels else None
        return replace(found, kernels=self._place_kernels(packed, folder)) if packed else found

    def _place_kernels(self, packed: Document, folder: Path) -> Path:
        """Unpack kernel binaries into `folder/kernels`, under their bare names: an archive says where nothing goes."""
        import zipfile

        kernels = folder / "kernels"
        archive_path = self.download(packed, folder)
        try:
            with _into(kernels), zipfile.ZipFile(archive_path) as archive:
                for item in archive.infolist():
                    name = Path(item.filename).name
                    if item.is_dir() or not name.endswith(".ukdb"):
                        continue
                    with archive.open(item) as source, _replacing(kernels / name) as file:
                        shutil.copyfileobj(source, file)
        except zipfile.BadZipFile as error:
            raise ArtifactGone(f"the kernel binaries cannot be unpacked: {error}") from None
        finally:
            archive_path.unlink()
        return kernels

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
    ) -> FetchedFamily:
        """Write a model's programs for every shape, each with its sidecar into `folder/<shape>`, and `family.json`.

        All members are of one model file and one toolchain (of those that `toolchain` begins), the ones of which an
        artifact was made last; `left_out` names the others. Raises as `fetch`.
        """
        candidates = choose(self.ls(ref), name, target, precision, None, toolchain, ref=ref)
        families: dict[tuple[str, str], list[tuple[Document, Document]]] = {}
        for cell in candidates:
            sidecar = self._sidecar_of(cell)
            made_of = str(cell["toolchain"]), str(sidecar["spec"]["model"]["digest"])
            families.setdefault(made_of, []).append((cell, sidecar))
        members = max(
            families.values(), key=lambda found: (max(str(sidecar["created"]) for _, sidecar in found), len(found))
        )
        shapes = {str(cell["shape"]) for cell, _ in members}
        left_out = sorted({str(cell["identifier"]) for cell in candidates if cell["shape"] not in shapes})
        for cell, sidecar in members:
            self._write(cell, sidecar, folder / _file_name(cell["shape"]), ref=ref, log=log)
        document, index = family_index(ref, members), folder / INDEX
        # Last, so that a serving program that finds the index finds all that it names.
        with _into(folder), _replacing(index) as file:
            file.write(json.dumps(document, indent=2).encode() + b"\n")
        return FetchedFamily(folder, index, document, left_out)

    def _write(self, cell: Document, sidecar: Document, folder: Path, *, ref: str, log: bool) -> Fetched:
        """Write one artifact into a folder of its own."""
        program = sidecar["blobs"]["program"]
        if program["digest"] != cell["program"]["digest"]:
            raise ArtifactGone(
                f"{cell['identifier']}: the artifact was repaired after {ref} was moved to it, its bytes are others",
                hint="submit the manifest again: the ref moves to what is there now",
            )
        document = folder / "artifact.json"
        with _into(folder):
            _require_own_folder(document, program)
            path = self.download(program, folder)
            log_path = self.download(sidecar["blobs"]["log"], folder) if log and sidecar["blobs"].get("log") else None
            kept = [sidecar["blobs"].get(when) for when in ("before", "after") if log]
            texts = tuple(self.download(blob, folder) for blob in kept if blob)
            with _replacing(document) as file:
                file.write(json.dumps(sidecar, indent=2).encode() + b"\n")
        return Fetched(folder, path, document, log_path, sidecar, texts)

    def _sidecar_of(self, cell: Document) -> Document:
        try:
            return self.artifact(cell["key"])
        except NotFound as error:
            raise ArtifactGone(f"{cell['identifier']}: {error.message}", hint=error.hint) from None

    # --- HTTP ---------------------------------------------------------------------------------------------------

    def _get(self, path: str, **params: Any) -> Document:
        document: Document = self._request("GET", path, params=params).json()
        return document

    def _items(self, path: str, **params: Any) -> list[Any]:
        items: list[Any] = self._get(path, **params)["items"]
        return items

    def _post(self, path: str, body: Any = None, **options: Any) -> Document:
        document: Document = self._request("POST", path, json=body, **options).json()
        return document

    def _request(self, method: str, path: str, **options: Any) -> httpx.Response:
        import httpx

        def once() -> httpx.Response:
            try:
                return _checked(self._http.request(method, path, **options))
            except httpx.TransportError as error:
                raise self._unreachable(error) from None

        return _retry(once)

    def _unreachable(self, error: Exception) -> FarmFault:
        return FarmFault(
            f"cannot reach the farm at {self.url}: {error or type(error).__name__}",
            hint="is it running? FARM_API_URL names it, `farm doctor` looks at it",
        )

    def _stream(self, path: str, after: str | None, silence: float) -> Iterator[tuple[str, str, str]]:
        """Yield name, id and data of server-sent events until the server ends the stream."""
        headers = {"Accept": "text/event-stream", **({"Last-Event-ID": after} if after else {})}
        with self._streaming(path, timeout=silence, headers=headers) as lines:
            yield from _events(lines)

    @contextlib.contextmanager
    def _streaming(self, path: str, *, timeout: float, **options: Any) -> Iterator[Iterator[str]]:
        """Open an answer that comes line by line, with at most `timeout` seconds of silence."""
        import httpx

        try:
            with self._http.stream("GET", path, timeout=httpx.Timeout(10.0, read=timeout), **options) as response:
                if response.is_error:
                    response.read()
                _checked(response)
                yield response.iter_lines()
        except httpx.TransportError as error:
            raise self._unreachable(error) from None

    def _put(self, put: Document, path: Path, count: Callable[[int], None]) -> None:
        """Send one blob, or a part of it; the signature covers its size, and a whole blob's SHA-256."""
        import httpx

        headers = {**put["headers"], "Content-Length": str(put["size"])}

        def once() -> None:
            sent = 0

            def chunks() -> Iterator[bytes]:
                nonlocal sent
                with path.open("rb") as file:
                    file.seek(put["start"])
                    while chunk := file.read(min(CHUNK, put["size"] - sent)):
                        yield chunk
                        sent += len(chunk)
                        count(len(chunk))

            try:
                response = self._storage.put(put["url"], content=chunks(), headers=headers)
            except (httpx.TransportError, httpx.LocalProtocolError) as error:
                count(-sent)
                raise StorageUnavailable(f"cannot upload {path.name}: {error or type(error).__name__}") from None
            if response.status_code == 400:
                raise UsageError(f"object storage refuses {path.name}", hint="did the file change meanwhile?")
            if not response.is_success:
                count(-sent)
                raise _storage_answer(response, f"cannot upload {path.name}")

        _retry(once)

    def download(self, blob: Mapping[str, Any], folder: Path) -> Path:
        """Write a sidecar's blob into a folder, under its own name, and return its path."""
        import httpx

        name = _file_name(blob["path"])
        try:
            location = self._request("GET", f"/v1/blobs/{blob['digest']}").headers["Location"]
        except NotFound:
            raise _gone(name, "is not in object storage any more") from None

        def once() -> Path:
            try:
                with self._storage.stream("GET", location) as response, _replacing(folder / name) as file:
                    if response.status_code == 404:
                        raise _gone(name, "is not in object storage any more")
                    if response.is_error:
                        response.read()
                        raise _storage_answer(response, f"cannot download {name}")
                    _copy_checked(response.iter_bytes(CHUNK), file, blob, name)
            except httpx.TransportError as error:
                raise StorageUnavailable(f"cannot download {name}: {error or type(error).__name__}") from None
            return folder / name

        return _retry(once)


# --- what fetch takes -----------------------------------------------------------------------------------------------


def choose(
    cells: Sequence[Document],
    name: str,
    target: str,
    precision: str,
    shape: str | None = None,
    toolchain: str = "",
    *,
    ref: str = "latest",
) -> list[Document]:
    """Return the cells of a ref that fit; they differ in nothing but their shape and toolchain.

    Raises NotFound with what is there, UsageError where the device would have to be guessed.
    """
    of_model = [cell for cell in cells if cell["model"] == name]
    if not of_model:
        names = sorted({str(cell["model"]) for cell in cells})
        near = difflib.get_close_matches(name, names, 3) or names[:10]
        raise NotFound(f"{ref} has no model {name}", hint=f"it has {', '.join(near)}" if near else "it is empty")
    targets = {target, f"migraphx/{target}"}
    fitting = [
        cell
        for cell in of_model
        if cell["target"] in targets
        and _plain(cell["precision"]) == _plain(precision)
        and shape in (None, cell["shape"])
        and str(cell["toolchain"]).startswith(toolchain)
    ]
    if not fitting:
        there = sorted({str(cell["identifier"]) for cell in of_model})
        wanted = "/".join(filter(None, (name, target, precision, shape)))
        if toolchain:
            wanted += f" made by {toolchain}"
            there = sorted({f"{cell['identifier']} ({cell['toolchain']})" for cell in of_model})
        raise NotFound(f"{ref} has no {wanted}", hint=f"it has {', '.join(there[:10])}")
    _require_one(fitting, "device", "--target")
    return fitting


def _require_one(cells: Sequence[Document], what: str, option: str) -> None:
    found = sorted({str(cell[what]) for cell in cells})
    if len(found) > 1:
        all_of_them = ", or --family for all" if what == "shape" else ""
        hint = f"say {option}, one of {', '.join(found)}{all_of_them}"
        raise UsageError(f"{cells[0]['model']} is there for {len(found)} {what}s", hint=hint)


def _plain(precision: str) -> str:
    return precision.replace("+", "-")


# --- a farm of one's own --------------------------------------------------------------------------------------------


def running_farm(data_dir: Path) -> tuple[str, str] | None:
    """Return address and token of the farm that `farm up` or `farm run` runs in a data folder, None if none does."""
    try:
        document = json.loads((data_dir / "farm.json").read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        return None
    return str(document["api_url"]), str(document["api_token"])


# --- details --------------------------------------------------------------------------------------------------------


def _retry(once: Callable[[], T]) -> T:
    """Do it until it is done: what fails by the farm's fault gets a few more tries, anything else is raised at once."""
    for delay in RETRY_DELAYS:
        try:
            return once()
        except FarmFault:
            time.sleep(delay)
    return once()


def _build(build_id: str) -> str:
    if not re.fullmatch(r"@latest|(b-)?[0-9a-f]{1,16}", build_id):
        raise UsageError(f"{build_id!r} is no build id", hint="b- and hex digits, a unique start of them, or @latest")
    return build_id if build_id.startswith(("b-", "@")) else f"b-{build_id}"


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


def _checked(response: httpx.Response) -> httpx.Response:
    """Return the response, or raise the error that the farm answered with."""
    if response.status_code < 400:
        return response
    try:
        document = response.json()
        detail = str(document["detail"])
    except (ValueError, KeyError, TypeError):
        document, detail = {}, f"{response.url} answers {response.status_code} {response.reason_phrase}"
    kind = _KINDS.get(str(document.get("type", "")).rpartition(":")[2]) or _by_status(response.status_code)
    if kind is errors.ManifestError:
        raise errors.ManifestError([Problem(**problem) for problem in document.get("problems", [])])
    raise kind(detail, hint=str(document.get("hint", "")))


def _tree(kind: type[FarmError]) -> dict[str, type[FarmError]]:
    found = {kind.__name__: kind}
    for child in kind.__subclasses__():
        found |= _tree(child)
    return found


_KINDS = _tree(FarmError)


def _by_status(status: int) -> type[FarmError]:
    if status in (401, 403):
        return errors.NotAllowed
    exact = {404: NotFound, 409: errors.Conflict, 410: ArtifactGone}
    return exact.get(status) or (FarmFault if status >= 500 else UsageError)


def _events(lines: Iterator[str]) -> Iterator[tuple[str, str, str]]:
    """Parse server-sent events: fields until an empty line make one event; comments keep the line alive."""
    name, identifier = "message", ""
    data: list[str] = []
    for line in lines:
        if not line:
            if data:
                yield name, identifier, "\n".join(data)
            name, data = "message", []
            continue
        field, _, value = line.partition(":")
        value = value.removeprefix(" ")
        match field:
            case "event":
                name = value
            case "id":
                identifier = value
            case "data":
                data.append(value)


def _copy_checked(chunks: Iterator[bytes], file: Any, blob: Mapping[str, Any], name: str) -> None:
    digest, size = hashlib.sha256(), 0
    for chunk in chunks:
        size += len(chunk)
        if size > blob["size"]:
            break
        digest.update(chunk)
        file.write(chunk)
    if size != blob["size"] or digest.hexdigest() != blob["digest"]:
        raise _gone(name, "is damaged in object storage: its bytes are not those that were published")


def _file_name(name: object) -> str:
    """Return what the farm names a file, where that is one: it becomes part of a path here."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", str(name)):
        raise ArtifactGone(f"the farm names a file {name!r}, which is refused")
    return str(name)


@contextlib.contextmanager
def _into(folder: Path) -> Iterator[None]:
    """Make a folder and write into it. Raises UsageError where that fails."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        message = f"cannot write into {folder}: {error.strerror or error}"
        raise UsageError(message, hint="choose another folder") from None


def _require_own_folder(document: Path, program: Mapping[str, Any]) -> None:
    """Refuse to write over the sidecar of another program, which nothing would describe any more."""
    try:
        other = str(json.loads(document.read_text())["blobs"]["program"]["path"])
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return
    if other != program["path"] and (document.parent / other).is_file():
        message = f"{document} describes {other}, which is beside it"
        raise UsageError(message, hint="an artifact has a folder of its own: choose another, or fetch the --family")


def _gone(name: str, how: str) -> ArtifactGone:
    return ArtifactGone(f"{name} {how}", hint="submit the manifest again: what is damaged is compiled again")


def _storage_answer(response: httpx.Response, what: str) -> StorageUnavailable:
    return StorageUnavailable(f"{what}: object storage answers {response.status_code} {response.text[:200]}")


@contextlib.contextmanager
def _replacing(path: Path) -> Iterator[Any]:
    """Write a file under another name and give it its own once it is whole, so that nobody sees a part."""
    descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
        Path(temporary).chmod(0o644)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink()
        raise
