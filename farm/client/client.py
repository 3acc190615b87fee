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
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, cast

from farm import entry_points, errors
from farm.artifacts.refs import ListedRefs, RefView, ShownRef, SnapshotCell
from farm.client.transfers import KeptAnswers, OnUpload, default_cache, upload
from farm.client.transport import BUILD, Api, Transport, build_named, events, named, topic
from farm.files import read_private
from farm.jobs.rows import BuildEvent, CancelledCells
from farm.matrix.planned import ShownCell, ShownPlan
from farm.results.report import BuildChange, BuildView, Differences, JudgedCell, PastCell, Report
from farm.units import by_number, counted
from farm.wire.checking import read, unexpected

if TYPE_CHECKING:
    import httpx

    from farm.client.apis import JobsApi, PoolsApi, TokensApi, TuningApi, UpkeepApi, WorkersApi
    from farm.client.artifact_apis import ArtifactsApi
    from farm.client.fetching import Fetched, FetchedFamily, ReaderTrust
    from farm.client.freezing import Frozen
    from farm.settings import Settings


FOLLOW_DELAYS = (0.2, 0.5, 1.0, 2.0, 5.0, 5.0, 5.0, 5.0)
"""Seconds between tries to follow a build's events again; after the last one the farm counts as gone."""

SILENCE = 20.0
"""Seconds without a byte after which an event stream is taken for dead; the server sends something every two."""

POLL = 5.0  # Seconds without a byte after which the state is read instead, once a stream has failed.


class FarmClient:
    """A connection to one farm, in one namespace. Use it as a context manager; it may be shared by threads.

    It has what a build needs, from `submit` to `fetch`. All else is by its topic: `refs`, `artifacts`,
    `jobs`, `workers`, `pools`, `tokens`, `tuning` and `upkeep`. Extensions add topics, such as `webhooks`.
    """

    refs: cached_property[RefsApi] = topic("client", "RefsApi")
    artifacts: cached_property[ArtifactsApi] = topic("artifact_apis", "ArtifactsApi")
    jobs: cached_property[JobsApi] = topic("apis", "JobsApi")
    workers: cached_property[WorkersApi] = topic("apis", "WorkersApi")
    pools: cached_property[PoolsApi] = topic("apis", "PoolsApi")
    tokens: cached_property[TokensApi] = topic("apis", "TokensApi")
    tuning: cached_property[TuningApi] = topic("apis", "TuningApi")
    upkeep: cached_property[UpkeepApi] = topic("apis", "UpkeepApi")

    def __init__(
        self,
        url: str,
        token: str = "",
        *,
        namespace: str = "",
        timeout: float = 30.0,
        cache: Path | None = None,
        trust: ReaderTrust | None = None,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        """Connect to the farm at `url`; `timeout` is in seconds and for each answer, not for a whole build.

        Without a `namespace` it is that of the token, for the administrator's `main`. `cache` is a folder that keeps
        what is downloaded. `trust` says whose signatures count; without it none is asked for.
        """
        self.transport = Transport(url, token, namespace=namespace, timeout=timeout, transport=transport)
        self.url = self.transport.url
        self.kept = KeptAnswers(cache, f"{self.url} {namespace}", token)
        self.cache, self.trust = cache, trust

    @classmethod
    def from_settings(cls, settings: Settings, **options: Any) -> Self:
        """Connect to the farm that the settings name, else to the one that `farm up` runs in `data_dir`.

        Raises NotFound if there is neither.
        """
        url, token = settings.api_url, settings.api_token.get_secret_value()
        if not url:
            running = running_farm(settings.data_dir)
            if running is None:
                hint = "set FARM_API_URL, start one with `farm up`, or use `farm run MANIFEST`"
                raise errors.NotFound(f"no farm: api_url is not set, and none runs in {settings.data_dir}", hint=hint)
            url, token = running[0], token or running[1]
        defaults = {"cache": default_cache(), "trust": trust_of(settings)}
        return cls(url, token, namespace=settings.namespace, **{**defaults, **options})

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self.transport.close()

    if not TYPE_CHECKING:  # Else a type checker would believe every name.

        def __getattr__(self, name: str) -> Api:
            """Return the topic that an extension adds under this name."""
            kind = None if name.startswith("_") else entry_points.find(entry_points.APIS, name)
            if kind is None:
                raise AttributeError(f"a FarmClient has no {name}, and no extension adds it")
            return self.__dict__.setdefault(name, kind.of(self))

    # --- builds -------------------------------------------------------------------------------------------------

    def health(self) -> dict[str, str]:
        """Check that the farm answers. Raises FarmFault if it does not."""
        return self.transport.get("/v1/health", dict[str, str])

    def plan(self, frozen: Frozen) -> ShownPlan:
        """Return what a submission would do: cells, hits, misses and why, missing blobs. Changes nothing.

        Raises ManifestError with every problem found.
        """
        # Each cell may also be a `CellPlan` elsewhere, and to prepare that check takes longer than to plan.
        found = self.transport.post("/v1/plan", ShownPlan[ShownCell], frozen.submission, timeout=300.0)
        return cast(ShownPlan, found)

    def submit(
        self, frozen: Frozen, *, plan: ShownPlan | None = None, progress: OnUpload | None = None
    ) -> SubmittedBuild:
        """Upload what the farm lacks, create the build and return it. Repeating it makes no second build.

        `plan` is what `plan` returned for it, if that was asked already.
        """
        kept, missing = (plan.get("kept", ""), plan["missing_blobs"]) if plan else ("", [])
        try:
            return self._create(frozen, kept, missing, progress)
        except errors.InputsMissing as error:  # Something may have gone since the plan, too.
            return self._create(frozen, error.kept, error.blobs, progress)

    def _create(self, frozen: Frozen, kept: str, missing: Sequence[str], progress: OnUpload | None) -> SubmittedBuild:
        """Upload blobs, and create the build of what the farm has `kept` under this name; else send the submission."""
        self.upload(frozen.files_of(missing), progress)
        if kept:
            with contextlib.suppress(errors.NotPlanned):
                found = self.transport.post(_path(frozen.build_id), BuildView, params={"kept": kept}, timeout=300.0)
                return SubmittedBuild(self, self._asked_for(frozen.build_id, found))
        headers = {"Idempotency-Key": frozen.build_id}
        found = self.transport.post("/v1/builds", BuildView, frozen.submission, timeout=300.0, headers=headers)
        return SubmittedBuild(self, self._asked_for(frozen.build_id, found))

    def _asked_for(self, build_id: str, found: BuildView) -> BuildView:
        """Return a build that was answered, if it is the one of this whole id. Raises UsageError for another."""
        if found["id"] != build_id and re.fullmatch(r"b-[0-9a-f]{16}", build_id):
            raise unexpected(self.url, f"build {found['id']} in place of {build_id}")
        return found

    def upload(self, files: Mapping[str, Path], progress: OnUpload | None = None) -> int:
        """Bring blobs (by digest) to object storage; return the bytes sent.

        Skips existing blobs, and parts of large blobs that an earlier try has uploaded.
        """
        return upload(self.transport, files, progress)

    def attach(self, named: str) -> SubmittedBuild:
        """Return a build that was submitted before, named as in `find_build`. Raises NotFound."""
        return SubmittedBuild(self, self.build(self.find_build(named)))

    def build(self, build_id: str) -> BuildView:
        """Return a build by id, unique start of an id, or `@latest`. Raises NotFound."""
        return self._asked_for(build_id, self.transport.get(_path(build_id), BuildView))

    def builds(self, limit: int = 50, *, label: str = "") -> list[BuildView]:
        """Return the newest builds; with `label` (KEY=VALUE) those that have it."""
        having = {"label": label} if label else {}
        return self.transport.items("/v1/builds", BuildView, limit=limit, **having)

    def find_build(self, named: str) -> str:
        """Return the id of a build: by id, unique start, `@latest`, manifest's name, label (KEY=VALUE) or git commit.

        A commit is the label `commit`, by its whole name or the first 17 digits or more; commands in a pipeline set it.
        Of several builds it is the newest. Raises NotFound.
        """
        commit = f"commit={named}" if re.fullmatch(r"[0-9a-f]{17,64}", named) else ""
        if label := commit or (named if "=" in named else ""):
            if found := self.builds(1, label=label):
                return found[0]["id"]
            raise errors.NotFound(f"no build has the label {label}", hint="`farm status` lists the newest builds")
        if not BUILD.fullmatch(named):
            return self._find_by_name(named)
        if re.fullmatch(r"[0-9a-f]{1,15}", named):  # As `face`: of a name and the start of an id the name counts.
            with contextlib.suppress(errors.NotFound):
                return self._find_by_name(named)
        return self.build(named)["id"]

    def _find_by_name(self, name: str) -> str:
        """Return the id of the newest build of a manifest's name. Raises UsageError for another text, NotFound."""
        if not re.fullmatch(r"[a-z0-9][a-z0-9._-]*", name):
            known = "an id or its unique start, @latest, a manifest's name, a label K=V, or a git commit"
            raise errors.UsageError(f"{name!r} is not a build id, and names no build", hint=known)
        found = next((build["id"] for build in self.builds(1000) if build["name"] == name), None)
        if not found:
            raise errors.NotFound(f"no build is named {name}", hint="`farm status` lists the newest builds")
        return found

    def cells(self, build_id: str) -> list[JudgedCell]:
        """Return a build's cells, judged, in the order of its manifest."""
        return self.transport.items(f"{_path(build_id)}/cells", JudgedCell)

    def report(self, build_id: str) -> Report:
        """Return a build with its cells as one document."""
        found = self.transport.get(f"{_path(build_id)}/report", Report)
        self._asked_for(build_id, found["build"])
        return found

    def junit(self, build_id: str) -> str:
        """Return a build's report as JUnit XML."""
        return self.transport.request("GET", f"{_path(build_id)}/junit").text

    def page_of(self, build: BuildView) -> str:
        """Return the URL of a build's page, for a browser; `/cells/IDENTIFIER` after it is that of a cell."""
        return f"{self.url}/ui/ns/{build['namespace']}/builds/{build['id']}"

    def diff(self, left: str, right: str) -> Differences:
        """Return in what two builds differ."""
        from farm.results.verdict import differences

        return differences(self.report(left), self.report(right), self.artifacts.get)

    def history(self, cell: str, limit: int = 50) -> list[PastCell]:
        """Return how a cell (by its identifier) ended in the newest builds that had it, the newest first."""
        return self.transport.items("/v1/history", PastCell, cell=cell, limit=limit)

    def cancel(self, build_id: str) -> int:
        """End every cell of a build that has not ended; return how many those were."""
        return self.transport.post(f"{_path(build_id)}/cancel", CancelledCells)["cancelled"]

    def plan_retry(
        self, build_id: str, *, failed: bool = False, only: Sequence[str] = (), new_id: str = ""
    ) -> ShownPlan:
        """Say what `retry` would do; as `plan`."""
        body = _retry(failed, only, new_id)
        return self.transport.post(f"{_path(build_id)}/retry/plan", ShownPlan, body, timeout=300.0)

    def retry(
        self, build_id: str, *, failed: bool = False, only: Sequence[str] = (), new_id: str = ""
    ) -> SubmittedBuild:
        """Create a build with an ended build's cells as they were planned, and return it; what is published is a hit.

        With `failed` it has only the cells that did not succeed, with `only` those whose identifiers fit one of these
        patterns. `new_id` is its id (`new_build_id`).

        Raises NotFound if there is nothing to do, Conflict if the build has not ended.
        """
        body = _retry(failed, only, new_id)
        return SubmittedBuild(self, self.transport.post(f"{_path(build_id)}/retry", BuildView, body, timeout=300.0))

    def pause(self, build_id: str) -> BuildView:
        """Hand out no more of a build's jobs, and return it. Raises Conflict if it has ended."""
        return self.transport.post(f"{_path(build_id)}/pause", BuildView)

    def resume(self, build_id: str) -> BuildView:
        """Hand out the jobs of a paused build again, and return it. Raises Conflict if it has ended."""
        return self.transport.post(f"{_path(build_id)}/resume", BuildView)

    def watch(self, build_id: str, *, after: str | None = None) -> Iterator[BuildEvent]:
        """Yield a build's events until its report is written, from the first one or from the one after `after`.

        A lost connection is made again without gap or repeat. An event of type `reset` says that events were missed
        (or that none come through, as behind some proxies): read the state.

        Raises FarmFault when the farm stays away.
        """
        for data in _follow(self, build_id, after):
            yield read(data, BuildEvent, self.url)

    def changes(self, build_id: str, *, after: str | None = None) -> Iterator[BuildChange]:
        """Yield what changes in a build until its report is written: cells as they are now, not the whole report.

        Without `after`, the first change is a `reset`: read the report then. A lost connection is made again
        without gap or repeat. Raises as `watch`.
        """
        for data in _follow(self, build_id, after, cells=True):
            yield read(data, BuildChange, self.url)

    # --- programs -----------------------------------------------------------------------------------------------

    def ls(self, ref: str = "latest") -> list[SnapshotCell]:
        """Return the cells that a ref names, each with cache key and program; as `refs.cells`."""
        return self.refs.cells(ref)

    def fetch(
        self,
        name: str,
        target: str,
        precision: str,
        shape: str | None = None,
        *,
        ref: str = "latest",
        folder: Path | str,
        toolchain: str = "",
        log: bool = False,
        with_kernels: bool = False,
        sample: bool = False,
        force: bool = False,
        layout: str = "plain",
        python: str = "",
    ) -> Fetched:
        """Write a compiled program and its sidecar (`<program>.artifact.json`) into `folder`, checked byte by byte.

        Models and shapes may share a folder. `shape` may be left out if the model has one. `toolchain` is the start
        of its id; without it the one that was submitted last is taken. `with_kernels` places MIOpen's kernel binaries
        in `<program>.kernels`, `sample` one input with its expected outputs next to the program. Only with `force` it
        overwrites files that no fetch has written. Another `layout` (`farm.client.packs.Layout`) writes what a serving
        stack loads instead; `python` is the interpreter whose ONNX Runtime will serve, if it is not this one.

        Raises NotFound if nothing matches, UsageError if several do or a file of the user's is in the way,
        ArtifactGone if the bytes are not those that the ref names.
        """
        from farm.client.fetching import choose, place_kernels, write_artifact
        from farm.results.ref_rules import last

        packed, folder, bring = layout != "plain", Path(folder), self.artifacts.bring
        cell = last(choose(self.ls(ref), name, target, precision, shape, toolchain, ref=ref, packed=packed, one=True))
        member = cell, self.artifacts.sidecar_of(cell)
        if packed:
            write: Callable[..., Fetched] = entry_points.required(entry_points.LAYOUTS, layout)
            return write(self, member, folder, layout, ref=ref, python=python, force=force)
        sidecar, signed = self.artifacts.described(member, ref)
        found = write_artifact(bring, cell, sidecar, folder, log=log, sample=sample, force=force, signed=signed)
        blob = sidecar["blobs"].get("kernel_cache") if with_kernels else None
        if not blob:
            return found
        kernels = found.program.with_name(f"{found.program.name}.kernels")
        place_kernels(bring, blob, kernels)
        return replace(found, kernels=kernels)

    def fetch_family(
        self,
        name: str,
        target: str,
        precision: str,
        *,
        ref: str = "latest",
        folder: Path | str,
        toolchain: str = "",
        log: bool = False,
        force: bool = False,
    ) -> FetchedFamily:
        """Write a model's programs for every shape, each with its sidecar into `folder/<shape>`, and `family.json`.

        All members are of one model file and one toolchain (of those that `toolchain` begins), the ones of which an
        artifact was submitted last; `left_out` names the others. Raises as `fetch`.
        """
        from farm.client.fetching import FetchedFamily, choose, write_family
        from farm.results.ref_rules import family

        artifacts, folder = self.artifacts, Path(folder)
        cells = choose(self.ls(ref), name, target, precision, None, toolchain, ref=ref)
        chosen = family((cell, artifacts.sidecar_of(cell)) for cell in cells)
        members = [(member[0], *artifacts.described(member, ref)) for member in chosen]
        index, document = write_family(artifacts.bring, members, folder, ref=ref, log=log, force=force)
        shapes = {cell["shape"] for cell, _ in chosen}
        left_out = sorted({cell["identifier"] for cell in cells if cell["shape"] not in shapes})
        return FetchedFamily(folder, index, document, left_out)


def _path(build_id: str) -> str:
    return f"/v1/builds/{build_named(build_id)}"


def _retry(failed: bool, only: Sequence[str], new_id: str) -> dict[str, object]:
    from farm.client.freezing import new_build_id

    return {"build_id": new_id or new_build_id(), "failed": failed, **({"only": list(only)} if only else {})}


def _follow(client: FarmClient, build_id: str, after: str | None, **params: bool) -> Iterator[str]:
    """Yield the data of a build's server-sent events until its report is written; see `FarmClient.watch`."""
    if build_id == "@latest":
        build_id = client.build(build_id)["id"]  # One build to its end, whatever is submitted meanwhile.
    position, failures = after, 0
    while True:
        silence, path = POLL if failures else SILENCE, f"{_path(build_id)}/events"
        headers = {"Accept": "text/event-stream", **({"Last-Event-ID": position} if position else {})}
        try:
            with client.transport.lines(path, timeout=silence, headers=headers, params=params) as lines:
                for name, identifier, data in events(lines):
                    failures = 0
                    if name == "end":
                        return
                    position = identifier or position
                    yield data
        except errors.FarmFault:
            failures += 1
            if failures > len(FOLLOW_DELAYS):
                raise
        time.sleep(FOLLOW_DELAYS[max(failures - 1, 0)])
        if failures > 1:
            with contextlib.suppress(errors.FarmFault):
                if client.build(build_id)["state"] == "reported":
                    return
                # The farm answers and only its events do not come through: go on asking, for as long as it takes.
                failures = 1
                yield json.dumps({"type": "reset", "id": position or "", "at": time.time(), "build": build_id})


class RefsApi(Api):
    """The refs of a namespace: names that point to artifacts, one for each cell."""

    def all(self) -> list[str]:
        """Return the tags of the refs."""
        return self._transport.items("/v1/refs", str)

    def moves(self) -> list[RefView]:
        """Return where each ref points, since when, and which namespace has it."""
        found = self._transport.get("/v1/refs", ListedRefs, moves=True)["refs"] or []
        return sorted(found, key=lambda ref: by_number(ref["tag"]))

    def get(self, tag: str) -> ShownRef:
        """Return a ref and the cells that it names. Raises NotFound."""
        return self._trusted(tag, lambda: self.unchecked(tag))

    def unchecked(self, tag: str) -> ShownRef:
        """Return a ref as the farm answers it, whatever this client trusts. Raises NotFound."""
        return self._transport.ref(tag)

    def _trusted(self, tag: str, ask: Callable[[], ShownRef]) -> ShownRef:
        trust = self._client.trust
        return trust.ref(tag, ask) if trust else ask()

    def cells(self, tag: str = "latest") -> list[SnapshotCell]:
        """Return the cells that a ref names, each with cache key and program. Raises NotFound.

        If the farm is away, what it answered last counts (`FarmClient.kept`).
        """
        kept = self._client.kept
        found = self._trusted(tag, lambda: cast(ShownRef, kept.ask(f"ref {tag}", lambda: self.unchecked(tag))))
        return sorted(found["cells"].values(), key=lambda cell: by_number(cell["identifier"]))

    def move(self, tag: str, source: str, *, previous: bool = False, generation: int | None = None) -> RefView:
        """Let a ref point to what `source` names, or with `previous` named before its last move; return it.

        `generation` makes it conditional: only if the ref has that one (0: if there is none).

        Raises NotFound without such a source, Conflict if the condition does not hold.
        """
        rolls_back = previous and source == tag
        before = self.get(tag) if rolls_back else None
        if before and generation is None:
            # Else a request that is repeated, because its answer was lost, would roll forward again.
            generation = before["generation"]
        signed, generation = self._promised(tag, source, generation, previous=previous)
        body, path = {"source": source, "previous": previous, **signed}, f"/v1/refs/{named('ref', tag)}"
        try:
            return self._transport.ask("PUT", path, RefView, json=body, params=_condition(generation))
        except errors.Conflict:
            now = self.get(tag) if rolls_back else None
            if not before or not now or (now["generation"] - 1, now["snapshot"]) != (generation, before["previous"]):
                raise
            return now  # It was us: the answer to the first request was lost.

    def remove(self, tag: str, *, generation: int | None = None) -> None:
        """Forget a ref; the artifacts that it names stay. Raises as `move`."""
        with contextlib.suppress(errors.ArtifactGone):  # What cannot be read can be deleted.
            self.unchecked(tag)
        signed, generation = self._promised(tag, "", generation)
        path, condition = f"/v1/refs/{named('ref', tag)}", _condition(generation)
        # It may be deleted meanwhile, perhaps by our first request, whose answer was lost.
        with contextlib.suppress(errors.NotFound):
            self._transport.request("DELETE", path, params=condition, json=signed or None)

    def _promised(
        self, tag: str, source: str, generation: int | None, *, previous: bool = False
    ) -> tuple[dict[str, str], int | None]:
        """Return what a promoter sends with a move, and the generation from which the ref moves."""
        trust = self._client.trust
        promise = trust.promise(self._client, tag, source, previous=previous) if trust else None
        if promise is None:
            return {}, generation
        return {"signed": promise[0]}, promise[1] if generation is None else generation


def _condition(generation: int | None) -> dict[str, int]:
    return {} if generation is None else {"generation": generation}


def trust_of(settings: Settings) -> ReaderTrust | None:
    """Return whom a client trusts by its settings; None if they say nothing. Raises UsageError for bad files."""
    if not (settings.trust_policy or settings.signing_key):
        return None
    for _, kind in entry_points.load(entry_points.TRUST):
        found: ReaderTrust = kind.from_settings(settings)
        return found
    name = "trust_policy" if settings.trust_policy else "signing_key"
    hint = "install the farm's own, or unset it"
    raise errors.UsageError(f"`{name}` is set, and no installed extension reads it", hint=hint)


# --- a farm of one's own --------------------------------------------------------------------------------------------


def running_farm(data_dir: Path) -> tuple[str, str] | None:
    """Return address and token of the farm that `farm up` or `farm run` runs in a data folder, None if none does.

    Raises NotAllowed for a record that no farm of this user wrote: a token would go wherever it says.
    """
    path = data_dir / "farm.json"
    try:
        document = json.loads(read_private(path, 1 << 20))
        url, token = str(document["api_url"]), str(document["api_token"])
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None
    except OSError as error:
        url, token = error.strerror or "", ""
    if not re.fullmatch(r"http://127\.0\.0\.1:[0-9]+", url):
        hint = "it came with the folder: delete the file, or set FARM_API_URL"
        raise errors.NotAllowed(f"{path} names a farm that is not yours: {url}", hint=hint)
    return url, token


LONGEST_PAUSE = 2.0  # Seconds between two questions whether a build has ended, at most; they grow from a tenth of one.
PATIENCE = 30.0  # Seconds for which a farm that is away is asked again.

_ERRORS: dict[int, type[errors.FarmError]] = {
    kind.exit_code: kind for kind in (errors.CompileFailed, errors.GateFailed, errors.FarmFault)
}


class SubmittedBuild(Mapping[str, Any]):
    """A build and the client that made it. As a mapping it is `document`, the answer to the submission."""

    def __init__(self, client: FarmClient, document: BuildView) -> None:
        self._client = client
        self.document = document
        self.url = client.page_of(document)
        """The build's page, for a browser."""

    @property
    def id(self) -> str:
        """The build's id."""
        return self.document["id"]

    def wait(self, timeout: float | None = None, progress: Callable[[str], object] | None = None) -> Report:
        """Wait for the verdict, and return the build with its cells if it is green.

        `progress` (such as `print`) gets how many cells are in which state, each time that this changes.

        Raises as `farm watch` exits: CompileFailed (1) if a cell failed, GateFailed (3) if only gates did, FarmFault
        (6) if it ended by the farm's fault, or the farm stays away. `report` then has the cells. Raises StillRunning
        (8) after `timeout` seconds; the build goes on.
        """
        end = None if timeout is None else time.monotonic() + timeout
        pause, heard, said = 0.1, time.monotonic(), ""
        while True:
            try:
                found = self._client.build(self.id)
                heard = time.monotonic()
                if progress and said != (said := counted(found["counts"])):
                    progress(said)
                if found["state"] == "reported":
                    break
            except errors.FarmFault:
                if time.monotonic() - heard > PATIENCE:
                    raise
            left = pause if end is None else end - time.monotonic()
            if left <= 0:
                hint = f"look at {self.url}"
                raise errors.StillRunning(f"build {self.id} goes on after {timeout:g} seconds", hint=hint)
            time.sleep(min(pause, left))
            pause = min(2 * pause, LONGEST_PAUSE)
        verdict = found["verdict"]
        if verdict and verdict["exit_code"]:
            kind = _ERRORS.get(verdict["exit_code"], errors.CompileFailed)
            raise kind(f"build {self.id}: {verdict['text']}", hint=self.url)
        return self.report()

    def report(self) -> Report:
        """Return the build with its cells, as it is now."""
        return self._client.report(self.id)

    def cells(self) -> list[JudgedCell]:
        """Return its cells, judged, as they are now."""
        return self._client.cells(self.id)

    def to_frame(self) -> Any:
        """Return its cells, as they are now, as a pandas.DataFrame. Raises UsageError without pandas."""
        from farm.client.tables import frame

        return frame(self.cells())

    def export(self, file: str | Path) -> None:
        """Write its cells, as they are now, to a `.csv` or (with pyarrow) a `.parquet` file."""
        from farm.client.tables import write

        write(self.cells(), Path(file))

    def cancel(self) -> int:
        """End every cell that has not ended; return how many those were."""
        return self._client.cancel(self.id)

    def _repr_html_(self) -> str:
        from farm.client.tables import html

        cells: list[JudgedCell] = []
        with contextlib.suppress(errors.FarmError):  # A notebook also shows what is over.
            cells = self.cells()
        return html(f"{self.document['name']} {self.id}", self.url, cells)

    def __getitem__(self, name: str) -> Any:
        return cast(Mapping[str, Any], self.document)[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.document)

    def __len__(self) -> int:
        return len(self.document)

    def __repr__(self) -> str:
        return f"<build {self.id}, {self.url}>"
