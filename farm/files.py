"""Files that come whole or not at all."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a new path in the folder of `path`. The file that is made there becomes `path` when the block ends.

    Other processes see what was at `path` before, or all of the new file. If the block fails, the new file is removed.
    Raises OSError.
    """
    part = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    try:
        yield part
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
