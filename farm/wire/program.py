"""The sidecar: what is known about a program and how it was made, as attempts write it and readers get it.

A field with a default may be left out, and whoever reads a sidecar gets the default.
"""

# Without annotations from `__future__`: the fields of documents would be compiled from text at every start.

from collections.abc import Mapping, Sequence
from typing import Annotated, Literal, NotRequired, Required

from typing_extensions import TypedDict

from farm.runner import documents
from farm.runner.protocol import Amount, Bound, Count, Default, Digest, Given, Unchecked, Word
from farm.spec import FileReference, SpecDocument

Interval = Annotated[Sequence[float], Bound(shortest=2, longest=2)]  # The ends of a 99 % confidence interval.


class Port(documents.ProgramPort):
    """One input or output of the program, in the program's order.

    `dtype` is numpy's name for it; `strides` count elements; `parameter` is the program's own name where it
    differs (`main:#output_0` of a MIGraphX program that does not copy offloaded results).
    """

    batch_axis: NotRequired[Annotated[int | None, Default(None)]]
    parameter: NotRequired[Annotated[str, Default("")]]


class Processes(TypedDict):
    """Processes that are not the farm's and hold memory of a GPU: how many, and how many bytes in all."""

    count: Count
    memory: Count


class Conditions(TypedDict):
    """How the device was at one moment: clocks in MHz and temperatures in degrees Celsius by the driver's labels, power
    cap in watts, and whether anything held the clocks back; of a partition they are the whole card's. `processes` are
    others that used this GPU, or this partition; null where the driver does not tell. `cpu` is the host's CPU, by its
    maker's name; without a GPU its highest clock has the label `cpu`.
    """

    cpu: NotRequired[Annotated[str, Default("")]]

    clocks: NotRequired[Annotated[Mapping[str, float], Default({})]]
    temperatures: NotRequired[Annotated[Mapping[str, float], Default({})]]
    power_cap: NotRequired[Annotated[float | None, Default(None)]]
    throttled: NotRequired[Annotated[bool | None, Default(None)]]
    clock_reasons: NotRequired[Annotated[Sequence[str], Default([])]]
    """Why the clocks were what they were, in NVML's words."""
    ecc_errors: NotRequired[Annotated[int | None, Default(None)]]
    """Memory errors since boot that could not be corrected."""
    xids: NotRequired[Annotated[Sequence[int], Default([])]]
    """Numbers of the errors that NVIDIA's driver reported of the card since the look before."""
    processes: NotRequired[Annotated[Processes | None, Default(None)]]


class Alone(TypedDict):
    """How many times the speed a tuned program has with empty databases that it has with those that tuned it.

    By medians, of two processes; `interval` is the 99 % confidence interval.
    """

    ratio: float
    interval: Interval


class Against(TypedDict):
    """How this program compares with one that was published before it; they took turns in one process.

    `ratio` is how many times the speed of the program with the cache key `key` this one has, by medians; `interval` its
    99 % confidence interval; `verdict` is `faster`, `slower` or `no difference shown`.
    """

    key: Digest
    ratio: float
    interval: Interval
    verdict: str


class ConversionContent(TypedDict):
    """What decides the outcome of a conversion."""

    recipe: int
    converter: Word
    libraries: Annotated[Mapping[Word, Word], Bound(longest=16)]
    kind: Word
    options: Annotated[Mapping[Word, int | Word], Bound(longest=16)]
    inputs: Annotated[Sequence[documents.ConvertedInput], Bound(longest=1000)]
    source: Digest


class ConversionRecord(ConversionContent):
    """How a model was made from one of another format; `key` is the digest of what decided it, `name` a file's."""

    key: Digest
    name: Word


class Blobs(TypedDict, total=False):
    """What belongs to an artifact. All but the kernel cache must be there for the artifact to be whole."""

    program: Required[FileReference]
    log: Annotated[FileReference | None, Default(None)]
    reproduction: Annotated[FileReference | None, Default(None)]
    sample: Annotated[FileReference | None, Default(None)]
    """One sample input with its expected output: an `.npz` with arrays by input and output name."""
    before: Annotated[FileReference | None, Default(None)]
    """The program's text before compilation, where `debug: {print: true}` asked."""
    after: Annotated[FileReference | None, Default(None)]
    """The program's text after compilation, likewise."""
    kernel_cache: Annotated[FileReference | None, Default(None)]
    """MIOpen's kernel binaries (`.ukdb`, in a zip), which are not in the program file; without them the first run is
    slower."""


class GpuFields(TypedDict, total=False):
    """What sidecars say about a GPU in addition to the cache key's fields; null is unknown.

    `partition` is a mode such as `SPX` or a MIG profile, `memory` in bytes, `driver` the version of the kernel's.
    """

    model: Annotated[str | None, Default(None)]
    partition: Annotated[str | None, Default(None)]
    memory: Annotated[int | None, Default(None)]
    driver: Annotated[str | None, Default(None)]


class FoundDevice(GpuFields):
    """The device as the worker found it; how it was just then is in `conditions`."""

    arch: Given
    compute_units: NotRequired[Annotated[int | None, Default(None)]]


class TuningFacts(TypedDict, total=False):
    """What tuning came to, in the model's operations (its convolutions and matrix products) and in seconds.

    `known` came from the tuning database, `tuned` were tuned now, `untunable` left nothing to keep; `saved` is what the
    known ones took when they were tuned. `finished` is false where the budget ended first. `published` says which of
    the two measured programs this is, the `tuned` or the `untuned` one; `session` how to run it best (ONNX Runtime:
    `level`, `threads`, `spinning`; on CUDA also its provider's options). `written` counts the records that it left in
    the empty databases it was measured with. `carried` is whether the file carries its tuning: nothing written, and as
    fast `alone` within noise; null where the compiler has no databases to do without. `rows` are the SHA-256 of the
    snapshots and deltas of the tuning `database` that it read or added.
    """

    mode: Annotated[str, Default("off")]
    operations: Annotated[int | None, Default(None)]
    known: Annotated[int, Default(0)]
    tuned: Annotated[int | None, Default(None)]
    untunable: Annotated[int, Default(0)]
    database: Annotated[str, Default("")]
    rows: Annotated[Sequence[str], Default([])]
    seconds: Annotated[Amount, Default(0.0)]
    saved: Annotated[Amount, Default(0.0)]
    finished: Annotated[bool, Default(True)]
    published: Annotated[Literal["tuned", "untuned"] | None, Default(None)]
    session: Annotated[documents.SessionChoice | None, Default(None)]
    written: Annotated[int, Default(0)]
    conditions: Annotated[Sequence[Conditions], Default([])]  # Before and after tuning, where the device tells.
    carried: Annotated[bool | None, Default(None)]
    alone: Annotated[Alone | None, Default(None)]


class Measurements(documents.ProgramTimes, total=False):
    """Speed of the program, in seconds.

    `latency` includes copies between host and device, `device_latency` does not. `throughput` is samples a
    second. Where tuning ran, the `tuned` program and the untuned `baseline` took turns in one process: `ratio` is the
    baseline's median over the tuned one's, `interval` its 99 % confidence interval; `against` is how a program that was
    tuned in the background compares with the one published before. `shared`: others ran on the host meanwhile,
    or other processes used the GPU. A dynamic program was measured at several `points`; the other figures are of its
    largest sizes.
    """

    tuned: Annotated[documents.Latency | None, Default(None)]
    baseline: Annotated[documents.Latency | None, Default(None)]
    ratio: Annotated[float | None, Default(None)]
    interval: Annotated[Interval | None, Default(None)]
    against: Annotated[Against | None, Default(None)]
    conditions: Annotated[Sequence[Conditions], Default([])]
    """Before and after measuring, and after the turns with other programs, where the device tells."""
    shared: Annotated[bool, Default(False)]


class ProgramRecord(TypedDict, total=False):
    """What the sidecar says about a program and about how it was made, wherever that was."""

    schema: Required[Literal[1]]
    identifier: Required[Given]
    spec: Required[Annotated[SpecDocument, Unchecked()]]
    conversion: Annotated[Annotated[ConversionRecord, Unchecked()] | None, Default(None)]
    """How the model was made from one of another format, with what; null where it came as it was compiled."""
    model_size: Annotated[int, Default(0)]
    """Bytes of the model as it was submitted, with its external data; 0 if not known."""
    toolchain: Required[Given]
    device: Required[FoundDevice]
    inputs: Annotated[Sequence[Port], Default([])]
    outputs: Annotated[Sequence[Port], Default([])]
    weight_dtypes: Annotated[Sequence[str], Default([])]
    compute_dtypes: Annotated[Sequence[str], Default([])]
    quantized: Annotated[Mapping[str, int], Default({})]
    """How many operators of each type were quantized; with int4 how many weights."""
    emulated: Annotated[Sequence[str], Default([])]
    """Parts of the precision that the device rounds to and computes in a wider type."""
    offload_copy: Annotated[bool | None, Default(None)]
    symbolic_shapes: Annotated[str, Default("")]
    """Why the compiler refused the static shapes that were asked for, if the program keeps the model's own."""
    placement: Annotated[documents.Placement | None, Default(None)]
    """Null where a program is not a graph of nodes to be assigned, or runs on the CPU."""
    tuning: Annotated[TuningFacts, Default({})]
    verification: Annotated[documents.Verification | None, Default(None)]
    """Null where the manifest turned verification off."""
    measurements: Annotated[Measurements, Default({})]
    passes: Annotated[Mapping[str, Amount], Default({})]
    """How long each of the compiler's passes took in all, where `debug: {timings: true}` asked."""
    peak_memory: Annotated[int | None, Default(None)]
    """Bytes that the compiling child held at most."""
    phases: Annotated[Mapping[str, Amount], Default({})]
    seconds: Annotated[Amount, Default(0.0)]
    """The whole attempt."""
    node: Annotated[str, Default("")]
    started: Annotated[str, Default("")]
    created: Required[str]
    """ISO 8601, UTC."""
    farm_version: Annotated[str, Default("")]


class Sidecar(ProgramRecord, total=False):
    """The commit record of one success: `ns/<namespace>/artifacts/<first two digits>/<key>.json`."""

    key: Required[Digest]  # The cache key: SHA-256 of the canonical JSON of `spec`.
    namespace: Required[Annotated[str, Bound(pattern="[a-z0-9][a-z0-9._-]{0,63}")]]
    blobs: Required[Blobs]
    build: Annotated[str, Default("")]
    job: Annotated[str, Default("")]
    attempt: Annotated[int, Default(0)]
    worker: Annotated[str, Default("")]
