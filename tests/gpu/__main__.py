"""Run the whole farm on this machine's NVIDIA cards and write down what was seen.

    python -m tests.gpu [--out FOLDER] [--only STAGE,…] [--short] [--kills 20] [--minutes 10] [--rehearse]

Each stage has a farm of its own (real Valkey, SeaweedFS, server, workers) in a temporary folder. NVML is asked for the
processes on each card throughout. Nothing is changed on the cards: plain allocations only; the illegal access is last.
Writes `gpu.json`, `gpu.md` and `gpu.png`, again after every stage. A stage that fails is in the report, and the exit
status is 1. SIGTERM breaks the stage under way, and no other begins. `--rehearse` needs no card: it takes the stages
that need none, on this machine's CPU.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
import threading
from contextlib import suppress
from pathlib import Path

from tests.gpu.gpu_report import draw, table
from tests.gpu.stages import Run

STAGES = (
    "machine", "sealed", "matrix", "loop", "scaling", "foreign", "memory", "fallback", "hidden", "loaded", "tensorrt",
    "killed", "tuning", "gated", "illegal",
)  # fmt: skip
REHEARSED = ("machine", "sealed", "matrix", "loop", "scaling", "killed", "tuning", "gated", "loaded")
"""Those that need no card."""


def main() -> int:
    """Run the stages and write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(".farm/gpu"), help="the folder of the report")
    parser.add_argument("--only", default="", help=f"these stages, of {', '.join(STAGES)}")
    parser.add_argument("--short", action="store_true", help="each thing once, and the larger nets alone")
    parser.add_argument("--kills", type=int, default=20, help="how many processes are killed in `killed`")
    parser.add_argument("--minutes", type=float, default=60.0, help="begin no stage after so long")
    parser.add_argument("--rehearse", action="store_true", help="on this machine's CPU, what needs no card")
    given = parser.parse_args()
    stages = REHEARSED if given.rehearse else STAGES
    wanted = [name for name in given.only.split(",") if name] or list(stages)
    if unknown := [name for name in wanted if name not in stages]:
        parser.error(f"no stage {', '.join(unknown)}: there are {', '.join(stages)}")
    given.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="farm-gpu-", ignore_cleanup_errors=True) as work:
        run = Run(Path(work).resolve(), kills=given.kills, short=given.short, rehearsal=given.rehearse)
        if not run.cards:
            sys.exit("no NVIDIA card can be used here (farm doctor says why); --rehearse needs none")
        left_out = []
        terminated = threading.Event()

        def terminate(*_: object) -> None:
            if not terminated.is_set():
                terminated.set()
                raise TimeoutError("terminated")

        signal.signal(signal.SIGTERM, terminate)
        for name in [name for name in STAGES if name in wanted]:
            if terminated.is_set() or run.sampler.now > given.minutes * 60:
                left_out.append(name)
                continue
            found = run.take(name)
            print(f"{name}: {'ok' if found['ok'] else 'NOT ok'} {found['to'] - found['from']:.0f} s", flush=True)
            document = {
                "rehearsal": run.rehearsal,
                "stages": run.found,
                "samples": run.sampler.samples,
                "processes": run.sampler.changes,
            }
            (given.out / "gpu.json").write_text(json.dumps(document, indent=1))
            (given.out / "gpu.md").write_text(table(run))
        run.sampler.stop()
        with suppress(ImportError):
            draw(run, given.out / "gpu.png")
        if left_out:
            print(f"not begun, since the time was over: {', '.join(left_out)}")
    return 0 if not left_out and all(found["ok"] for found in run.found.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
