"""The entries of a manifest, as users write them, and their JSON Schema. A field's docstring is its help in editors."""

# Without annotations from `__future__`: pydantic evaluates each at every start, and would first have to compile it.

import ast
import inspect
import json
import sys
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, Self, cast

from pydantic import ConfigDict, Field, PrivateAttr, model_validator

from farm.manifest import values
from farm.manifest.yaml import YamlDocument
from farm.models.shapes import Extent
from farm.spec import JsonSchema

if TYPE_CHECKING:
    from farm.jobs.state import DebugWish


class InputEntry(values.Entry):
    """What is said about one input of a model, or about all inputs that a pattern matches."""

    model_config = ConfigDict(json_schema_extra={"not": {"required": ["range", "value"]}})

    shape: tuple[values.Dimension, ...] = Field(default=(), strict=False, max_length=64)
    """Dimensions: numbers, names that `dims` gives sizes, or sums of names."""
    range: values.InputRange = None
    """Lowest and highest value of generated samples; for integers both ends are included."""
    value: values.Number = None
    """The one value of this input in generated samples."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if {"range", "value"} <= self.model_fields_set:
            raise ValueError("write `range` or `value`, not both")
        return self

    @property
    def has_shape(self) -> bool:
        """Whether a shape is given; an empty one is a scalar's."""
        return "shape" in self.model_fields_set


class Tuning(values.Entry):
    """How long to search for faster kernels. Compilers without tuning ignore it."""

    mode: Literal["off", "quick", "exhaustive", "full"] = "off"
    """How much tuning tries before the program is published."""
    background: Literal["off", "quick", "exhaustive", "full"] = "off"
    """How much tuning tries after the build has ended, in a build of its own; the ref moves if that is faster."""
    budget: values.Duration = None
    """Time after which tuning stops; the program is then compiled with the results so far. Not in the background."""
    miopen_find_enforce: Annotated[int | None, Field(ge=1, le=5, alias="miopen_find_enforce")] = None
    """MIOpen's `MIOPEN_FIND_ENFORCE` while tuning, by number (3: search for unknown operations)."""


class Verify(values.Entry):
    """How far a program may be from the reference, and the consequences."""

    mode: Literal["off", "on"] = "on"
    """`off`: programs are not compared with a reference."""
    tolerance: values.Tolerances = {}
    """Largest relative error: a number, or numbers by precision, or by precision and output (`*` is any)."""
    weak: Literal["allow", "warn", "fail"] = "warn"
    """The consequence if the samples prove little: a program that always returns their mean would pass too."""
    on_fail: Literal["fail", "warn"] = "fail"
    """The consequence if a program is not accurate enough."""
    reference: Literal["onnxruntime", "migraphx"] = "onnxruntime"
    """Computes the expected outputs if the samples bring none; if it cannot, another reference does."""
    unverifiable: Literal["publish", "fail"] = "publish"
    """The consequence if no reference can run the model: the program is published unverified, or the cell fails."""
    fallback: Literal["allow", "warn", "fail"] = "warn"
    """The consequence if nodes run on the CPU because the GPU's provider has no kernel for them."""


class Limits(values.Entry):
    """Limits of an attempt."""

    time: values.Duration = None
    """Time of one attempt, waiting not counted."""
    memory: values.Size = None
    """Memory of one attempt's processes."""


class Gates(values.Entry):
    """By how much a program may be worse than its baseline: `5%`, or `off`."""

    baseline: values.RefTag = "latest"
    """The tag of the programs to compare with; `latest` has each cell as it last passed."""
    latency: values.Limit = None
    """Median time of a run, measured in turns with the baseline on one node."""
    throughput: values.Limit = None
    """Samples a second, measured in turns with the baseline on one node."""
    size: values.Limit = None
    """Bytes of the program."""
    memory: values.Limit = None
    """Most memory of the compile, compared on one node."""
    load: values.Limit = None
    """Time to load the program, compared on one node."""
    compile_time: values.Limit = None
    """Time of the compile, compared on one node."""
    tuning_time: values.Limit = None
    """Time of tuning, compared on one node."""
    undecided: Literal["warn", "fail"] = "warn"
    """The consequence if a number cannot be compared for sure: other nodes, noise, hits that were not measured."""
    hits: Literal["measure", "list"] = "measure"
    """Whether hits that have not run in turns with their baseline are measured now, or only listed."""


class Budgets(values.Entry):
    """Absolute limits of a program, whatever its baseline is."""

    latency: values.Duration = None
    """Median time of a run."""
    throughput: values.Rate = None
    """Samples a second, at least."""
    size: values.Size = None
    """Bytes of the program."""
    memory: values.Size = None
    """Most memory of the compile."""
    load: values.Duration = None
    """Time to load the program."""
    compile_time: values.Duration = None
    """Time of the compile."""
    tuning_time: values.Duration = None
    """Time of tuning."""


class Debug(values.Entry):
    """What the compiler logs about its work; no part of the cache key. Traces of other compilers are ignored."""

    log_level: Literal["", "error", "warning", "info", "debug", "trace"] = ""
    """The level of its log."""
    trace: tuple[values.Trace, ...] = Field(default=(), strict=False)
    """The parts that it traces into its log."""
    print: bool = False
    """Whether the program's text before and after compilation is kept with the artifact."""
    timings: bool = False
    """Whether the time of each pass is kept with the artifact."""

    @property
    def chosen(self) -> "DebugWish":
        """The parts that are asked for, as a work order has them."""
        return cast("DebugWish", self.model_dump(mode="json", exclude_defaults=True))


TuningUse = Annotated[Tuning, values.Short(values.tuning_use, {"enum": ["off", "quick", "exhaustive", "full"]})]
VerifyUse = Annotated[Verify, values.Short(values.off_or, {"const": "off"})]


class Sweep(values.Entry):
    """Batches that are built and measured to find the best one."""

    batches: values.BatchSizes
    """The batches to try."""
    metric: Literal["throughput", "latency"] = "throughput"
    """The best batch has the highest throughput (samples a second) or the lowest latency (time of one run)."""
    max_latency: values.Duration = None
    """Only batches whose median run takes no longer may be the best."""


Packs = Annotated[tuple[Literal["onnxruntime", "onnxruntime-cache", "triton"], ...], Field(strict=False, max_length=3)]

SweepUse = Annotated[
    Sweep | None,
    values.Short(values.short_for("batches", list, "batches to try, such as [1, 8, 32]"), values.BATCHES_SCHEMA),
]


class Conversion(values.Entry):
    """How a model is converted, in a child process on the submitter's machine."""

    to: Literal["onnx", "tf"] = "onnx"
    """`tf`: a SavedModel is frozen instead of being converted to ONNX."""
    opset: Annotated[int, Field(ge=9, le=30)] = 18
    """ONNX opset to convert to."""
    signature: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,100}$")] = "serving_default"
    """SavedModel: which of its signatures."""
    dtypes: dict[
        Annotated[str, Field(min_length=1, max_length=200)],
        Literal["float16", "float32", "float64", "bfloat16", "int8", "int16", "int32", "int64", "uint8", "bool"],
    ] = {}
    """TorchScript: dtypes of the inputs that are not float32; such an archive does not say them."""


def _format_is(*formats: str) -> JsonSchema:
    return {"required": ["format"], "properties": {"format": {"enum": list(formats)}}}


_SAVED, _CONVERTED = _format_is("saved-model"), _format_is("saved-model", "torch")
_TO_TF: JsonSchema = {"required": ["to"], "properties": {"to": {"const": "tf"}}}
_FREEZING: JsonSchema = {"required": ["conversion"], "properties": {"conversion": _TO_TF}}
"""Matches a model that is converted to a frozen graph."""


class CellSettings(values.Entry):
    """Settings of cells. Special ones override general ones: mappings name by name, entries field by field."""

    options: values.Options = {}
    """Options of the compilers and of their quantizers; a compiler ignores the options of others."""
    env: values.Env = {}
    """Environment variables that change programs; each compiler lists the allowed ones. Part of the cache key."""
    tuning: TuningUse = Tuning()
    """`off`, or how much to tune."""
    verify: VerifyUse = Verify()
    """`off`, or tolerances and their consequences."""
    limits: Limits = Limits()
    """Time and memory of an attempt."""
    debug: Debug = Debug()
    """What the compiler logs about its work."""
    gates: Gates = Gates()
    """By how much programs may be worse than a baseline."""
    budgets: Budgets = Budgets()
    """How much programs may take."""
    priority: values.Priority = 0
    """Cells with a larger number run earlier."""
    salt: values.Salt = ""
    """Another text compiles everything again."""


class Unquantized(values.Entry):
    """The model that a quantized one was made from."""

    model: values.Name
    """The name of another ONNX model of this manifest, with the same inputs and outputs."""


class ModelEntry(CellSettings):
    """One model with its own settings. Mappings are merged over the manifest's, lists replace them."""

    model_config = ConfigDict(
        json_schema_extra={
            "if": {"properties": {"source": {"type": "object", "required": ["glob"]}}, "required": ["source"]},
            "then": {"not": {"required": ["name"]}},
            "else": {"required": ["name"]},
            "dependentSchemas": {
                "outputs": {"anyOf": [_format_is("tf"), {"allOf": [_SAVED, _FREEZING]}]},
                "conversion": {"allOf": [_CONVERTED, {"anyOf": [_SAVED, {"not": _FREEZING}]}]},
            },
            "not": {"allOf": [_CONVERTED, {"properties": {"source": {"type": "object", "required": ["s3"]}}}]},
        }
    )

    name: values.Name = ""
    """The model's name in identifiers and refs; the models of a `glob` have those of their files."""
    source: values.Source
    """Where its file is."""
    format: Literal["onnx", "tf", "saved-model", "torch"] = "onnx"
    """What the file is; a SavedModel (a folder) and PyTorch's .pt2 or TorchScript are converted by the submitter."""
    conversion: Conversion = Conversion()
    """How a SavedModel or a PyTorch model is converted."""
    outputs: tuple[values.OutputNode, ...] = Field(
        default=(), strict=False, min_length=1, max_length=1000, json_schema_extra={"uniqueItems": True}
    )
    """TensorFlow: the nodes that the program returns; without them those that no other node uses."""
    inputs: dict[Annotated[str, Field(min_length=1, max_length=200)], InputEntry] = {}
    """By input name or pattern (`past_key_values.*`); static and fully named inputs need no entry."""
    dims: values.Dims = {}
    """Sizes of named dimensions; the product of all is compiled."""
    batches: values.BatchSizes = ()
    """Short for `dims: {batch: […]}`."""
    shapes: values.Shapes = {}
    """Named points, each with the sizes of several dimensions: `decode: {seq: 1, past: 1024}`."""
    sweep: SweepUse = None
    """Instead of `batches`: each is measured, and the report names the best."""
    calibration: values.DataUse = None
    """What int8 and fp8 are calibrated with."""
    samples: values.DataUse = None
    """Real inputs (and expected outputs) to verify with."""
    reference: Unquantized | None = None
    """The model whose outputs for the samples are the right ones: for models that were quantized elsewhere."""
    targets: tuple[values.TargetText, ...] = Field(default=(), strict=False, min_length=1)
    """Replaces the manifest's."""
    precisions: tuple[values.Precision, ...] = Field(default=(), strict=False, min_length=1)
    """Replaces the manifest's."""
    packs: Packs = ()
    """Replaces the manifest's; `[]` for none."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.outputs and self.compiled_format != "tf":
            raise ValueError("`outputs` belongs to `format: tf`: a model of another format names its own")
        if "conversion" in self.model_fields_set and not self.converted:
            raise ValueError("`conversion` belongs to `format: saved-model` or `format: torch`")
        if self.conversion.to == "tf" and self.format != "saved-model":
            raise ValueError("only a SavedModel can be converted to `tf`, a frozen graph")
        if self.converted and self.source.s3:
            raise ValueError("what has to be converted is read here: use `path`, `package`, `https` or `hf`, not `s3`")
        if len(set(self.output_nodes)) < len(self.outputs):
            raise ValueError("the same output occurs twice")
        if self.reference and (self.samples is None or self.samples.generate):
            raise ValueError("`reference` needs `samples` from a file or a generator")
        if self.reference and self.format != "onnx":
            raise ValueError("`reference` is for ONNX models")
        if self.name and self.source.glob:
            raise ValueError("`name` and `glob` do not go together: the models are named by their files")
        if not self.name and not self.source.glob:
            raise ValueError("`name` is missing")
        return self

    @property
    def converted(self) -> bool:
        """Whether the model is converted before it is compiled."""
        return self.format in ("saved-model", "torch")

    @property
    def compiled_format(self) -> str:
        """The format in which compilers get the model."""
        return self.conversion.to if self.converted else self.format

    @property
    def output_nodes(self) -> tuple[str, ...]:
        """Names of the nodes in `outputs`: TensorFlow calls the first result of a node `name:0`."""
        return tuple(name.removesuffix(":0") for name in self.outputs)

    @property
    def sizes(self) -> dict[str, tuple[Extent, ...]]:
        """Sizes of all named dimensions, the batch first."""
        batches: tuple[Extent, ...] = self.sweep.batches if self.sweep else self.batches
        return ({"batch": batches} if batches else {}) | self.dims


AXES = ("model", "target", "toolchain", "precision", "shape")
"""The axes of the matrix, by which selectors choose cells."""


class SelectEntry(values.Entry):
    """Chooses cells: each given field is a pattern (or a list of them) that must match."""

    model_config = ConfigDict(json_schema_extra={"anyOf": [{"required": [name]} for name in AXES]})

    model: values.Patterns = ()
    """Model names."""
    target: values.Patterns = ()
    """Targets, as written or by device (`gfx1100`)."""
    toolchain: values.Patterns = ()
    """Toolchains, as `toolchains` names them."""
    precision: values.Patterns = ()
    """Precisions: `int8*` is int8 and its pairs."""
    shape: values.Patterns = ()
    """Shape labels: `b8`, `b8-seq*`."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not set(AXES) & self.model_fields_set:
            raise ValueError(f"write at least one of {', '.join(f'`{name}`' for name in AXES)}")
        return self


class SelectorEntry(SelectEntry):
    """Chooses cells, and says why."""

    reason: values.Reason = ""
    """Why; shown to people."""


class ExpectedEntry(SelectorEntry):
    """Cells that must fail in a known way; while they do, the verdict stays green."""

    kind: values.ExpectedKind
    """How they fail."""
    until: values.Date = ""
    """The last day on which the failure is accepted."""
    link: values.Link = ""
    """Where it is discussed: the URL of an issue."""


class IncludeEntry(CellSettings):
    """Extends the cells that it names, or adds cells if there are none. A field that is left out means all."""

    model: values.Name = ""
    """One model's name."""
    target: values.TargetText = ""
    """One target."""
    toolchain: values.Toolchain = ""
    """One toolchain, by the start of its id."""
    precision: values.Precision = ""
    """One precision."""
    dims: values.Dims = {}
    """Sizes of named dimensions."""
    batches: values.BatchSizes = ()
    """Short for `dims: {batch: […]}`."""
    reason: values.Reason = ""
    """Why; shown to people."""

    @property
    def sizes(self) -> dict[str, tuple[Extent, ...]]:
        """Sizes of the named dimensions that are given, the batch first."""
        return ({"batch": self.batches} if self.batches else {}) | self.dims


class OverrideEntry(CellSettings):
    """Settings for the cells that it selects, laid over all others; of several entries the later wins."""

    select: SelectEntry
    """Which cells."""
    calibration: values.DataUse = None
    """Replaces the calibration data of the cells."""
    reason: values.Reason = ""
    """Why; shown to people."""


class TriggerEntry(values.OneOf):
    """What builds the manifest by itself, once it is stored (`farm manifest push`)."""

    KINDS = ("schedule", "source", "toolchain")
    BELONGS: ClassVar = {"timezone": ("schedule",)}

    schedule: values.Cron = ""
    """When, as five fields of cron: minute, hour, day of the month, month, day of the week. `17 3 * * 1-5`."""
    timezone: values.Timezone = "UTC"
    """Whose clock `schedule` means: `Europe/Berlin`."""
    source: values.BucketObject = ""
    """`s3://bucket/key`: when this object changes. In a bucket that the farm's operator allows."""
    toolchain: values.TargetText = ""
    """A target: when its workers have a toolchain which they did not have before."""


class Concurrency(values.Entry):
    """Builds that belong together: a newer one may take the place of older ones."""

    group: values.Name
    """The group's name, in the namespace."""
    per: values.LabelKey = ""
    """A label: builds with other values of it are of other groups (`branch`)."""
    cancel_in_progress: bool = False
    """Whether a new build cancels the cells of older ones that wait. Cells that run go on."""


ConcurrencyUse = Annotated[
    Concurrency | None,
    values.Short(values.short_for("group", str, "the name of a group"), {"type": "string", "pattern": values.NAME}),
]


class Manifest(CellSettings):
    """What to compile: models, targets, precisions and shapes, and which programs are good enough."""

    version: values.Version
    """Version of the manifest's format."""
    name: values.Name
    """Name of the builds that are made from this manifest."""
    labels: values.Labels = {}
    """Shown with the build, and found by `farm ls -l`."""
    targets: tuple[values.TargetText, ...] = Field(default=(), strict=False, min_length=1)
    """`compiler/device`, a device profile (`mi300x`) or a gfx name, which mean migraphx."""
    toolchains: tuple[values.Toolchain, ...] = Field(default=(), strict=False, min_length=1)
    """Starts of toolchain ids (`rocm7.2`): each target is compiled by every toolchain of its compiler that matches."""
    precisions: tuple[values.Precision, ...] = Field(default=("fp32",), strict=False, min_length=1)
    """`native` converts nothing; pairs such as `int8+fp16` quantize and convert the rest."""
    packs: Packs = ()
    """Layouts of `farm fetch` that need programs of their own: MIGraphX compiles those for AMD GPUs in addition."""
    max_parallel: values.Count = None
    """Cells of one build that run at once."""
    fail_fast: bool = False
    """Whether the first failure cancels the rest."""
    triggers: tuple[TriggerEntry, ...] = Field(default=(), strict=False, max_length=32)
    """What builds the manifest by itself, once it is stored."""
    concurrency: ConcurrencyUse = None
    """Which builds a newer one replaces."""
    datasets: dict[values.Name, values.SharedData] = {}
    """Calibration data and samples that models use by name."""
    models: tuple[ModelEntry, ...] = Field(strict=False, min_length=1, max_length=5000)
    """What to compile."""
    exclude: tuple[SelectorEntry, ...] = Field(default=(), strict=False, max_length=values.MAX_SELECTORS)
    """Cells to leave out."""
    include: tuple[IncludeEntry, ...] = Field(default=(), strict=False, max_length=values.MAX_SELECTORS)
    """Cells to extend or to add, after `exclude`."""
    overrides: tuple[OverrideEntry, ...] = Field(default=(), strict=False, max_length=values.MAX_SELECTORS)
    """Settings for selected cells, after `include`."""
    expected: tuple[ExpectedEntry, ...] = Field(default=(), strict=False, max_length=values.MAX_SELECTORS)
    """Cells that must fail, and how."""

    _written: YamlDocument = PrivateAttr()

    @property
    def written(self) -> YamlDocument:
        """Where its entries are written, for messages."""
        return self._written


@cache
def manifest_schema(*, draft7: bool = False) -> JsonSchema:
    """Return the manifest's JSON Schema: draft 2020-12, or draft-07 for the editors that know no other.

    It accepts what `parse_manifest` accepts, except that it does not compare entries (unknown names, selectors).
    It is made once: do not change the result.
    """
    text = json.dumps(_described(Manifest.model_json_schema(by_alias=True)))
    schema: JsonSchema = json.loads(text, object_hook=_tidy)
    schema["title"] = "Compile farm manifest"
    if not draft7:
        return {"$schema": "https://json-schema.org/draft/2020-12/schema", "$id": values.SCHEMA_ID, **schema}
    text = json.dumps(schema).replace('"#/$defs/', '"#/definitions/')
    identity = values.SCHEMA_ID.replace(".schema", ".draft7.schema")
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "$id": identity,
        **json.loads(text, object_hook=_as_draft7),
    }


def _described(schema: JsonSchema) -> JsonSchema:
    """Add to each field its docstring, and name an entry's own fields before those that it inherits.

    Pydantic would read the source for the docstrings at every start of `farm`.
    """
    for kind in _kinds(values.Entry):
        if document := schema if kind is Manifest else schema["$defs"].get(kind.__name__):
            texts, fields = _docstrings(kind), document["properties"]
            for name in kind.model_fields.keys() & texts:
                alias = kind.model_fields[name].alias
                fields[alias] = dict(sorted({"description": texts[name], **fields[alias]}.items()))
            own = {kind.model_fields[name].alias for name in kind.__annotations__ if name in kind.model_fields}
            document["properties"] = dict(sorted(fields.items(), key=lambda field: field[0] not in own))
    return schema


def _kinds(kind: type[values.Entry]) -> Iterator[type[values.Entry]]:
    for special in kind.__subclasses__():
        yield special
        yield from _kinds(special)


def _docstrings(kind: type[values.Entry]) -> dict[str, str]:
    """Return the docstring of each field of a kind of entry, with the inherited ones."""
    found: dict[str, str] = {}
    for base in (kind for kind in reversed(kind.__mro__) if issubclass(kind, values.Entry)):
        for above, below in pairwise(_classes(base.__module__)[base.__name__].body):
            match above, below:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                    found[name] = inspect.cleandoc(text)
    return found


@cache
def _classes(module: str) -> dict[str, ast.ClassDef]:
    """Return the classes at the top of a module by name; the source is read once for all."""
    tree = ast.parse(inspect.getsource(sys.modules[module]))
    return {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}


def _tidy(schema: JsonSchema) -> JsonSchema:
    """Close a mapping whose keys have a pattern, and drop its title and a default that says nothing."""
    result = {
        key: value
        for key, value in schema.items()
        if not (key == "title" and isinstance(value, str))
        and not (key == "default" and not isinstance(value, str | int))
    }
    if "patternProperties" in result:
        result.setdefault("additionalProperties", False)
    return result


def _as_draft7(schema: JsonSchema) -> JsonSchema:
    result: JsonSchema = {}
    dependencies: JsonSchema = {}
    for key, value in schema.items():
        if key in ("dependentRequired", "dependentSchemas"):
            dependencies |= value
        else:
            result["definitions" if key == "$defs" else key] = value
    if dependencies:
        result["dependencies"] = dependencies
    if "$ref" in result and len(result) > 1:
        # In draft-07 a reference hides all other keys of its object.
        return {"allOf": [{"$ref": result.pop("$ref")}], **result}
    return result
