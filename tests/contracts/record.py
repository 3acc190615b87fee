"""Records the farm's contracts again: `python -m tests.contracts.record`, from the repository's root.

Only for a change that is meant: users of the farm rely on what is recorded. The diff of `recorded/` goes into the
commit that makes the change, and says what it changes for users.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.contracts import object_keys, planned, published

FOLDER = Path(__file__).parent / "recorded"
AGAIN = "python -m tests.contracts.record"

Document = dict[str, Any]

CONTRACTS: dict[str, Callable[[], Document]] = {
    "inputs": planned.inputs,
    "cache-keys": lambda: planned.cache_keys(recorded("inputs")),
    "documents": published.digests,
    "command-lines": published.command_lines,
    "exit-codes": published.exit_codes,
    "object-storage": object_keys.object_storage,
    "redis": object_keys.redis,
}
"""What makes each contract out of the code as it is. `cache-keys` are made from recorded `inputs`, which come first."""


def recorded(name: str) -> Document:
    """Return a contract as it was recorded."""
    document: Document = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    return document


def text_of(value: Any, levels: int = 3, indent: str = "") -> str:
    """Return JSON with so many levels spread over lines, and each value below them on one: its diff can be read."""
    if levels and isinstance(value, dict) and value:
        inner = f"{indent}  "
        items = (f"{inner}{json.dumps(name)}: {text_of(item, levels - 1, inner)}" for name, item in value.items())
        return "{\n" + ",\n".join(items) + f"\n{indent}}}"
    if levels and isinstance(value, list) and value:
        return "[\n" + ",\n".join(f"{indent}  {json.dumps(item)}" for item in value) + f"\n{indent}]"
    return json.dumps(value, sort_keys=True)


def main() -> None:
    """Write every contract, and say which ones changed."""
    FOLDER.mkdir(exist_ok=True)
    for name, now in CONTRACTS.items():
        file = FOLDER / f"{name}.json"
        before, after = file.read_text(encoding="utf-8") if file.exists() else "", f"{text_of(now())}\n"
        file.write_text(after, encoding="utf-8")
        sys.stdout.write(f"{file.relative_to(Path.cwd())}: {'as it was' if before == after else 'recorded'}\n")


if __name__ == "__main__":
    main()
