"""Run benchmarks, print their figures next to their goals and to the last recorded ones, and draw them: `make bench`.

    python -m tests.benchmarks [NAME ...] [--runs N] [--record]

Without a name, all of them: an hour on two quiet cores. Writes `.farm/bench/figures.jsonl` (the machine, then one
figure a line) and `figures.svg`. What has fewer than three values is not compared: `--runs 3` brings them. With
`--record` the figures go into the baseline, next to others of this machine. Bytes are compared on the machine of the
baseline alone, times if it is as fast as then, too, ratios everywhere. Exits with 1 if a benchmark fails or a figure is
worse.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

from tests.benchmarks.figures import KEEP, Figure, machine, read_figures, row

HERE = Path(__file__).parent
OUT = HERE.parent.parent / ".farm" / "bench"
BASELINE = HERE / "baseline.jsonl"
"""The machine, then one figure a line."""


def main() -> int:
    """Run, compare, draw."""
    names = sorted(path.stem for path in HERE.glob("[a-z]*.py") if path.stem != "figures")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(names))
    parser.add_argument("--runs", type=int, default=1, metavar="N", help="run each so often")
    parser.add_argument("--record", action="store_true", help="keep the figures as the baseline")
    given = parser.parse_args()
    if unknown := set(given.names) - set(names):
        parser.error(f"there is no benchmark {', '.join(sorted(unknown))}")
    OUT.mkdir(parents=True, exist_ok=True)
    kept = OUT / "figures.jsonl"
    kept.write_text(json.dumps(machine()) + "\n")
    failed = []
    for name in [name for name in given.names or names for _ in range(given.runs)]:
        print(f"\n== {name}", flush=True)
        run = [sys.executable, "-m", f"tests.benchmarks.{name}"]
        if subprocess.run(run, env={**os.environ, KEEP: str(kept)}, check=False).returncode:
            failed.append(name)
    here, *lines = kept.read_text().splitlines()
    found = read_figures(lines)
    there, *lines = BASELINE.read_text().splitlines() if BASELINE.exists() else [""]
    before = read_figures(lines)
    print(f"\n{machine()}, load {os.getloadavg()[0]:.1f}")
    worse = []
    for figure in found.values():
        earlier = before.get(figure.name)
        change = earlier and figure.change_from(earlier, same_machine=here == there)
        worse += [figure.name] if change == "worse" else []
        print(f"{row(figure):120} {f'baseline {earlier.median:.4g}: {change}' if earlier else ''}".rstrip())
    if found:
        draw(list(found.values()), before, OUT / "figures.svg")
        print(f"drawn in {OUT / 'figures.svg'}")
    if given.record:
        recorded = {**(before if here == there else {}), **found}
        BASELINE.write_text("\n".join([here, *(json.dumps(asdict(figure)) for figure in recorded.values())]) + "\n")
    print(*(f"failed: {name}" for name in failed), *(f"worse: {name}" for name in worse), sep="\n")
    return 1 if failed or worse else 0


def draw(figures: list[Figure], before: dict[str, Figure], path: Path) -> None:
    """Draw each figure that has a goal as a share of it: right of the line is better than the goal."""
    from matplotlib.figure import Figure as Picture

    shown = [figure for figure in figures if figure.goal and figure.median][::-1]
    picture = Picture(figsize=(9, 0.6 + 0.32 * len(shown)), layout="constrained")
    axes = picture.add_subplot()
    for place, figure in enumerate(shown):
        better = [_times_better(figure, value) for value in figure.values]
        middle = _times_better(figure, figure.median)
        colour = "#2a78d6" if figure.meets_goal else "#d03b3b"
        axes.plot([min(better), max(better)], [place, place], color=colour, linewidth=2)
        axes.plot(middle, place, "o", color=colour)
        axes.annotate(f"{figure.median:.3g} {figure.unit}", (middle, place), (6, 5), textcoords="offset points", size=8)
        if earlier := before.get(figure.name):
            axes.plot(_times_better(figure, earlier.median), place, "|", color="#898781", markersize=12)
    axes.set_yticks(range(len(shown)), [f"{figure.name} ({figure.goal:g} {figure.unit})" for figure in shown], size=8)
    axes.set_xscale("log")
    axes.axvline(1, color="#0b0b0b", linewidth=0.8)
    axes.set_xlabel("times better than the goal (grey: the baseline)", size=8)
    picture.savefig(path)


def _times_better(figure: Figure, value: float) -> float:
    assert figure.goal
    return value / figure.goal if figure.more_is_better else figure.goal / max(value, 1e-9)


if __name__ == "__main__":
    sys.exit(main())
