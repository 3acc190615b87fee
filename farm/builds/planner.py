"""Plans builds: a submission is read and its matrix expanded once, for its plan and for the build that follows.

Models in buckets that the operator lists (`s3:` sources) the farm reads itself, checked in a sealed child.
"""

from __future__ import annotations

import json
import tempfile
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import cast

from farm.artifacts.inventory import lacking, rebuild, without_program
from farm.artifacts.refs import Refs, SnapshotCell
from farm.artifacts.s3 import S3Store
from farm.artifacts.storage import MAIN, readable
from farm.builds.plan import Plan, estimate_all, make_plan, needed_blobs
from farm.compiling.asking import check_of
from farm.compiling.child_process import Seal, ask_once
from farm.compiling.failures import ChildLimits, Failure
from farm.errors import ManifestError, NotPlanned, UsageError
from farm.jobs.estimate import Compile
from farm.jobs.facts import ArtifactFacts
from farm.jobs.rows import PoolView
from farm.jobs.state import AttemptLimits, Fault, keys_of, policy_of
from farm.manifest.entries import Manifest
from farm.manifest.parsing import parse_manifest
from farm.matrix.cells import Cell, expand
from farm.matrix.combinations import Combinations, combine
from farm.matrix.planned import CellPlan, SubmissionDocument
from farm.models.frozen import FrozenModel, UnreadableModel, read_model
from farm.results.ref_rules import LATEST, PROD, given, readers_order
from farm.runner.documents import CheckAnswer
from farm.settings import Settings
from farm.spec import Device, SpecDocument, comparable, digest_of
from farm.store import Store
from farm.targets.pools import Pool, Target, in_use

SIZE_LIMIT = 16 << 30  # Bytes of one model at most, with its external data.
MAX_PARTS = 1000  # Files of external data of one model.

CHECK_LIMITS = ChildLimits(time=300.0, memory=32 << 30)


class BucketModels:
    """Freezes models in buckets; unchanged models are not read again."""

    def __init__(self, artifacts: S3Store, buckets: tuple[str, ...]) -> None:
        """Read only from `buckets`: the operator's list, never a name that a manifest brings."""
        self._artifacts = artifacts
        self._buckets = buckets
        self._read = lru_cache(maxsize=256)(self._bring)

    def freeze(self, url: str, format: str, sha256: str = "", outputs: tuple[str, ...] = ()) -> FrozenModel:
        """Copy a model (`s3://bucket/key`) into the farm's blobs and return it.

        Raises UsageError for a bucket that is not listed and a missing or unexpected object, UnreadableModel for an
        object that is not a model.
        """
        bucket, _, key = url.removeprefix("s3://").partition("/")
        if bucket not in self._buckets:
            allowed = ", ".join(self._buckets) or "none"
            hint = f"the operator allows: {allowed} (setting s3_sources); or upload the file with `path:`"
            raise UsageError(f"the farm reads no models from bucket {bucket}", hint=hint)
        wanted = (bucket, key, self._artifacts.source_version(bucket, key), format, outputs)
        model, parts = self._read(*wanted)
        if lacking(self._artifacts, {file["digest"]: file["size"] for file in model["files"]}) or any(
            self._artifacts.source_version(bucket, part) != version for part, version in parts.items()
        ):
            self._read.cache_clear()
            model, _ = self._read(*wanted)
        if sha256 and model["files"][0]["digest"] != sha256:
            raise UsageError(f"{url} does not have the promised SHA-256", hint=f"it has {model['files'][0]['digest']}")
        return model

    def _bring(
        self, bucket: str, key: str, version: str, format: str, outputs: tuple[str, ...]
    ) -> tuple[FrozenModel, dict[str, str]]:
        """Return the model, and the keys of its external data with the versions that were read.

        External data is below the model's own prefix, so that no key leaves it.
        """
        prefix, slash, name_of_model = key.rpartition("/")
        parts: dict[str, str] = {}
        with tempfile.TemporaryDirectory(prefix="farm-source-") as name:
            folder = Path(name)
            path = folder / "model" / (name_of_model or "model")
            path.parent.mkdir()
            self._artifacts.get_source(bucket, key, version, path, limit=SIZE_LIMIT)
            left = SIZE_LIMIT - path.stat().st_size
            locations = _checked_in_child(path, format, outputs, alone=True)["external_files"]
            if len(locations) > MAX_PARTS:
                raise UnreadableModel(f"{path.name} has external data in more than {MAX_PARTS} files")
            for location in locations:
                file, part = path.parent / location, f"{prefix}{slash}{location}"
                parts[part] = self._artifacts.source_version(bucket, part)
                file.parent.mkdir(parents=True, exist_ok=True)
                self._artifacts.get_source(bucket, part, parts[part], file, limit=left)
                left -= file.stat().st_size
            model = read_model(path, format, outputs, check=_checked_in_child)
            for reference in model["files"]:
                self._artifacts.put_blob_file(path.parent / reference["path"], digest=reference["digest"])
            return model, parts


def _checked_in_child(path: Path, format: str, outputs: Sequence[str], *, alone: bool = False) -> CheckAnswer:
    """Check an untrusted model: its parser runs in a child, never in the farm's own process."""
    request, seal = check_of(path, format, outputs, alone=alone), Seal(read=[path.parent])
    found = ask_once(request, CHECK_LIMITS, folder=path.parent.parent, seal=seal)
    if not isinstance(found, Failure):
        return cast(CheckAnswer, found)
    if policy_of(found.kind).fault is Fault.FARM:
        raise UsageError(f"{path.name} could not be checked: {found.message}")
    raise UnreadableModel(f"{path.name}: {found.message}", found.kind)


class KnownArtifacts:
    """The artifacts that a namespace can read: its own and those of `main`."""

    def __init__(self, store: Store, artifacts: S3Store) -> None:
        self._store = store
        self._artifacts = artifacts
        self._filling = threading.Lock()

    def require_index(self, namespace: str) -> None:
        """Fill the index again from object storage if Redis has lost it."""
        for source in readable(namespace):
            # One thread fills it for all: reading every sidecar of a large farm takes a while.
            with self._filling:
                if not self._store.index.complete(source):
                    self._store.index.fill(source, rebuild(self._artifacts, source))

    def facts(self, namespace: str, keys: Sequence[str]) -> dict[str, ArtifactFacts]:
        """Return the facts of the whole artifacts among `keys`; asks `main` first."""
        known: dict[str, ArtifactFacts] = {}
        for source in readable(namespace):
            missing = [key for key in keys if key not in known]
            known |= self._store.index.get_many(source, missing)
        return known

    def whole(self, namespace: str, names: Mapping[str, Sequence[str]]) -> dict[str, ArtifactFacts]:
        """Return the facts of whole artifacts by any name; `names` has the cache keys of each, the best one first."""
        found = self.facts(namespace, [name for all_ in names.values() for name in all_])
        for name in without_program(self._artifacts, found):
            del found[name]  # The index follows within ten minutes.
        return {key: found[name] for key, all_ in names.items() for name in reversed(all_) if name in found}

    def require_inputs(self, cells: Sequence[CellPlan], of: str, remedy: str = "") -> None:
        """Check that object storage has what the planned cells of a build or a ref need. Raises UsageError.

        An earlier plan names these blobs, so marked ones need not be uploaded again. `remedy` says what else helps.
        """
        needed = needed_blobs(cells)
        if absent := [digest for digest, size in needed.items() if not self._artifacts.has_blob(digest, size)]:
            raise UsageError(
                f"{len(absent)} inputs of {of} are gone from object storage, the first is {absent[0]}",
                hint=f"submit the manifest again, which uploads them{remedy}",
            )

    def read_spec(self, namespace: str, key: str) -> SpecDocument | None:
        """Return what the sidecar of an artifact says was compiled."""
        sidecar = self._artifacts.lookup(readable(namespace), key)
        return sidecar["spec"] if sidecar else None


KEPT_BYTES = 128 << 20  # Memory of all kept submissions, roughly; only a larger one is kept alone.
KEPT_SECONDS = 900.0  # Seconds for which a planned submission is kept: its inputs are uploaded meanwhile.


@dataclass(frozen=True, slots=True)
class ReadSubmission:
    """A submission with what was made of it: its matrix, the models in buckets, and its cells.

    The cells are for the pools that were `used`, of all that were `known`, with `slots` by name.
    """

    submission: SubmissionDocument
    matrix: Combinations
    in_buckets: Mapping[str, FrozenModel]
    known: Sequence[Pool]
    used: Sequence[Pool]
    slots: Mapping[str, int]
    cells: Sequence[Cell]

    @property
    def weight(self) -> int:
        """Bytes of memory that it takes, roughly."""
        return weight_of(self.submission, len(self.cells))


def weight_of(submission: SubmissionDocument, cells: int) -> int:
    """Return how many bytes of memory a submission takes that was read, roughly."""
    return 10 * len(json.dumps(submission)) + 2_000 * cells


Asked = tuple[str, str, str]  # Who asked for what: namespace, caller, and `kept_as` of the submission.


class KeptSubmissions:
    """The submissions that were planned last; safe for threads."""

    def __init__(self) -> None:
        self._kept: OrderedDict[Asked, tuple[float, int, ReadSubmission]] = OrderedDict()
        self._lock = threading.Lock()

    def find(self, asked: Asked) -> ReadSubmission | None:
        """Return what was kept; None if it was not, or no longer is."""
        with self._lock:
            kept = self._kept.get(asked)
        return kept[2] if kept and time.monotonic() - kept[0] < KEPT_SECONDS else None

    def make_room(self, weight: int) -> None:
        """Let go of what is too old, and of the oldest until there is room for so many bytes, or nothing is left."""
        now = time.monotonic()
        with self._lock:
            while self._kept and (
                sum(each for _, each, _ in self._kept.values()) + weight > KEPT_BYTES
                or now - next(iter(self._kept.values()))[0] > KEPT_SECONDS
            ):
                self._kept.popitem(last=False)

    def keep(self, asked: Asked, read: ReadSubmission) -> None:
        """Keep a submission, however large; the oldest ones go if they are too many together."""
        with self._lock:
            self._kept.pop(asked, None)
        self.make_room(read.weight)
        with self._lock:
            self._kept[asked] = time.monotonic(), read.weight, read


class Planner:
    """Plans submissions. Writes nothing."""

    def __init__(self, store: Store, artifacts: S3Store, settings: Settings, known: KnownArtifacts) -> None:
        self._store = store
        self._settings = settings
        self._known = known
        self._refs = Refs(artifacts)
        self._bucket_models = BucketModels(artifacts, settings.s3_sources)
        self._kept = KeptSubmissions()

    def plan(self, namespace: str, submission: SubmissionDocument, by: str) -> tuple[Plan, Manifest]:
        """Return a submission's plan and manifest; keeps it for this caller. Raises ManifestError with all problems."""
        self._known.require_index(namespace)
        pools = self._store.workers.pools()
        read = self._read(namespace, submission, by, pools)
        cells = read.cells
        whole = self._known.whole(namespace, {cell.job: keys_of(cell.order, cell.key) for cell in cells})
        missing = list(dict.fromkeys(cell.job for cell in cells if cell.job not in whole))
        last = self._given(namespace, LATEST) if missing else {}
        compiles = {}  # What the durations of compiles are estimated from.
        for cell in cells:
            if cell.job not in whole:
                spec, size = cell.order["spec"], sum(file["size"] for file in cell.order["model"]["files"])
                before = last.get(cell.identifier)
                seconds = before.get("seconds", 0.0) if before else 0.0
                compiles[cell.identifier] = Compile(spec["model"]["digest"], size, seconds, comparable(spec))
        history = self._store.history.samples(readable(namespace), {each.sort for each in compiles.values()})
        plan = make_plan(
            cells,
            known=whole,
            running=self._store.jobs.unfinished(namespace, missing),
            last=last,
            read_spec=lambda key: self._known.read_spec(namespace, key),
            live_workers={pool["name"]: pool["live_workers"] for pool in pools},
            estimates=estimate_all(compiles, history),
        )
        return plan, read.matrix.manifest

    def planned(self, namespace: str, build_id: str, kept: str, by: str) -> SubmissionDocument:
        """Return a submission that this caller planned here; `kept` is its `kept_as`. Raises NotPlanned without it."""
        if read := self._kept.find((namespace, by, kept)):
            return {**read.submission, "build_id": build_id}
        hint = "send the whole submission to POST /v1/builds"
        raise NotPlanned(f"this server keeps no plan of the build {build_id}", hint=hint)

    def _read(
        self, namespace: str, submission: SubmissionDocument, by: str, pools: Sequence[PoolView]
    ) -> ReadSubmission:
        """Read a submission and expand its matrix, or return what was kept if pools and buckets are still the same."""
        asked = namespace, by, kept_as(submission)
        if before := self._kept.find(asked):
            matrix = before.matrix
        else:
            manifest = parse_manifest(submission["manifest"], submission.get("file") or "manifest")
            matrix = combine(manifest, submission.get("only", ()))
        in_buckets = self._in_buckets(matrix)  # Objects change; unchanged ones are not read again.
        known, slots = [Pool.from_dict(row["pool"]) for row in pools], {row["name"]: row["slots"] for row in pools}
        live = [row["live_workers"] for row in pools]
        used = self._as_named(namespace, in_use(zip(known, live, strict=True), self._settings.toolchains))
        limits = AttemptLimits(time=self._settings.time_limit, memory=self._settings.memory_limit)
        if before and (before.in_buckets, before.known, before.used, before.slots) == (in_buckets, known, used, slots):
            return before
        before = None
        self._kept.make_room(weight_of(submission, len(matrix.combinations)))  # Two large matrices do not fit together.
        models, data, files = {**submission["models"], **in_buckets}, submission["data"], submission.get("files")
        cells = expand(matrix, models, data, used, known=known, slots=slots, files=files, limits=limits)
        if namespace != MAIN:
            cells = [_bounded(cell, limits) for cell in cells]
        read = ReadSubmission(submission, matrix, in_buckets, known, used, slots, cells)
        self._kept.keep(asked, read)
        return read

    def _as_named(self, namespace: str, pools: Sequence[Pool]) -> list[Pool]:
        """Return the pools to plan for, without those of toolchains that readers do not get yet.

        If several toolchains of a target are in use, it is the one whose programs `prod`
        (else `latest`) gives to readers: a new toolchain on some workers changes no build until it is promoted.
        """
        groups: dict[tuple[Target, Device], set[str]] = {}
        for pool in pools:
            groups.setdefault((pool.target, pool.device), set()).add(pool.toolchain)
        open_ones = {place: toolchains for place, toolchains in groups.items() if len(toolchains) > 1}
        chosen: dict[tuple[Target, Device], str] = {}
        for tag in (PROD, LATEST) if open_ones else ():
            named = sorted(self._given(namespace, tag).values(), key=readers_order)
            for place, toolchains in open_ones.items():
                fitting = [
                    cell["toolchain"]
                    for cell in named
                    if cell["target"] == str(place[0])
                    and cell["toolchain"] in toolchains
                    and cell["device"].partition(":")[0] == place[1].arch.partition(":")[0]
                ]
                if fitting:
                    chosen.setdefault(place, fitting[-1])
        return [pool for pool in pools if chosen.get((pool.target, pool.device), pool.toolchain) == pool.toolchain]

    def _given(self, namespace: str, tag: str) -> Mapping[str, SnapshotCell]:
        return given(self._refs.read_through(namespace, tag)["cells"].values())

    def _in_buckets(self, matrix: Combinations) -> dict[str, FrozenModel]:
        """Read the models that a manifest leaves to the farm. Raises ManifestError with every problem found."""
        manifest = matrix.manifest
        models, problems = dict[str, FrozenModel](), []
        for index in sorted(matrix.needed):
            if (entry := manifest.models[index]).source.s3:
                try:
                    wanted = entry.source.s3, entry.format, entry.source.sha256, entry.output_nodes
                    models[entry.name] = self._bucket_models.freeze(*wanted)
                except UsageError as error:
                    place = ("models", index, "source")
                    problems.append(manifest.written.problem(error.message, place, hint=error.hint))
        if problems:
            raise ManifestError(problems)
        return models


def kept_as(submission: SubmissionDocument) -> str:
    """Return the digest of all that a submission says but its build's id: builds of the same share the work."""
    return digest_of({name: value for name, value in submission.items() if name != "build_id"})


def _bounded(cell: Cell, most: AttemptLimits) -> Cell:
    """Return a cell of strangers: they go ahead of nobody, and have at most the operator's limits (0: none)."""
    limits = AttemptLimits(
        time=min(filter(None, (cell.limits["time"], most["time"])), default=0.0),
        memory=min(filter(None, (cell.limits["memory"], most["memory"])), default=0),
    )
    if cell.priority <= 0 and limits == cell.limits:
        return cell
    why = f"only builds of {MAIN} go ahead of others, and have more than the farm's own limits"
    return cell._replace(priority=min(cell.priority, 0), limits=limits, warnings=(*cell.warnings, why))
