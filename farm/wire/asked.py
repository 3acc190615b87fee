"""What is asked for over HTTP: parts of submissions, and builds of what the farm has already."""

# Without annotations from `__future__`: the fields of documents would be compiled from text at every start.

from collections.abc import Mapping
from typing import Annotated, NotRequired

from pydantic import ConfigDict, Field, with_config
from typing_extensions import TypedDict

from farm.runner.protocol import Bound, Digest, Size, Word

BUILD_ID = r"^b-[0-9a-f]{16}$"
TAG = r"^[a-z0-9][a-z0-9._-]{0,63}$"

BuildId = Annotated[str, Field(pattern=BUILD_ID)]
GateName = Annotated[str, Bound(pattern="latency|throughput|size|memory|load|compile_time|tuning_time")]
Labels = Annotated[Mapping[Annotated[str, Bound(longest=64)], Word], Bound(longest=64)]
Patterns = Annotated[tuple[Annotated[str, Field(max_length=256)], ...], Field(max_length=100)]
ToolchainStart = Annotated[
    str, Field(pattern=r"^$|^[a-z][a-z0-9._-]{0,99}$", description="the start of its id", default="")
]


class BlobSize(TypedDict):
    """A blob, and its bytes."""

    digest: Digest
    size: Size


@with_config(ConfigDict(extra="forbid"))
class ChosenGates(TypedDict):
    """Gates and budgets for all cells of a submission, laid over those of its manifest.

    `limits`: by which share a number may be worse than the baseline's. `budgets`: in seconds, bytes, samples a second.
    Null switches one off. `first`: the baseline's tag need not exist yet.
    """

    baseline: Annotated[str, Field(pattern=rf"^$|{TAG}", description="a tag; empty: the manifest's", default="")]
    limits: Annotated[dict[GateName, Annotated[float, Field(ge=0, le=1e6)] | None], Field(default={})]
    budgets: Annotated[dict[GateName, Annotated[float, Field(gt=0, le=1e18)] | None], Field(default={})]
    first: Annotated[NotRequired[bool], Field(description="a first run: the tag need not exist yet")]
