"""Requests, checked before anything else sees them; an answer is what the room behind it returns."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, with_config
from typing_extensions import TypedDict

from farm.settings import NAMESPACE
from farm.wire.asked import BUILD_ID, TAG, Patterns

BUILD_REFERENCE = r"^(@latest|b-[0-9a-f]{1,16})$"
JOB_ID = r"^[a-z0-9][a-z0-9-]{0,63}$"
DIGEST = r"^[0-9a-f]{64}$"
FILE_NAME = r"^([A-Za-z0-9][A-Za-z0-9._-]{0,127})?$"
NODE = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,255}$"
POOL = r"^[A-Za-z0-9][A-Za-z0-9._:+-]{0,255}$"
MANIFEST = r"^[a-z0-9][a-z0-9._-]{0,99}$"

Digest = Annotated[str, Field(pattern=DIGEST, description="SHA-256, 64 hex digits")]
Size = Annotated[int, Field(ge=0, le=2**42, description="bytes")]
"""4 TiB at most: a thousand parts of 5 GiB, the most that S3 takes."""


class Retry(BaseModel):
    """The new build, of an ended one's cells; `failed`: those that did not succeed; `only`: that fit a pattern."""

    model_config = ConfigDict(extra="forbid")

    build_id: Annotated[str, Field(pattern=BUILD_ID)]
    failed: bool = False
    only: Patterns = ()


@with_config(ConfigDict(extra="forbid"))
class KnownFailure(TypedDict):
    """What is known about a cell's failure: its kind, why, and the last day on which it is expected."""

    kind: Annotated[str, Field(max_length=64)]
    reason: Annotated[str, Field(min_length=1, max_length=1000)]
    until: Annotated[str, Field(pattern=r"^[0-9]{4}-[0-9]{2}-[0-9]{2}$")]
    link: Annotated[str, Field(pattern=r"^(https?://[^\s<>\"']{1,500})?$", default="")]


SignedMove = Annotated[str, Field(max_length=1 << 16, description="What the caller signed about the ref.")]


class Pointing(BaseModel):
    """Where to point a ref: to the snapshot of `source`, or with `previous` to its snapshot before its last move."""

    model_config = ConfigDict(extra="forbid")

    source: Annotated[str, Field(pattern=TAG)]
    previous: bool = False
    signed: SignedMove = ""


class Location(BaseModel):
    """Where a blob's bytes are, for a few minutes."""

    url: str


class NewToken(BaseModel):
    """A token to be made. `max_cells`: how many unfinished cells its builds may have; 0 means no bound."""

    name: Annotated[str, Field(pattern=TAG)]
    role: Literal["monitor", "reader", "submitter", "admin"]
    namespace: Annotated[str, Field(pattern=NAMESPACE)]
    max_cells: Annotated[int, Field(ge=0, le=10**9)] = 0


class HealthView(BaseModel):
    """The farm answers, and so do its job store and object storage."""

    status: Literal["ok"]
    version: str
    store: Literal["ok"]
    storage: Literal["ok"]


Document = dict[str, Any]


def text(media_type: str) -> dict[int | str, Document]:
    """Return what the OpenAPI document says of an answer that is text of this type."""
    return {200: {"content": {media_type: {"schema": {"type": "string"}}}}}
