"""How much sooner a model is tuned where other slots help: a scripted tuner, a real database.

    python tests/benchmarks/tuning_fan_out.py [--slices 24] [--seconds 5]

A model is tuned in one slot, in two and in four, all made up; its slices take `seconds` each, in which the script
sleeps where a GPU would work. Printed: the time as a part of that in one slot, and what is ideal. The S3 server is
an embedded SeaweedFS.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from farm.artifacts.s3 import S3Store
from tests.benchmarks.figures import figure
from tests.benchmarks.tuning_kills import storage_of_its_own, tune
from tests.support.scripted_tuner import CANDIDATES, PER_SLICE, save_model


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slices", type=int, default=24)
    parser.add_argument("--seconds", type=float, default=5.0)
    arguments = parser.parse_args()
    # Each candidate is compiled, then timed, for half of `slowest` each on average.
    slowest = arguments.seconds / PER_SLICE / CANDIDATES
    with storage_of_its_own() as settings:
        alone = 0.0
        for slots in (1, 2, 4):
            operations = [f"{slots}-{index}" for index in range(arguments.slices * PER_SLICE)]
            model = save_model(settings.data_dir / f"model-{slots}", operations, slowest)
            started = time.monotonic()
            tune(S3Store.from_settings(settings), settings, settings.data_dir, f"attempt-{slots}", model, slots)
            seconds = time.monotonic() - started
            alone = alone or seconds
            figure(f"tuning a model in {slots} slots, against one", seconds / alone, "x", 0.4 if slots == 4 else None)
    if seconds / alone > 0.4:
        sys.exit("four slots take more than 40 % of the time of one")


if __name__ == "__main__":
    main()
