"""Bounds: what the type of a field alone does not say about it.

Answers of children are checked by them: in the farm by a reader that needs only the standard library, as children and
`farm reproduce` do (`farm.compiling.asking`), and by pydantic wherever the same types are part of a stored or a sent
document.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Annotated, Any, ClassVar, Literal


@dataclass(frozen=True)
class Bound:
    """The least and the greatest number, lengths, the form of a text; to pydantic a group of its own annotations."""

    least: float | None = None
    most: float | None = None
    above: float | None = None
    shortest: int = 0
    longest: int | None = None
    pattern: str = ""
    inside: bool = False
    """The text is a relative path that stays in its folder."""

    __is_annotated_types_grouped_metadata__: ClassVar[Literal[True]] = True

    def __iter__(self) -> Iterator[object]:
        """Yield the same as annotations of pydantic."""
        from pydantic import AfterValidator, Field

        if self.pattern:
            yield Field(pattern=f"^(?:{self.pattern})$" if "|" in self.pattern else f"^{self.pattern}$")
        yield Field(
            ge=self.least, gt=self.above, le=self.most, min_length=self.shortest or None, max_length=self.longest
        )
        if self.inside:
            yield AfterValidator(relative)


class Default:
    """The value of a field that a document leaves out, for whoever reads it through pydantic."""

    def __init__(self, value: object) -> None:
        self.value = value

    def __get_pydantic_core_schema__(self, source: Any, handler: Callable[[Any], Any]) -> object:
        """Return pydantic's schema of the field."""
        from pydantic_core import core_schema

        return core_schema.with_default_schema(handler(source), default=self.value, validate_default=True)


class Unchecked:
    """An object that pydantic takes as it is: releases before wrote other fields, and whoever reads it knows which."""

    def __get_pydantic_core_schema__(self, source: Any, handler: Callable[[Any], Any]) -> object:
        """Return pydantic's schema of the field."""
        from pydantic_core import core_schema

        return core_schema.dict_schema(core_schema.str_schema())


def relative(path: str) -> str:
    """Return a path that stays in its folder, as it is. Raises ValueError for any other."""
    parts = PurePosixPath(path)
    if parts.is_absolute() or ".." in parts.parts or "\0" in path or "\\" in path or not parts.parts:
        raise ValueError("must be a relative path inside the model's folder")
    return path


Amount = Annotated[float, Bound(least=0)]  # Seconds, errors, shares.
Count = Annotated[int, Bound(least=0)]
Name = Annotated[str, Bound(longest=1024)]  # Of an input, an output or a node.
Word = Annotated[str, Bound(longest=256)]  # A dtype, an operator, a version.
Given = Annotated[str, Bound(longest=1000, pattern="[A-Za-z0-9][A-Za-z0-9._/:+-]*")]
"""What only the farm names: cells, toolchains, architectures. It becomes part of scripts, paths and pages."""
Label = Annotated[str, Bound(longest=256, pattern="[A-Za-z0-9._+-]*")]
"""What becomes part of a key: a toolchain, a target, a version of a library."""
File = Annotated[str, Bound(longest=1024, inside=True)]  # In or below the model's folder.
Digest = Annotated[str, Bound(pattern="[0-9a-f]{64}")]  # SHA-256.
Size = Annotated[int, Bound(least=0, most=2**42)]
"""Bytes. 4 TiB at most: a thousand parts, of which S3 takes 5 GiB each."""
