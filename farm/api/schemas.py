"""Shapes of requests and answers. Answers may grow fields; requests are checked before anything else sees them."""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Annotated, Any, Generic, Literal, Self, TypeVar, cast

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from farm.artifacts.refs import ListedRef
from farm.matrix.planned import SubmissionDocument
from farm.settings import NAMESPACE
from farm.spec import model_digest

BUILD_ID = r"^b-[0-9a-f]{16}$"
BUILD_REFERENCE = r"^(@latest|b-[0-9a-f]{1,16})$"
JOB_ID = r"^[a-z0-9][a-z0-9-]{0,63}$"
DIGEST = r"^[0-9a-f]{64}$"
FILE_NAME = r"^([A-Za-z0-9][A-Za-z0-9._-]{0,127})?$"
NODE = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,255}$"
POOL = r"^[A-Za-z0-9][A-Za-z0-9._:+-]{0,255}$"
TUNING_PART = r"^[A-Za-z0-9][A-Za-z0-9._:+-]{0,255}$"
MESSAGE = r"^msg_[0-9a-f]{32}$"
TAG = r"^[a-z0-9][a-z0-9._-]{0,63}$"
MANIFEST = r"^[a-z0-9][a-z0-9._-]{0,99}$"

Item = TypeVar("Item")
Digest = Annotated[str, Field(pattern=DIGEST, description="SHA-256, 64 hex digits")]
Size = Annotated[int, Field(ge=0, le=2**42, description="bytes")]
"""4 TiB at most: a thousand parts, of which S3 takes 5 GiB each."""
Label = Annotated[str, Field(max_length=256)]


def _relative(path: str) -> str:
    parts = PurePosixPath(path)
    if parts.is_absolute() or ".." in parts.parts or "\0" in path or "\\" in path or not parts.parts:
        raise ValueError("must be a relative path inside the model's folder")
    return path


class _Open(BaseModel):
    """A document that may carry more fields than this version knows."""

    model_config = ConfigDict(extra="allow")


class FileRef(BaseModel):
    """A file of a model or data set, and the blob that holds its bytes."""

    path: Annotated[str, Field(max_length=1024), AfterValidator(_relative)]
    digest: Digest
    size: Size


class ExampleInput(BaseModel):
    """An input that a model was converted with."""

    model_config = ConfigDict(extra="forbid")

    name: Label
    dtype: Label
    sizes: Annotated[list[int], Field(max_length=64)]
    axes: Annotated[dict[Label, Label], Field(max_length=64)]


class ConversionView(BaseModel):
    """How the submitter made a model from one of another format."""

    model_config = ConfigDict(extra="forbid")

    key: Digest
    recipe: int
    name: Label
    converter: Label
    libraries: Annotated[dict[Label, Label], Field(max_length=16)]
    kind: Label
    options: Annotated[dict[Label, int | Label], Field(max_length=16)]
    inputs: Annotated[list[ExampleInput], Field(max_length=1000)]
    source: Digest


class TensorView(_Open):
    """An input or output of a model: its shape has numbers, names, and null for an open dimension."""

    name: Annotated[str, Field(max_length=1024)]
    dtype: Label
    shape: Annotated[list[int | Annotated[str, Field(max_length=1024)] | None], Field(max_length=64)] | None


class FrozenModelView(_Open):
    """A model as the client read and hashed it; the first file is the model itself."""

    digest: Digest
    format: Literal["onnx", "tf"]
    files: Annotated[list[FileRef], Field(min_length=1, max_length=10_000)]
    inputs: Annotated[list[TensorView], Field(max_length=10_000)]
    outputs: Annotated[list[TensorView], Field(max_length=10_000)]
    size: Size
    conversion: ConversionView | None = None

    @model_validator(mode="after")
    def _is_what_it_says(self) -> Self:
        """Check the digest, which the cache key contains: nobody may have a file compiled under the key of another."""
        if self.digest != model_digest({file.path: file.digest for file in self.files}):
            raise ValueError("the digest is not that of the files")
        return self


class FrozenDataView(_Open):
    """A data set as one canonical .npz blob, with the shapes and dtypes of its arrays."""

    digest: Digest
    size: Size
    arrays: dict[str, dict[str, Any]]


class BlobQuery(BaseModel):
    """A blob that the client could send."""

    digest: Digest
    size: Size


GateName = Literal["latency", "throughput", "size", "memory", "load", "compile_time", "tuning_time"]


class GatesView(BaseModel):
    """Gates and budgets for all cells of a submission, laid over those of its manifest.

    `limits`: by which share a number may be worse than the baseline's. `budgets`: in seconds, bytes, samples a second.
    """

    model_config = ConfigDict(extra="forbid")

    baseline: Annotated[str, Field(pattern=rf"^$|{TAG}", description="a tag; empty: the manifest's")] = ""
    limits: dict[GateName, Annotated[float, Field(ge=0, le=1e6)]] = {}
    budgets: dict[GateName, Annotated[float, Field(gt=0, le=1e18)]] = {}


class FrozenManifest(BaseModel):
    """A manifest with everything it names frozen to digests."""

    model_config = ConfigDict(extra="forbid")

    manifest: Annotated[str, Field(max_length=2**20, description="the manifest's YAML text")]
    file: Annotated[str, Field(max_length=1024, description="the manifest's name in messages")] = "manifest.yaml"
    models: dict[str, FrozenModelView]
    data: dict[str, FrozenDataView] = {}
    files: Annotated[dict[str, BlobQuery], Field(description="files of environment variables, by path")] = {}
    labels: Annotated[dict[Annotated[str, Field(max_length=64)], Label], Field(max_length=64)] = {}
    gates: GatesView | None = None


class Submission(FrozenManifest):
    """A manifest with everything it names frozen to digests. Repeating it with the same `build_id` changes nothing."""

    build_id: Annotated[str, Field(pattern=BUILD_ID)]

    def document(self) -> SubmissionDocument:
        """Return the checked submission as plain JSON."""
        return cast(SubmissionDocument, self.model_dump())


class StoredBuild(BaseModel):
    """What to build of a stored manifest: a version (default: the newest), labels, and gates laid over its own."""

    model_config = ConfigDict(extra="forbid")

    version: Annotated[int | None, Field(ge=1)] = None
    labels: Annotated[dict[Annotated[str, Field(max_length=64)], Label], Field(max_length=64)] = {}
    gates: GatesView | None = None


class Retry(BaseModel):
    """The new build with the cells of an ended one; `failed`: only the cells that did not succeed."""

    model_config = ConfigDict(extra="forbid")

    build_id: Annotated[str, Field(pattern=BUILD_ID)]
    failed: bool = False


class KnownFailure(BaseModel):
    """What is known of a cell's failure: its kind, why, and the last day on which it is expected."""

    model_config = ConfigDict(extra="forbid")

    kind: Annotated[str, Field(max_length=64)]
    reason: Annotated[str, Field(min_length=1, max_length=1000)]
    until: Annotated[str, Field(pattern=r"^[0-9]{4}-[0-9]{2}-[0-9]{2}$")]
    link: Annotated[str, Field(pattern=r"^(https?://[^\s<>\"']{1,500})?$")] = ""


Toolchain = Annotated[str, Field(pattern=r"^$|^[a-z][a-z0-9._-]{0,99}$", description="the start of its id")]


class ShadowBuild(BaseModel):
    """A build of what a ref names under another toolchain; `toolchain` empty: the newest that has a worker.

    `cells` are patterns of identifiers, none means all. `against`: an ended build to compare with in place of the ref.
    """

    model_config = ConfigDict(extra="forbid")

    build_id: Annotated[str, Field(pattern=BUILD_ID)]
    ref: Annotated[str, Field(pattern=TAG)] = "prod"
    toolchain: Toolchain = ""
    cells: Annotated[list[Annotated[str, Field(max_length=500)]], Field(max_length=1000)] = []
    gates: GatesView | None = None
    against: Annotated[str, Field(pattern=rf"^$|{BUILD_ID}")] = ""
    defaults: Annotated[bool, Field(description="also the limits of the manifest and the usual ones")] = True


class Promotion(BaseModel):
    """The shadow build whose programs readers get; `force`: those that passed, although others did not."""

    model_config = ConfigDict(extra="forbid")

    build_id: Annotated[str, Field(pattern=BUILD_ID)]
    force: bool = False


class ToolchainChoice(BaseModel):
    """The toolchain whose programs a ref gives to readers again; empty: the one that was superseded last."""

    model_config = ConfigDict(extra="forbid")

    ref: Annotated[str, Field(pattern=TAG)] = "prod"
    toolchain: Toolchain = ""


class ToolchainLineView(_Open):
    """A toolchain of a target: its live workers, and how many cells of a ref readers get of it, or may still name."""

    target: str
    toolchain: str
    live_workers: int
    named: int
    superseded: int


class Pointing(BaseModel):
    """Where to point a ref: to the snapshot of `source`, or with `previous` to its snapshot before its last move."""

    model_config = ConfigDict(extra="forbid")

    source: Annotated[str, Field(pattern=TAG)]
    previous: bool = False


class Range(BaseModel):
    """The expected value, and the range in which about 80 of 100 end."""

    low: float
    expected: float
    high: float


class EstimateView(Range):
    """Seconds that a compile takes; `by` says from which compiles that was learnt."""

    by: str


class Outlook(_Open):
    """When the cells that can be estimated will be done (seconds from now), what they will cost, and what was spent."""

    eta: Range | None
    slot_seconds: Range | None
    gpu_hours: Range | None
    spent_seconds: float
    spent_gpu_hours: float
    unknown: int
    unserved: list[str]
    paused: list[str] | None = None


class PlannedCellView(_Open):
    """One cell, and what the farm would do for it."""

    identifier: str
    key: str
    pool: str
    state: Literal["hit", "miss", "joined"]
    reason: str = ""
    live_workers: int
    expected_seconds: float | None = None
    estimate: EstimateView | None = None


class PlanView(_Open):
    """What a submission would do."""

    build_id: str
    digest: Annotated[str, Field(description="SHA-256 of the cells' identifiers, cache keys and pools")] = ""
    name: str
    cells: list[PlannedCellView]
    outlook: Outlook
    warnings: list[str]
    conversions: dict[str, dict[str, Any]] = {}
    missing_blobs: list[str]


class Verdict(_Open):
    """How a build ended, and what `farm` exits with."""

    exit_code: int
    text: str


class Build(_Open):
    """One submission of one manifest."""

    id: str
    namespace: str
    name: str
    labels: dict[str, str]
    state: Literal["open", "ended", "reported"]
    verdict: Verdict | None = None
    counts: dict[str, int]
    plan: Annotated[
        str | None, Field(description="answer to a submission: the digest of the plan that was accepted")
    ] = None


class CellView(_Open):
    """One cell of a build, and why it is as it is."""

    identifier: str
    state: Literal["queued", "running", "succeeded", "failed", "cancelled"]


class Cancelled(BaseModel):
    """How many cells a cancel ended."""

    cancelled: int


class Finish(BaseModel):
    """The size of a blob whose parts were all sent."""

    size: Size


class BlobsView(BaseModel):
    """Blobs that the client could send, at most 1000 at once."""

    blobs: Annotated[list[BlobQuery], Field(max_length=1000)]


class Location(BaseModel):
    """Where a blob's bytes are, for a few minutes."""

    url: str


class NewToken(BaseModel):
    """A token to be made. `max_cells`: how many unfinished cells its builds may have; 0 is no bound."""

    name: Annotated[str, Field(pattern=TAG)]
    role: Literal["monitor", "reader", "submitter", "admin"]
    namespace: Annotated[str, Field(pattern=NAMESPACE)]
    max_cells: Annotated[int, Field(ge=0, le=10**9)] = 0


class NewWebhook(BaseModel):
    """A webhook to be made, and what it gets."""

    model_config = ConfigDict(extra="forbid")

    name: Annotated[str, Field(pattern=TAG)]
    url: Annotated[str, Field(pattern=r"^https?://[!-~]{1,1000}$")]
    events: Annotated[list[Literal["build.finished", "trigger.failed"]], Field(min_length=1, max_length=2)] = [
        "build.finished"
    ]


class Rotation(BaseModel):
    """How long the secret before signs a webhook's messages, too; 0: not any more, and no older one either."""

    model_config = ConfigDict(extra="forbid")

    overlap: Annotated[float, Field(ge=0, le=30 * 86_400, description="seconds")] = 86_400.0


class TokenView(NewToken):
    """A token as the farm knows it."""

    created: str


class PastCellView(_Open):
    """How a cell ended in one build (`ended` in Unix seconds), and its program's numbers: seconds and bytes."""

    identifier: str
    ended: float
    build: str
    manifest: str
    state: str
    kind: str
    expected: bool
    hit: bool
    key: str
    toolchain: str
    device: str
    node: str
    error: float | None
    values: dict[str, bool | int | float | str | None]


class Rebuilt(BaseModel):
    """How many reports a history was made of."""

    reports: int


class HealthView(BaseModel):
    """The farm answers, and so do its job store and object storage."""

    status: Literal["ok"]
    version: str
    store: Literal["ok"]
    storage: Literal["ok"]


class Items(BaseModel, Generic[Item]):
    """A list of documents, or a part of one: then `next` is where the next part goes on."""

    items: list[Item]
    next: str | None = None


class RefNames(Items[str]):
    """The tags of refs; `refs` says where each points, if it was asked for."""

    refs: list[ListedRef] | None = None


Document = dict[str, Any]
