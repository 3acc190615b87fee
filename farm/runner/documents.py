"""Documents between worker and child: requests and answers, as types.

The child's own modules import this for the type checker alone, since a child may run an older Python.

A request names an `action`; `Request` says which fields each of them has, and the class of each answer says what comes
back. `protocol.py` describes the messages that carry them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NotRequired, Required, TypeAlias, TypedDict

if TYPE_CHECKING:
    from numpy.typing import NDArray

Array: TypeAlias = "NDArray[Any]"
"""An array of numpy, of any dtype."""
Arrays: TypeAlias = "dict[str, NDArray[Any]]"
"""Arrays by input or output name."""


# --- parts of requests --------------------------------------------------------------------------------------------


class OpenSize(TypedDict):
    """A dimension that a program leaves open between two sizes; it is measured at the optimal ones, too."""

    min: int
    max: int
    optimals: Sequence[int]


Size: TypeAlias = int | OpenSize


class InputSpec(TypedDict):
    """One input of a cell. The samples show where its batch is, if the model does not."""

    dtype: str
    shape: Sequence[Size]
    batch_axis: NotRequired[int]


class ModelFile(TypedDict, total=False):
    """A model. `path` is missing if only the format is of interest."""

    path: str
    format: Required[str]
    outputs: Sequence[str]
    """Names of a TensorFlow graph's nodes; empty: its ends."""
    names: Sequence[str]
    """Of the outputs: the parent checks the answer by them."""
    alone: bool
    """Whether the model's external data is not there yet."""
    order: Sequence[str]
    """Of the inputs of a TorchScript archive."""


class SamplePoint(TypedDict):
    """One size at which a program is verified: samples in a run, runs, and different samples in all."""

    batch: int
    runs: int
    samples: int


class RunsHeader(TypedDict, total=False):
    """What the file of reference outputs says of them; `refused` is why no reference could run the model."""

    points: Required[list[SamplePoint]]
    minimum: Required[int]
    origin: Required[Mapping[str, str]]
    unverified: Mapping[str, str]
    refused: str


class ValueRange(TypedDict, total=False):
    """What generated samples of one input are made of: values in a range, or one constant."""

    range: Sequence[float] | None
    value: float | None


class SampleSource(TypedDict, total=False):
    """Where samples come from: an `.npz` at `path`, or `generate` seeded ones."""

    path: str
    generate: int
    seed: int
    ranges: Mapping[str, ValueRange]


class SlicePart(TypedDict):
    """A slice of a model that was tuned: its key in the database, and how many copies the model has."""

    key: str
    count: int


class TuningWish(TypedDict, total=False):
    """How much a compiler searches."""

    mode: Required[str]
    exhaustive_tune: bool
    miopen_find_enforce: int
    slices: Sequence[SlicePart]


class GpuElsewhere(TypedDict):
    """A GPU that is not here, which a program is compiled for."""

    arch: str
    compute_units: int | None
    xcc: int | None


class ExpectedToolchain(TypedDict):
    """What the cache key says of the compiler; a child that has another one compiles nothing."""

    toolchain: str
    recipe: int
    libraries: Mapping[str, str]
    cpu_family: str | None
    arch: str


class DebugRequest(TypedDict, total=False):
    """How much a compiler logs, and where it writes the program's text before and after compilation."""

    level: str
    before: str
    after: str


class SealPaths(TypedDict):
    """Files and folders that a sealed child reaches."""

    read: list[str]
    write: list[str]


class ControlGroup(TypedDict, total=False):
    """Files of the control group that holds a child's limits; empty if there is none."""

    join: str
    events: str
    refused: str


class ConvertedInput(TypedDict):
    """An input that a TorchScript archive is converted with."""

    name: str
    dtype: str
    sizes: Sequence[int]
    axes: Mapping[str, str]


class ConversionOptions(TypedDict):
    """How a model is converted."""

    to: str
    opset: int
    signature: str


Options: TypeAlias = Mapping[str, Any]
"""Options of a compiler by name, as its table of options has checked them."""


class BenchProgram(TypedDict, total=False):
    """A program that is measured, or with `program` None a model as it is."""

    compiler: str
    device: str
    inputs: Mapping[str, InputSpec]
    batch: Size | None
    options: Options
    precision: str
    program: str | None
    model: ModelFile
    outputs: Sequence[str]
    samples: SampleSource
    session: SessionChoice | None


class ChildRequest(TypedDict, total=False):
    """What every request says: what to do with which compiler, where, and within which limits."""

    action: Required[str]
    compiler: str
    """Also `torch` for a model of PyTorch; of a `reference` also `onnx`, `expected` and `none`."""
    device: str
    """`cpu`, `ref`, `gfx…`, `cuda`."""
    threads: int
    gpu: str
    """What the child is pinned to."""
    maker: Literal["", "amd", "nvidia"]
    """Of that GPU."""
    cpus: Sequence[int]
    """Numbers of the CPUs to stay on; none: all."""
    search: Sequence[str]
    """Folders to import the compiler from."""

    memory: int
    """Bytes; 0 is no limit, as of the following ones. `run_child` sets all of them."""
    processes: int
    disk: int
    """Bytes that `folders` may grow to."""
    files: int
    dying: float
    """Seconds that what was killed gets to be gone."""
    folders: list[str]
    group: ControlGroup
    seal: SealPaths | None


class Request(ChildRequest, total=False):
    """What a child is asked; which fields a request has depends on its action."""

    inputs: Mapping[str, InputSpec]
    batch: Size | None
    options: Options
    model: ModelFile
    precision: str
    samples: SampleSource
    """reference, bench."""
    min_samples: int
    reference: str
    """reference: the file to write; evaluate: the file to read."""
    unverified: str
    """reference: why no reference can run the model; else empty."""
    quantization: Options
    """pack, compile."""
    packed: str
    """pack: the file to write."""
    slices: str
    """slice: the folder to write to."""
    database: str
    """tune, compile: the private folder of tuning databases."""
    key: str
    """tune: what the records of the slice are kept under."""
    seeds: Sequence[str]
    """tune: the candidates to try; none means all."""
    tuning: TuningWish
    calibration: SampleSource | None
    program: str
    """compile: the file to write; evaluate: the file to load."""
    cross: GpuElsewhere | None
    debug: DebugRequest
    expected: ExpectedToolchain
    outputs: Sequence[str]
    """evaluate: names in the model's order."""
    tolerance: float
    equal: float
    measure_seconds: float
    sample: str
    """evaluate: the file to write one sample to."""
    session: SessionChoice | None
    programs: list[BenchProgram]
    first: int
    """bench: runs to time one by one."""
    rounds: int
    seconds: float
    """bench: of each program in all rounds."""
    rocm: str
    """probe: version of the installation, or empty."""
    converter: str
    """libraries: `torch`, `tensorflow`."""


class ConvertRequest(ChildRequest, total=False):
    """What a child is asked that converts a model: from the file `source` to the file `output`."""

    converter: str
    kind: str
    """`pt2`, `torchscript`, `saved-model`."""
    options: ConversionOptions
    inputs: Sequence[ConvertedInput]
    source: str
    output: str


class CacheNamesRequest(ChildRequest, total=False):
    """What a child is asked that asks ONNX Runtime's MIGraphX provider for names."""

    model: str
    """The file."""
    arch: str
    """Of the card that will run it, in full."""
    cache: str
    """An empty folder to write to."""


# --- answers ------------------------------------------------------------------------------------------------------


class Answer(TypedDict):
    """What a child answers; each action has a form of its own."""


class ProbeAnswer(Answer, total=False):
    """What is installed; only `available` and a reason if that cannot be used."""

    available: Required[bool]
    reason: str
    fix: str
    label: str
    toolchain: str
    version: str
    libraries: Mapping[str, str]
    parts: Sequence[Sequence[str]]
    """Soname and build id of each library that makes the toolchain."""
    features: Sequence[str]
    targets: Sequence[str]
    missing: Mapping[str, str]
    cpu_family: str
    lowest: int
    """Compute capability that CUDA's libraries serve at least, times 10."""


class ToolchainState(TypedDict):
    """What a cache key says of who compiles, as it is in this process."""

    toolchain: str
    recipe: int
    libraries: Mapping[str, str]
    cpu_family: str


class LibrariesAnswer(Answer):
    """Versions by name."""

    libraries: Mapping[str, str]


class ConvertAnswer(Answer):
    """Bytes of the converted model."""

    size: int


class CacheNamesAnswer(Answer):
    """Which files of its cache a provider looks for."""

    version: str
    """Of ONNX Runtime."""
    names: Sequence[str]
    found: bool
    """Whether it loads files of these names and compiles nothing."""


class TensorInfo(TypedDict):
    """An input or output of a model, as far as the model describes it."""

    name: str
    dtype: str
    shape: Sequence[int | str | None] | None


class CheckAnswer(Answer, total=False):
    """What a model is."""

    format: str
    inputs: Required[Sequence[TensorInfo]]
    outputs: Required[Sequence[TensorInfo]]
    opset: Required[int]
    opsets: Mapping[str, int]
    operators: Required[Mapping[str, int]]
    weight_dtypes: Required[Sequence[str]]
    weights: Mapping[str, int]
    external_files: Required[Sequence[str]]
    doubts: Sequence[str]


class ReferenceOutput(TypedDict):
    """One reference output."""

    name: str
    dtype: str
    shape: Sequence[int]


class ReferenceAnswer(Answer):
    """What the reference outputs are; `origin` says by output who gave them, `unverified` why nobody could."""

    samples: int
    runs: int
    origin: Mapping[str, str]
    unverified: Mapping[str, str]
    outputs: Sequence[ReferenceOutput]
    peak_memory: int


class PackAnswer(Answer):
    """How many weights of each operator were packed."""

    quantized: Mapping[str, int]


class SlicedModel(TypedDict):
    """One distinct slice of a model, and how often the model has it."""

    path: str
    signature: str
    operations: int
    count: int
    inputs: Mapping[str, InputSpec]


class SliceAnswer(Answer):
    """The slices of a model, and how many tunable operations the whole has."""

    slices: Sequence[SlicedModel]
    operations: int


class TuneAnswer(Answer, total=False):
    """How many candidates were timed, if the compiler counts them."""

    candidates: int


class ProgramPort(TypedDict):
    """An input or output of a program; strides in elements, None for one of an open size."""

    name: str
    dtype: str
    shape: Sequence[int | str]
    strides: Sequence[int] | None


class SessionChoice(TypedDict):
    """How ONNX Runtime runs a program best, if that was tuned; on CUDA also options of its provider."""

    level: str
    threads: int
    spinning: bool
    cudnn_conv_algo_search: NotRequired[str]
    prefer_nhwc: NotRequired[str]
    enable_cuda_graph: NotRequired[str]
    trt_builder_optimization_level: NotRequired[str]
    trt_cuda_graph_enable: NotRequired[str]


class NodePlacement(TypedDict):
    """Which nodes of a program run where, on a GPU of ONNX Runtime's."""

    nodes: Mapping[str, Mapping[str, int]]
    on_purpose: Mapping[str, Sequence[str]]
    fallback: Mapping[str, Sequence[str]]


class CompileAnswer(Answer, total=False):
    """What a program is, and what was done to the model for it."""

    inputs: Required[Sequence[ProgramPort]]
    outputs: Required[Sequence[ProgramPort]]
    weight_dtypes: Required[Mapping[str, int]]
    """Bytes by dtype."""
    compute_dtypes: Required[Mapping[str, int]]
    """Nodes by dtype."""
    quantized: Required[Mapping[str, int]]
    operators: Mapping[str, int]
    size: int
    offload_copy: bool | None
    output_parameters: Sequence[str]
    session: SessionChoice | None
    symbolic_shapes: str
    """Why static shapes were refused, if the program keeps the model's own."""
    placement: NodePlacement | None
    migraphx_version: str
    peak_memory: int
    passes: Mapping[str, float]
    """Seconds of each pass; the worker reads them from the log."""


class Evidence(TypedDict):
    """How a program's outputs compare with the reference, by output."""

    errors: Mapping[str, float]
    rms: Mapping[str, float]
    equal: Mapping[str, float]
    nonfinite: Sequence[str]
    spread: Mapping[str, float]
    weak: bool


class VerifiedProgram(Evidence):
    """The comparison, and what was compared."""

    samples: int
    runs: int
    origin: Mapping[str, str]
    unverified: Mapping[str, str]


class DeviceLatency(TypedDict):
    """Seconds of a run without copies from and to the host."""

    median: float
    repeats: int


class RunTimes(TypedDict, total=False):
    """What was measured of a program at one size; seconds, and samples a second."""

    load: float
    cold_run: float
    warm_run: float
    latency: float | None
    device_latency: DeviceLatency | None
    p50: float
    p90: float
    p99: float
    repeats: int
    throughput: float | None
    batch: int
    shapes: Mapping[str, Sequence[int]]


class ProgramTimes(RunTimes, total=False):
    """What was measured of a program: at its largest sizes, and at all `points` of a dynamic one.

    It has `load` alone if the program could not be run.
    """

    points: Sequence[RunTimes]


class EvaluateAnswer(Answer, total=False):
    """How a program compares with the reference, and how fast it is."""

    verification: Required[VerifiedProgram]
    measurements: Required[ProgramTimes]
    peak_memory: int


class TimedProgram(TypedDict):
    """Seconds: of loading, of the first runs, of each run in each round."""

    load: float
    first: Sequence[float]
    rounds: Sequence[Sequence[float]]


class BenchAnswer(Answer):
    """The programs in the order of the request."""

    programs: Sequence[TimedProgram]
    peak_memory: int


# --- messages -----------------------------------------------------------------------------------------------------


class PhaseMessage(TypedDict):
    """What a child is doing, and how much of it is done (0 to 1, None if not known)."""

    phase: str
    progress: float | None
    detail: str


class ResultMessage(TypedDict):
    """A child's answer."""

    result: Answer


class ChildError(TypedDict):
    """A child's own account of its failure; `kind` is a failure kind of the farm, or empty."""

    kind: str
    message: str
    detail: str


class ErrorMessage(TypedDict):
    """Why there is no answer."""

    error: ChildError


class ChildUsage(TypedDict):
    """Seconds of CPU time and bytes of memory of a child and its descendants."""

    cpu: float
    memory: int


class UsageMessage(TypedDict):
    """What the guard says once a second."""

    usage: ChildUsage


class GuardEnd(TypedDict):
    """The guard's last word on a child."""

    exit: int | None
    signal: int | None
    killed: str
    """Which limit the guard enforced: `memory`, `disk`, `files`, `processes`; empty for none."""
    memory: int
    """Peak in bytes."""
    stuck: list[int]
    """Process ids of what could not be killed."""


class EndedMessage(TypedDict):
    """What the guard says when nothing of the child is left but what cannot be killed."""

    ended: GuardEnd


Message: TypeAlias = PhaseMessage | ResultMessage | ErrorMessage | UsageMessage | EndedMessage
