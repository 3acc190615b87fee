"""The sidecar: the document that makes a compiled program an artifact. Published as JSON Schema (`schema()`).

Fields that a compiler or a device does not offer are null or empty, never made up. Readers ignore fields they
do not know, so a newer farm may add some; a change of meaning is a new schema number.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath
from typing import Annotated, Any, Literal, NotRequired, Required, cast

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from typing_extensions import TypedDict

from farm.artifacts.keys import sidecar_key
from farm.errors import UsageError
from farm.jobs.facts import ArtifactFacts, ComparableWork, TuningSummary
from farm.jobs.order import ConversionRecord
from farm.jobs.state import Phase
from farm.runner.documents import Placement, SessionChoice
from farm.spec import FileReference, JsonSchema, SpecDocument, comparable, digest_of, program_name
from farm.wire.program import Against, Alone, Conditions, Latency, MeasuredPoint, Port, Processes

Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Seconds = Annotated[float, Field(ge=0)]


WORST = 1e308
"""Stands for an error that is not finite, which JSON cannot say: it is over every tolerance."""


def _finite_or(substitute: float) -> BeforeValidator:
    return BeforeValidator(lambda value: substitute if isinstance(value, float) and not math.isfinite(value) else value)


Error = Annotated[float, _finite_or(WORST), Field(ge=0)]
Share = Annotated[float, _finite_or(0.0), Field(ge=0)]


class BlobsDocument(TypedDict, total=False):
    """`Blobs` as plain JSON."""

    program: Required[FileReference]
    log: FileReference | None
    reproduction: FileReference | None
    sample: FileReference | None
    before: FileReference | None
    after: FileReference | None
    kernel_cache: FileReference | None


class DeviceFound(TypedDict):
    """The architecture of a `FoundDevice`."""

    arch: str


class SessionDocument(TypedDict):
    """How to run a tuned program best, if tuning decided that."""

    session: SessionChoice | None


class SidecarDocument(TypedDict):
    """A sidecar as plain JSON: the fields that are read without checking it. `Sidecar` has and checks all of them."""

    key: str
    namespace: str
    identifier: str
    spec: SpecDocument
    blobs: BlobsDocument
    toolchain: str
    created: str
    device: DeviceFound
    offload_copy: NotRequired[bool | None]
    inputs: NotRequired[Sequence[Port]]
    outputs: NotRequired[Sequence[Port]]
    tuning: NotRequired[SessionDocument]
    conversion: NotRequired[ConversionRecord | None]
    job: NotRequired[str]
    attempt: NotRequired[int]


class _SidecarPart(BaseModel):
    model_config = ConfigDict(extra="allow", frozen=True, allow_inf_nan=False)


class Blob(_SidecarPart):
    """Bytes at `blobs/sha256/<first two digits>/<digest>`. `path` is the file name to give them."""

    path: str
    digest: Digest
    size: int = Field(ge=0)


class Blobs(_SidecarPart):
    """What belongs to the artifact. All but the kernel cache must be there for the artifact to be whole."""

    program: Blob
    log: Blob | None = None
    reproduction: Blob | None = None
    sample: Blob | None = None
    """One sample input with its expected output: an `.npz` with arrays by input and output name."""
    before: Blob | None = None
    """The program's text before compilation, where `debug: {print: true}` asked."""
    after: Blob | None = None
    """The program's text after compilation, likewise."""
    kernel_cache: Blob | None = None
    """MIOpen's kernel binaries (`.ukdb`, in a zip), which are not in the program file; without them the first run is
    slower."""

    def required(self) -> list[Blob]:
        """The blobs without which the artifact is broken."""
        named = [self.program, self.log, self.reproduction, self.sample, self.before, self.after]
        return [blob for blob in named if blob is not None]


class FoundDevice(_SidecarPart):
    """The device as the worker found it; how it was just then is in `conditions`.

    `partition` is a mode such as `SPX` or a MIG profile, `memory` in bytes, `driver` the version of the kernel's.
    """

    arch: str
    model: str | None = None
    compute_units: int | None = None
    partition: str | None = None
    memory: int | None = None
    driver: str | None = None


class TuningFacts(_SidecarPart):
    """What tuning came to, in the model's operations (its convolutions and matrix products) and in seconds.

    `known` came from the tuning database, `tuned` were tuned now, `untunable` left nothing to keep; `saved` is what the
    known ones took when they were tuned. `finished` is false where the budget ended first. `published` says which of
    the two measured programs this is, the `tuned` or the `untuned` one; `session` how to run it best (ONNX Runtime:
    `level`, `threads`, `spinning`; on CUDA also its provider's options). `written` counts the records that it left in
    the empty databases it was measured with. `carried` is whether the file carries its tuning: nothing written, and as
    fast `alone` within noise; null where the compiler has no databases to do without.
    """

    mode: str = "off"
    operations: int | None = None
    known: int = 0
    tuned: int | None = None
    untunable: int = 0
    seconds: Seconds = 0.0
    saved: Seconds = 0.0
    finished: bool = True
    published: Literal["tuned", "untuned"] | None = None
    session: dict[str, Any] | None = None
    written: int = 0
    conditions: list[Conditions] = []
    """Before and after tuning, where the device tells."""
    carried: bool | None = None
    alone: Alone | None = None


class Verification(_SidecarPart):
    """How the program compares with the reference; everything by output name. Judged by builds, not here.

    `errors` is |y - r| / |r|, `rms` is |y - r| / (sqrt(n) max|.|), `equal` the share of equal elements
    (integer and bool outputs), `spread` is |r - mean over samples| / |r|. `nonfinite` names outputs with NaN
    or infinity where the reference has none. `weak`: a program that always returned the mean would pass too.
    `reference` names what was asked for the right outputs, `origin` what gave them: `expected` means the samples.
    """

    reference: str = ""
    origin: dict[str, str] = {}
    refused: dict[str, str] = {}
    """References that could not run the model and why, by their names, in the order in which they were asked."""
    unverified: dict[str, str] = {}
    """Outputs that were compared with nothing, and why."""
    samples: int = Field(default=0, ge=0)
    errors: dict[str, Error] = {}
    rms: dict[str, Error] = {}
    equal: dict[str, Share] = {}
    nonfinite: list[str] = []
    spread: dict[str, Share] = {}
    weak: bool = False


class Measurements(_SidecarPart):
    """Speed of the program, in seconds.

    `latency` includes copies between host and device, `device_latency` does not. `throughput` is samples a
    second. Where tuning ran, the `tuned` program and the untuned `baseline` took turns in one process: `ratio` is the
    baseline's median over the tuned one's, `interval` its 99 % confidence interval; `against` is how a program that was
    tuned in the background compares with the one published before. `shared`: others ran on the host meanwhile,
    or other processes used the GPU. A dynamic program was measured at several `points`; the other figures are of its
    largest sizes.
    """

    load: Seconds | None = None
    first_run_cold: Seconds | None = None
    first_run_warm: Seconds | None = None
    latency: Latency | None = None
    device_latency: Latency | None = None
    throughput: float | None = None
    tuned: Latency | None = None
    baseline: Latency | None = None
    ratio: float | None = None
    interval: tuple[float, float] | None = None
    against: Against | None = None
    points: list[MeasuredPoint] = []
    conditions: list[Conditions] = []
    """Before and after measuring, and after the turns with other programs, where the device tells."""
    shared: bool = False


class Sidecar(_SidecarPart):
    """The commit record of one success: `ns/<namespace>/artifacts/<first two digits>/<key>.json`."""

    schema_: Literal[1] = Field(alias="schema")
    key: Digest
    """The cache key: SHA-256 of the canonical JSON of `spec`."""
    namespace: str
    identifier: str
    spec: dict[str, Any]
    blobs: Blobs
    conversion: dict[str, Any] | None = None
    """How the model was made from one of another format, with what; None where it came as it was compiled."""
    toolchain: str
    device: FoundDevice
    inputs: list[Port] = []
    outputs: list[Port] = []
    offload_copy: bool | None = None
    symbolic_shapes: str = ""
    """Why the compiler refused the static shapes that were asked for, if the program keeps the model's own."""
    placement: Placement | None = None
    """None where a program is not a graph of nodes to be assigned, or runs on the CPU."""
    weight_dtypes: list[str] = []
    compute_dtypes: list[str] = []
    quantized: dict[str, int] = {}
    """How many operators of each type were quantized; with int4 how many weights."""
    model_size: int = 0
    """Bytes of the model as it was submitted, with its external data; 0 if not known."""
    emulated: list[str] = []
    """Parts of the precision that the device rounds to and computes in a wider type."""
    tuning: TuningFacts = TuningFacts()
    verification: Verification | None = None
    """None where the manifest turned verification off."""
    measurements: Measurements = Measurements()
    passes: dict[str, Seconds] = {}
    """How long each of the compiler's passes took in all, where `debug: {timings: true}` asked."""
    peak_memory: int | None = None
    """Bytes that the compiling child held at most."""
    phases: dict[str, Seconds] = {}
    seconds: Seconds = 0.0
    """The whole attempt."""
    build: str = ""
    job: str = ""
    attempt: int = 0
    worker: str = ""
    node: str = ""
    started: str = ""
    created: str
    """ISO 8601, UTC."""
    farm_version: str = ""

    def of_cell(self, identifier: str) -> Sidecar:
        """Return it with the names of a cell that shares the program: the stored ones are those of the first cell."""
        path = program_name(identifier, PurePosixPath(self.blobs.program.path).suffix)
        program = self.blobs.program.model_copy(update={"path": path})
        blobs = self.blobs.model_copy(update={"program": program})
        return self.model_copy(update={"identifier": identifier, "blobs": blobs})


def read(data: bytes) -> Sidecar:
    """Parse a sidecar. Raises ValueError for one that is cut or not valid: its artifact is broken."""
    try:
        return Sidecar.model_validate_json(data)
    except ValidationError as error:
        raise ValueError(_wrong(error)) from None


def validate(document: Mapping[str, Any]) -> Sidecar:
    """Check a sidecar before it is published. Raises UsageError that names every wrong field."""
    try:
        return Sidecar.model_validate(document)
    except ValidationError as error:
        raise UsageError(f"not a valid sidecar: {_wrong(error)}") from None


def _wrong(error: ValidationError) -> str:
    return "; ".join(f"{'.'.join(map(str, each['loc'])) or 'sidecar'}: {each['msg']}" for each in error.errors())


def text(sidecar: Sidecar) -> bytes:
    """Return a sidecar as the JSON that is stored; indented, since people read it with `aws s3 cp … -`."""
    return sidecar.model_dump_json(by_alias=True, indent=1).encode() + b"\n"


def document(sidecar: Sidecar) -> SidecarDocument:
    """Return a sidecar as plain JSON."""
    return cast(SidecarDocument, sidecar.model_dump(mode="json", by_alias=True))


def schema() -> JsonSchema:
    """Return the sidecar's JSON Schema (draft 2020-12)."""
    published = json.dumps(Sidecar.model_json_schema(by_alias=True)).replace("TuningFacts", "Tuning")
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **json.loads(published),
        "title": "Artifact sidecar of the MIGraphX compile farm",
    }


def unverified_of(verification: Verification) -> str:
    """Say which outputs of a program were compared with nothing, and why; empty if all were compared."""
    names = list(verification.unverified)
    if not names:
        return ""
    why = verification.unverified[names[0]]
    if not verification.errors and not verification.equal:
        return f"not verified: {why}"
    more = f" and {len(names) - 1} more were" if len(names) > 1 else " was"
    return f"output `{names[0]}`{more} not verified: {why}"


def _processes(sidecar: Sidecar) -> Processes | None:
    looks = [*sidecar.tuning.conditions, *sidecar.measurements.conditions]
    found = [processes for look in looks if (processes := look["processes"])]
    return max(found, key=lambda each: (each["count"], each["memory"]), default=None)


def _work(sidecar: Sidecar) -> ComparableWork | None:
    """Return what other compiles estimate their durations by; None if the sidecar says too little."""
    spec = sidecar.spec
    if not sidecar.model_size or not {"model", "compiler", "device", "precision", "tuning"} <= spec.keys():
        return None
    keyed = cast(SpecDocument, spec)
    return {"like": comparable(keyed), "model": keyed["model"]["digest"][:12], "size": sidecar.model_size}


def _fallback(sidecar: Sidecar) -> dict[str, list[str]]:
    """Return a few nodes of each operator that runs on the CPU because the GPU has no kernel for them."""
    found = sidecar.placement["fallback"] if sidecar.placement else {}
    return {operator: [*names[:3]] for operator, names in found.items()}


def _runs_as(sidecar: Sidecar) -> str:
    """Return the digest of all that decides how a program runs."""
    parts = {name: sidecar.spec.get(name) for name in ("device", "inputs", "batch", "options", "env")}
    made = {"program": sidecar.blobs.program.digest, "toolchain": sidecar.toolchain, "session": sidecar.tuning.session}
    return digest_of({**parts, **made})


def _tuning(work: TuningFacts) -> TuningSummary | None:
    """Return what tuning came to; None if it was off."""
    if work.mode == "off":
        return None
    return {
        "mode": work.mode,
        "operations": work.operations,
        "known": work.known,
        "tuned": work.tuned,
        "untunable": work.untunable,
        "seconds": work.seconds,
        "saved": work.saved,
        "finished": work.finished,
        "published": work.published,
        "carried": work.carried,
    }


def facts(document: SidecarDocument | Sidecar) -> ArtifactFacts:
    """Return the small extract of a sidecar that the store, the index and reports keep; builds judge by it."""
    sidecar = document if isinstance(document, Sidecar) else Sidecar.model_validate(document)
    verification = sidecar.verification or Verification()
    unverified = unverified_of(verification)
    measured, program = sidecar.measurements, sidecar.blobs.program
    return {
        "key": sidecar.key,
        "namespace": sidecar.namespace,
        "sidecar": sidecar_key(sidecar.namespace, sidecar.key),
        "program": {"path": program.path, "digest": program.digest, "size": program.size},
        "toolchain": sidecar.toolchain,
        "device": sidecar.device.arch,
        "driver": sidecar.device.driver or "",
        "verified": sidecar.verification is not None
        and bool(not unverified or verification.errors or verification.equal),
        "unverified": unverified,
        "errors": verification.errors,
        "rms": verification.rms,
        "equal": verification.equal,
        "nonfinite": verification.nonfinite,
        "spread": verification.spread,
        "weak": verification.weak,
        "latency": measured.latency["median"] if measured.latency else None,
        "baseline_latency": measured.baseline["median"] if measured.baseline else None,
        "ratio": measured.ratio,
        "against": measured.against,
        "runs_as": _runs_as(sidecar),
        "tuning": _tuning(sidecar.tuning),
        "load": measured.load,
        "throughput": measured.throughput,
        "compile_seconds": sidecar.phases.get(Phase.COMPILING),
        "node": sidecar.node,
        "shared": measured.shared,
        "processes": _processes(sidecar),
        "peak_memory": sidecar.peak_memory,
        "quantized": sidecar.quantized,
        "fallback": _fallback(sidecar),
        "seconds": sidecar.seconds,
        "work": _work(sidecar),
        "created": sidecar.created,
    }
