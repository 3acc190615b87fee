"""The child that reads what a user brings for a tuning database, and chooses what fits; see `brought.py`.

It runs like every child of the farm: under a guard, with limits of time and memory, and sealed. It imports the farm
before it is sealed, and reads nothing that is not its own after that.
"""

from __future__ import annotations

import sys
from itertools import islice
from pathlib import Path
from typing import Any

LONGEST = 250
"""Characters of a name, a reason or a message in the answer, which has 1 MiB at most."""

MOST_REFUSED = 1000
"""Files that are named as refused."""

ROOT = Path(__file__).parent.parent.parent


def choose(request: dict[str, Any], _: object) -> dict[str, Any]:
    """Write the records that fit to the file `delta`, and say what they are; or why nothing can be read."""
    from farm.errors import UsageError
    from farm.spec import Device
    from farm.tuning import text
    from farm.tuning.importing import fitting
    from farm.tuning.records import RecordSource

    try:
        offered = text.unpack(Path(request["offered"]).read_bytes(), text.BROUGHT)
        text.check(offered)
        known = text.unpack(Path(request["known"]).read_bytes())
        found = fitting(offered, known, Device(**request["made_on"]), request["toolchain"], request["miopen"])
    except UsageError as error:
        return {"refusal": error.message[:LONGEST], "hint": error.hint[:LONGEST]}
    delta = found.snapshot.measured_by(RecordSource(*request["source"]))
    Path(request["delta"]).write_bytes(text.pack(delta) if delta else b"")
    return {
        "records": delta.counts(),
        "added": len(delta.join(known)) - len(known),
        "refused": {name[:LONGEST]: why[:LONGEST] for name, why in islice(found.refused.items(), MOST_REFUSED)},
    }


if __name__ == "__main__":
    # The folder of this file has modules whose names others may mean.
    sys.path[0] = str(ROOT)
    import farm.tuning.importing
    import farm.tuning.text  # noqa: F401 - before the seal: the farm's own files are not among what may be read
    from farm.runner import child

    sys.exit(child.start(choose))
