"""Documents between worker and child: requests and answers, as types.

The child's own modules import this for the type checker alone, since a child may run an older Python.

A request names an `action`; `Request` says which fields each of them has, and the class of each answer says what comes
back. `protocol.py` describes the messages that carry them.
"""

# Without annotations from `__future__`: the fields of documents would be compiled from text at every start.

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, NotRequired, Required, TypeAlias, TypeVar

from typing_extensions import TypedDict

from .protocol import Amount, Bound, Count, Default, File, Label, Name, Word

if TYPE_CHECKING:
    from numpy.typing import NDArray

Array: TypeAlias = "NDArray[Any]"  # An array of numpy, of any dtype.
Arrays: TypeAlias = "dict[str, NDArray[Any]]"  # Arrays by input or output name.

Item = TypeVar("Item")
Shape = Annotated[Sequence[Item], Bound(longest=64)]
Counts = Mapping[Word, Count]
Libraries = Mapping[Label, Label]
ByOutput = Mapping[Name, Amount]
Round = Annotated[Sequence[Annotated[float, Bound(above=0)]], Bound(shortest=1)]
"""The seconds of each run of one round; they are compared by ratios."""


# --- parts of requests --------------------------------------------------------------------------------------------


class OpenSize(TypedDict):
    """A dimension that a program leaves open between two sizes; it is measured at the optimal ones, too."""

    min: int
    max: int
    optimals: Sequence[int]


Size: TypeAlias = Count | OpenSize


class InputSpec(TypedDict):
    """One input of a cell. The samples show where its batch is, if the model does not."""

    dtype: Word
    shape: Shape[Size]
    batch_axis: NotRequired[int]


class ModelFile(TypedDict, total=False):
    """A model. `path` is missing if only the format is of interest."""

    path: str
    format: Required[str]
    outputs: Sequence[str]  # Names of a TensorFlow graph's nodes; empty: its ends.
    names: Sequence[str]  # Of the outputs: the parent checks the answer by them.
    alone: bool  # Whether the model's external data is not there yet.
    order: Sequence[str]  # Of the inputs of a TorchScript archive.


class SamplePoint(TypedDict):
    """One size at which a program is verified: samples in a run, runs, and different samples in all."""

    batch: int
    runs: int
    samples: int


class RunsHeader(TypedDict, total=False):
    """What the file of reference outputs says about them; `refused` is why no reference could run the model."""

    points: Required[list[SamplePoint]]
    minimum: Required[int]
    origin: Required[Mapping[str, str]]
    unverified: Mapping[str, str]
    doubted: Mapping[str, str]
    refused: str


class DeclaredValues(TypedDict, total=False):
    """What is declared of an input's values, which are generated so: a range, both ends included, or one value."""

    range: Sequence[float]
    value: float


class DataRecipe(TypedDict, total=False):
    """Calibration data or samples: a blob by its `digest`, or how many to `generate`, from which `seed`.

    To a child the blob is an `.npz` at `path`.
    """

    digest: str
    path: str
    generate: int
    seed: int
    ranges: Mapping[str, DeclaredValues]


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


class DeviceDocument(TypedDict):
    """The device of a program as plain JSON: `farm.spec.Device`."""

    arch: str
    compute_units: int | None
    xcc: int | None
    cpu_family: str | None


class ExpectedToolchain(TypedDict):
    """What the cache key says about the compiler; a child that has another one compiles nothing."""

    toolchain: str
    recipe: int
    libraries: Mapping[str, str]
    cpu_family: str | None
    arch: str


class DebugRequest(TypedDict, total=False):
    """How much a compiler logs, and whether it writes the program's text before and after compilation (`text_of`)."""

    log_level: str
    print: bool


class SealPaths(TypedDict):
    """Files and folders that a sealed child reaches."""

    read: list[str]
    write: list[str]


class ControlGroup(TypedDict, total=False):
    """The control group of a child; empty if there is none."""

    folder: str
    memory: bool  # Whether it holds the limit of memory.
    processes: bool  # Whether it holds the limit of processes.


class ConvertedInput(TypedDict):
    """An input that a TorchScript archive is converted with."""

    name: Word
    dtype: Word
    sizes: Shape[int]
    axes: Annotated[Mapping[Word, Word], Bound(longest=64)]


Options: TypeAlias = Mapping[str, Any]  # Options of a compiler by name, as its table of options has checked them.

Switch = Annotated[str, Bound(pattern="[01]")]


class SessionChoice(TypedDict):
    """How ONNX Runtime runs a program best, if that was tuned; on CUDA also options of its provider.

    Scripts are made of it, so each text is one of a closed set.
    """

    level: Annotated[str, Bound(pattern="basic|extended|all")]
    threads: Count
    spinning: bool
    cudnn_conv_algo_search: NotRequired[Annotated[str, Bound(pattern="EXHAUSTIVE|HEURISTIC|DEFAULT")]]
    prefer_nhwc: NotRequired[Switch]
    enable_cuda_graph: NotRequired[Switch]
    trt_builder_optimization_level: NotRequired[Annotated[str, Bound(pattern="[0-5]")]]
    trt_cuda_graph_enable: NotRequired[Switch]


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
    samples: DataRecipe
    session: SessionChoice | None


class ChildRequest(TypedDict, total=False):
    """What every request says: what to do with which compiler, where, and within which limits."""

    action: Required[str]
    extension: str  # The name in `farm.children` of the module that has the action; else it is the farm's own.
    compiler: str  # Also `torch` for a model of PyTorch; of a `reference` also `onnx`, `expected` and `none`.
    device: str  # `cpu`, `ref`, `gfx…`, `cuda`.
    threads: int
    gpu: str  # What the child is pinned to.
    maker: Literal["", "amd", "nvidia"]  # Of that GPU.
    cpus: Sequence[int]  # Numbers of the CPUs to stay on; none: all.
    search: Sequence[str]  # Folders to import the compiler from.
    environment: Mapping[str, str]
    """Variables of the cell. The child sets them when it is sealed: before, they would act on what watches it, too."""
    modules: Mapping[str, Sequence[str]]
    """Modules of extensions, by target: the name of each, and the folder of its package. `run_child` sets it."""

    memory: int  # Bytes; 0 means no limit, as of the following ones. `run_child` sets all of them.
    processes: int
    disk: int  # Bytes that `folders` may grow to.
    files: int
    dying: float  # Seconds that what was killed gets to be gone.
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
    samples: DataRecipe  # reference, bench.
    min_samples: int
    reference: str  # reference: the file to write; evaluate: the file to read.
    unverified: str  # reference: why no reference can run the model; else empty.
    quantization: Options  # pack, compile.
    packed: str  # pack: the file to write.
    slices: str  # slice: the folder to write to.
    database: str  # tune, compile: the private folder of tuning databases.
    key: str  # tune: what the records of the slice are kept under.
    tuning: TuningWish
    calibration: DataRecipe | None
    program: str  # compile: the file to write; evaluate: the file to load.
    cross: DeviceDocument | None
    debug: DebugRequest
    expected: ExpectedToolchain
    outputs: Sequence[str]  # evaluate: names in the model's order.
    tolerance: float
    equal: float
    measure_seconds: float
    sample: str  # evaluate: the file to write one sample to.
    session: SessionChoice | None
    programs: list[BenchProgram]
    first: int  # bench: runs to time one by one.
    rounds: int
    seconds: float  # bench: of each program in all rounds.
    rocm: str  # probe: version of the installation, or empty.


# --- answers ------------------------------------------------------------------------------------------------------


class Answer(TypedDict):
    """What a child answers. Each action has a form of its own, but for those that only write files."""


class ProbeAnswer(Answer, total=False):
    """What is installed; only `available` and a reason if that cannot be used."""

    available: Required[bool]
    reason: str
    fix: str
    label: Label
    toolchain: Label
    version: Word
    libraries: Libraries
    features: Sequence[str]
    targets: Sequence[Label]
    missing: Mapping[str, str]
    cpu_family: Label
    lowest: Count  # Compute capability that CUDA's libraries serve at least, times 10.


class TensorInfo(TypedDict):
    """An input or output of a model, as far as the model describes it."""

    name: Name
    dtype: Word
    shape: Shape[Count | Name | None] | None


class CheckAnswer(Answer, total=False):
    """What a model is."""

    inputs: Required[Sequence[TensorInfo]]
    outputs: Required[Sequence[TensorInfo]]
    opset: Required[int]
    opsets: Mapping[Word, int]
    operators: Required[Counts]
    weight_dtypes: Required[Sequence[Word]]
    weights: Counts
    external_files: Required[Sequence[File]]
    doubts: Sequence[str]


class SlicedModel(TypedDict):
    """One distinct slice of a model, and how often the model has it."""

    path: str
    signature: Annotated[str, Bound(pattern="[0-9a-f]{64}")]
    operations: Annotated[int, Bound(least=0, most=2**32)]
    count: Annotated[int, Bound(least=1, most=2**32)]
    inputs: Mapping[Name, InputSpec]


class SliceAnswer(Answer):
    """The distinct slices of a model."""

    slices: Sequence[SlicedModel]


class ProgramPort(TypedDict):
    """An input or output of a program; strides in elements, None for one of an open size."""

    name: Name
    dtype: Word
    shape: Shape[Count | Name]
    strides: NotRequired[Shape[int] | None]


class Placement(TypedDict):
    """Which nodes of a program run where, as ONNX Runtime assigned them when it loaded the program on a GPU.

    `nodes` counts them by provider and operator. Those on the CPU are named by operator: `on_purpose` are such as
    compute shapes, which it moves there to be faster; `fallback` are those for which the GPU's provider has no kernel.
    """

    nodes: Mapping[Word, Counts]
    on_purpose: Mapping[Word, Sequence[Name]]
    fallback: Mapping[Word, Sequence[Name]]


class CompileAnswer(Answer, total=False):
    """What a program is, and what was done to the model for it."""

    inputs: Required[Sequence[ProgramPort]]
    outputs: Required[Sequence[ProgramPort]]
    weight_dtypes: Required[Counts]  # Bytes by dtype.
    compute_dtypes: Required[Counts]  # Nodes by dtype.
    quantized: Required[Counts]
    offload_copy: bool | None
    output_parameters: Sequence[Name]
    session: SessionChoice | None
    symbolic_shapes: str  # Why static shapes were refused, if the program keeps the model's own.
    placement: Placement | None
    passes: Mapping[str, Amount]  # Seconds of each pass; the worker reads them from the log.


class Evidence(TypedDict):
    """How a program's outputs compare with the reference, by output.

    `doubted` says of which outputs the reference is not known to be right, and why: a difference proves nothing there.
    """

    errors: ByOutput
    rms: ByOutput
    equal: ByOutput
    nonfinite: Sequence[Name]
    spread: ByOutput
    weak: bool
    doubted: NotRequired[Mapping[Name, str]]


class Verification(TypedDict, total=False):
    """How the program compares with the reference; everything by output name. Judged by builds, not here.

    `errors` is |y - r| / |r|, `rms` is |y - r| / (sqrt(n) max|.|), `equal` the share of equal elements
    (integer and bool outputs), `spread` is |r - mean over samples| / |r|. `nonfinite` names outputs with NaN
    or infinity where the reference has none. `weak`: a program that always returned the mean would pass too.
    `reference` names what was asked for the right outputs, `origin` what gave them: `expected` means the samples.
    """

    reference: Annotated[str, Default("")]
    origin: Annotated[Mapping[Name, Word], Default({})]
    refused: Annotated[Mapping[str, str], Default({})]
    """References that could not run the model and why, by their names, in the order in which they were asked."""
    unverified: Annotated[Mapping[Name, str], Default({})]  # Outputs that were compared with nothing, and why.
    doubted: Annotated[Mapping[Name, str], Default({})]
    """Outputs whose reference is not known to be right, and why: a difference proves nothing there."""
    samples: Annotated[Count, Default(0)]
    runs: Annotated[Count, Default(0)]
    errors: Annotated[ByOutput, Default({})]
    rms: Annotated[ByOutput, Default({})]
    equal: Annotated[ByOutput, Default({})]
    nonfinite: Annotated[Sequence[Name], Default([])]
    spread: Annotated[ByOutput, Default({})]
    weak: Annotated[bool, Default(False)]


class Latency(TypedDict):
    """Percentiles of one kind of run, in seconds."""

    median: Amount
    p90: NotRequired[Annotated[Amount | None, Default(None)]]
    p99: NotRequired[Annotated[Amount | None, Default(None)]]
    minimum: NotRequired[Annotated[Amount | None, Default(None)]]
    repeats: NotRequired[Annotated[int, Bound(least=1), Default(1)]]


class MeasuredPoint(TypedDict):
    """Speed of a dynamic program at one of its sizes: `shapes` by input name, `batch` samples in a run."""

    batch: int
    shapes: Mapping[Name, Shape[Count]]
    latency: Latency
    throughput: NotRequired[Annotated[Amount | None, Default(None)]]


class ProgramTimes(TypedDict, total=False):
    """What a child measured of a program, as sidecars say it. Only `load` is there if the program could not be run."""

    load: Annotated[Amount | None, Default(None)]
    first_run_cold: Annotated[Amount | None, Default(None)]
    first_run_warm: Annotated[Amount | None, Default(None)]
    latency: Annotated[Latency | None, Default(None)]
    device_latency: Annotated[Latency | None, Default(None)]
    throughput: Annotated[Amount | None, Default(None)]
    points: Annotated[Sequence[MeasuredPoint], Default([])]


class EvaluateAnswer(Answer):
    """How a program compares with the reference, and how fast it is."""

    verification: Verification
    measurements: ProgramTimes


class TimedProgram(TypedDict):
    """Seconds: of loading, of the first runs, of each run in each round."""

    load: Amount
    first: Sequence[Amount]
    rounds: Sequence[Round]


class BenchAnswer(Answer):
    """The programs in the order of the request."""

    programs: Sequence[TimedProgram]
    peak_memory: NotRequired[Count]


# --- messages -----------------------------------------------------------------------------------------------------


class PhaseMessage(TypedDict):
    """What a child is doing, and how much of it is done (0 to 1, None if not known)."""

    phase: str
    progress: float | None
    detail: str


class ChildError(TypedDict):
    """A child's own account of its failure; `kind` is a failure kind of the farm, or empty."""

    kind: str
    message: str
    detail: str


class GuardEnd(TypedDict):
    """What the guard of a child has seen, and the launcher's last word on it."""

    code: int | None  # Of its exit, or below 0 the number of the signal that it died by.
    killed: str
    """Which limit the guard enforced: `memory`, `disk`, `files`, `processes`; empty for none.

    `awake`: it did not stand still while it was paused. `guard`: the guard has reported nothing.
    """
    memory: int  # Peak in bytes.
    stuck: NotRequired[list[int]]  # Process ids of what could not be killed; only the launcher knows.
