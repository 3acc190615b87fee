"""Run the whole farm on this machine's NVIDIA or AMD cards and write down what was seen.

    python -m tests.gpu [--maker amd] [--out FOLDER] [--only STAGE,…] [--short] [--kills 20] [--minutes 10] [--rehearse]

Each stage has a farm of its own (real Valkey, SeaweedFS, server, workers) in a temporary folder. NVML or KFD is asked
for the processes on each card throughout. Nothing is changed on the cards: plain allocations only; the illegal access
is last. Writes `gpu.json`, `gpu.md` and `gpu.png` (of AMD cards with the card's name), again after every stage; what an
earlier run wrote of other stages stays there. A stage that fails is in the report, and the exit status is 1. SIGTERM
breaks the stage under way, and no other begins.
`--rehearse` needs no card: it takes the stages that need none, on this machine's CPU, and says why others were not.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
import threading
from contextlib import suppress
from importlib.metadata import entry_points
from pathlib import Path

from tests.gpu.amd_stages import AmdRun, card_name
from tests.gpu.gpu_report import draw, table
from tests.gpu.stages import Run, for_others

STAGES = (
    "machine", "sealed", "matrix", "loop", "scaling", "foreign", "memory", "fallback", "hidden", "loaded", "tensorrt",
    "killed", "tuning", "gated", "illegal",
)  # fmt: skip
AMD_STAGES = (
    "machine", "sealed", "matrix", "provider", "loop", "scaling", "foreign", "dirty", "memory", "hidden", "killed",
    "tuning", "exhaustive", "gated", "illegal",
)  # fmt: skip


def main() -> int:
    """Run the stages and write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--maker", choices=("nvidia", "amd"), default="nvidia", help="whose cards")
    parser.add_argument("--out", type=Path, default=Path(".farm/gpu"), help="the folder of the report")
    parser.add_argument("--only", default="", help="these stages alone")
    parser.add_argument("--short", action="store_true", help="each thing once, and the larger nets alone")
    parser.add_argument("--kills", type=int, default=20, help="how many processes are killed in `killed`")
    parser.add_argument("--minutes", type=float, default=60.0, help="begin no stage after so long")
    parser.add_argument("--rehearse", action="store_true", help="on this machine's CPU, what needs no card")
    given = parser.parse_args()
    amd = given.maker == "amd"
    stages = AMD_STAGES if amd else STAGES
    wanted = [name for name in given.only.split(",") if name] or list(stages)
    if unknown := [name for name in wanted if name not in stages]:
        parser.error(f"no stage {', '.join(unknown)}: there are {', '.join(stages)}")
    if not entry_points(group="farm.extensions"):
        sys.exit("this Python has no extensions of the farm: install its wheel there (`make dist`)")
    given.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="farm-gpu-", ignore_cleanup_errors=True) as work:
        run = (AmdRun if amd else Run)(
            Path(work).resolve(), kills=given.kills, short=given.short, rehearsal=given.rehearse
        )
        if not run.cards:
            sys.exit(f"no {given.maker.upper()} card can be used here (farm doctor says why); --rehearse needs none")
        name_of_report = card_name(run) if amd else "gpu"
        written = given.out / f"{name_of_report}.json"
        document = {
            "rehearsal": run.rehearsal,
            "what": run.played if run.rehearsal else "on a card",
            "compiler": f"{run.compiler}/{run.device}",
        }
        earlier = json.loads(written.read_text()) if written.exists() else {}
        if document.items() <= earlier.items():
            run.found.update(earlier["stages"])
        left_out, taken = [], []
        terminated = threading.Event()

        def terminate(*_: object) -> None:
            if not terminated.is_set():
                terminated.set()
                raise TimeoutError("terminated")

        signal.signal(signal.SIGTERM, terminate)
        for name in [name for name in stages if name in wanted]:
            if terminated.is_set() or run.sampler.now > given.minutes * 60:
                left_out.append(name)
                continue
            found = run.take(name)
            print(f"{name}: {'ok' if found['ok'] else 'NOT ok'} {found['to'] - found['from']:.0f} s", flush=True)
            taken.append(found)
            run.found = {each: run.found[each] for each in stages if each in run.found}
            seen = {"stages": run.found, "samples": run.sampler.samples, "processes": run.sampler.changes}
            written.write_text(for_others(json.dumps({**document, **seen}, indent=1)))
            (given.out / f"{name_of_report}.md").write_text(for_others(table(run)))
        run.sampler.stop()
        with suppress(ImportError):
            draw(run, given.out / f"{name_of_report}.png")
        if left_out:
            print(f"not begun, since the time was over: {', '.join(left_out)}")
    return 0 if not left_out and all(found["ok"] for found in taken) else 1


if __name__ == "__main__":
    sys.exit(main())
