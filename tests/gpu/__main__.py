"""Run the whole farm on this machine's NVIDIA cards and write down what was seen.

    python -m tests.gpu [--out FOLDER] [--only STAGE,…] [--kills 20] [--minutes 10]

Each stage has a farm of its own (real Valkey, SeaweedFS, server, workers) in a temporary folder. NVML is asked for the
processes on each card throughout. Nothing is changed on the cards: plain allocations only; the illegal access is last.
Writes `gpu.json`, `gpu.md` and `gpu.png`. A stage that fails is in the report, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from farm.client.client import FarmClient, freeze
from farm.compiling.child_process import ChildLimits, Seal, run_child
from farm.compiling.failures import classify
from farm.local.embedded import EmbeddedFarm
from farm.node.machine import Machine
from farm.node.nvidia_gpus import find_nvidia_gpus
from farm.node.nvml import open_nvml
from farm.node.survey import survey
from farm.settings import Settings, load_settings
from tests.gpu.larger_nets import NETS, left_out
from tests.support.places import ROOT

CHILD = Path(__file__).with_name("card_child.py")
SAMPLE_SECONDS = 0.05
THREADS = 4
"""Threads of each slot, however many cards there are."""


class Sampler:
    """Asks NVML which processes are on each card, again and again, and remembers every change."""

    def __init__(self) -> None:
        nvml, _ = open_nvml(Machine())
        assert nvml, "no NVML"
        self.nvml = nvml
        self.cards = [gpu.uuid for gpu in find_nvidia_gpus(Machine(environ={}))[0]]
        self.samples = 0
        self.changes: list[tuple[float, int, tuple[int, ...]]] = []
        self.began = time.monotonic()
        self._now: dict[int, tuple[int, ...]] = {}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        handles = [self.nvml.device(uuid) for uuid in self.cards]
        while not self._over.wait(SAMPLE_SECONDS):
            self.samples += 1
            for card, handle in enumerate(handles):
                pids = tuple(sorted(pid for pid, _ in self.nvml.processes(handle) or []))
                if pids != self._now.get(card, ()):
                    self._now[card] = pids
                    self.changes.append((round(time.monotonic() - self.began, 3), card, pids))

    def stop(self) -> None:
        self._over.set()
        self._thread.join()

    def memory(self) -> list[int]:
        return [self.nvml.used(self.nvml.device(uuid)) or 0 for uuid in self.cards]

    def most(self, since: float) -> int:
        """The most processes that were on one card at once, from a moment on."""
        return max((len(pids) for at, _, pids in self.changes if at >= since), default=0)

    @property
    def now(self) -> float:
        return round(time.monotonic() - self.began, 3)


@contextmanager
def a_farm(folder: Path, cards: list[str], **more: Any) -> Iterator[tuple[FarmClient, Settings]]:
    """A farm whose worker sees these cards."""
    before = os.environ.get("CUDA_VISIBLE_DEVICES")
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(cards)
    settings = load_settings(data_dir=folder, threads=THREADS, cpu_slots=1, measure_seconds=0.5, **more)
    farm = EmbeddedFarm(settings)
    try:
        with farm as running, FarmClient.from_settings(running) as client:
            yield client, running
    finally:
        os.environ.pop("CUDA_VISIBLE_DEVICES")
        if before is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = before


def build(client: FarmClient, manifest: Path, seconds: float) -> dict[str, Any]:
    """Submit a manifest and wait for its verdict, so long at most; return the report."""
    return follow(client, client.submit(freeze(manifest))["id"], seconds)


def follow(client: FarmClient, build_id: str, seconds: float) -> dict[str, Any]:
    deadline = time.monotonic() + seconds
    while client.build(build_id)["state"] == "open" and time.monotonic() < deadline:
        time.sleep(0.2)
    return client.report(build_id)


def rows(report: dict[str, Any]) -> list[dict[str, Any]]:
    """What the tables have of each cell."""
    found = []
    for cell in report["cells"]:
        facts = cell["facts"] or {}
        found.append(
            {
                **{name: cell[name] for name in ("identifier", "state", "kind", "message", "attempt", "worker")},
                "latency": facts.get("latency"),
                "error": max(facts["errors"].values(), default=None) if facts else None,
                **{
                    name: facts.get(name) for name in ("verified", "weak", "shared", "processes", "seconds", "fallback")
                },
            }
        )
    return found


def succeeded(report: dict[str, Any]) -> int:
    return sum(cell["state"] == "succeeded" for cell in report["cells"])


def write_manifest(folder: Path, name: str, precisions: list[str], *, copies: int = 1, more: str = "") -> Path:
    """The larger nets on CUDA, each so often: copies differ by their salt alone."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = ["version: 1", f"name: {name}", "targets: [onnxruntime/cuda]", f"precisions: [{', '.join(precisions)}]"]
    lines += ["models:"]
    for copy in range(copies):
        for seed, (net, write) in enumerate(NETS.items()):
            path = write(folder / f"{net}-{copy}.onnx", seed=10 * copy + seed)
            lines += [f"  - name: {net}-{copy}", f"    source: {{path: {path.name}}}"]
    manifest = folder / f"{name}.yaml"
    manifest.write_text("\n".join([*lines, more]) + "\n")
    return manifest


class Run:
    """One run of all stages, and what they found."""

    def __init__(self, work: Path, kills: int) -> None:
        self.work = work
        self.kills = kills
        self.sampler = Sampler()
        self.cards = self.sampler.cards
        self.found: dict[str, Any] = {}

    def machine(self) -> dict[str, Any]:
        """The cards, the driver, the libraries, and what `farm doctor` says of them."""
        findings = survey(load_settings())
        doctor = subprocess.run([sys.executable, "-m", "farm", "doctor"], capture_output=True, text=True, check=False)
        return {
            "gpus": [str(gpu) for gpu in findings.gpus],
            "driver": findings.gpus[0].driver,
            "pools": [pool.name for pool in findings.pools],
            "cpus": os.cpu_count(),
            "kernel": os.uname().release,
            "python": sys.version.split()[0],
            "doctor": re.sub(r"GPU-[0-9a-f-]{36}", "GPU-…", doctor.stdout).splitlines(),
            "ok": bool(findings.gpus) and any(pool.target.maker == "nvidia" for pool in findings.pools),
        }

    def matrix(self) -> dict[str, Any]:
        """The quickstart's nets, and the larger ones, in every precision of CUDA."""
        text = (ROOT / "configs" / "manifests" / "quickstart.yaml").read_text()
        text = re.sub(r"(?m)^targets: .*", "targets: [onnxruntime/cuda]", text)
        text = re.sub(r"(?m)^precisions: .*", "precisions: [fp32, tf32, fp16, bf16, int8]", text)
        reason = "in fp16 on CUDA another label wins"
        text += f"  - {{model: magika, precision: fp16, kind: accuracy, reason: {reason}}}\n"
        folder = self.work / "matrix"
        (folder / "manifests").mkdir(parents=True)
        demo = folder / "demo"
        subprocess.run([sys.executable, str(ROOT / "configs" / "demo_data.py"), str(demo)], check=True, stdout=2)
        small = folder / "manifests" / "quickstart.yaml"
        small.write_text(text.replace("../../.farm/demo", str(demo)))
        large = write_manifest(folder / "large", "larger", ["fp32", "tf32", "fp16", "bf16"])
        since = self.sampler.now
        with a_farm(folder / "farm", self.cards) as (client, _):
            builds = [client.submit(freeze(path))["id"] for path in (small, large)]
            reports = [follow(client, each, 200) for each in builds]
            cells = [row for report in reports for row in rows(report)]
            sidecars = [client.artifact(cell["key"]) for report in reports for cell in report["cells"] if cell["facts"]]
        return {
            "cells": cells,
            "verdicts": [report["build"]["verdict"] for report in reports],
            "placement": {each["identifier"]: each["placement"] for each in sidecars},
            "conditions": sidecars[0]["measurements"]["conditions"] if sidecars else [],
            "most_processes_on_a_card": self.sampler.most(since),
            "ok": all((report["build"]["verdict"] or {}).get("exit_code") == 0 for report in reports),
        }

    def scaling(self) -> dict[str, Any]:
        """The same work on one card, and on all: equal threads a slot, from the end of the upload on."""
        manifest = write_manifest(self.work / "scaling", "scaling", ["fp32", "fp16"], copies=2)
        seconds = {}
        for count in sorted({1, 2, len(self.cards)} & set(range(1, len(self.cards) + 1))):
            with a_farm(self.work / f"scaling-{count}", self.cards[:count]) as (client, _):
                wait_for_probe(client)
                submitted = client.submit(freeze(manifest))["id"]
                start = time.monotonic()
                report = follow(client, submitted, 240)
                seconds[count] = round(time.monotonic() - start, 2)
                assert succeeded(report) == len(report["cells"]), rows(report)
        return {"seconds": seconds, "ratio": {n: round(seconds[1] / s, 2) for n, s in seconds.items()}, "ok": True}

    def foreign(self) -> dict[str, Any]:
        """A process that is not the farm's holds memory of the card while a program is measured."""
        manifest = write_manifest(self.work / "foreign", "foreign", ["fp32"])
        with a_farm(self.work / "foreign-farm", self.cards[:1]) as (client, _):
            wait_for_probe(client)
            with holding(self.cards[0], 1 << 30):
                cells = rows(build(client, manifest, 100))
        return {"cells": cells, "ok": all(row["shared"] and row["processes"]["count"] for row in cells)}

    def memory(self) -> dict[str, Any]:
        """A limit under which the net does not fit fails as such, and the next job runs."""
        folder = self.work / "memory"
        tight = write_manifest(folder, "tight", ["fp32"], more="options: {gpu_mem_limit: 1000000}")
        roomy = write_manifest(folder, "roomy", ["fp32"])
        with a_farm(folder / "farm", self.cards[:1]) as (client, _):
            failed, next_ = rows(build(client, tight, 100)), rows(build(client, roomy, 100))
        kinds = {row["kind"] for row in failed}
        good = all(row["state"] == "succeeded" for row in next_)
        return {"cells": failed, "next": next_, "ok": kinds == {"gpu_memory"} and good}

    def fallback(self) -> dict[str, Any]:
        """A node that CUDA has no kernel for is named, and refused where the manifest says so."""
        folder = self.work / "fallback"
        folder.mkdir()
        left_out(folder / "det.onnx")
        cells = []
        with a_farm(folder / "farm", self.cards[:1]) as (client, _):
            for gate in ("warn", "fail"):
                manifest = folder / f"{gate}.yaml"
                manifest.write_text(
                    f"version: 1\nname: {gate}\ntargets: [onnxruntime/cuda]\nprecisions: [fp32]\n"
                    f"models: [{{name: det, source: {{path: det.onnx}}, verify: {{fallback: {gate}}}}}]\n"
                )
                report = build(client, manifest, 100)
                cells += [
                    {**row, "warning": cell["warning"]} for row, cell in zip(rows(report), report["cells"], strict=True)
                ]
        warned, failed = cells
        good = "Det" in warned["warning"] and warned["state"] == "succeeded"
        return {"cells": cells, "ok": good and failed["kind"] == "fallback"}

    def hidden(self) -> dict[str, Any]:
        """A card that a child cannot see is a lost GPU, and no session on the CPU; the next child runs."""
        ends = [self.child(uuid) for uuid in ("GPU-00000000-0000-0000-0000-000000000000", self.cards[0])]
        return {"hidden": ends[0], "next": ends[1], "ok": ends[0]["kind"] == "gpu_lost" and ends[1]["kind"] == ""}

    def killed(self) -> dict[str, Any]:
        """Workers, their processes and children are killed at random points while a build runs."""
        manifest = write_manifest(self.work / "killed", "killed", ["fp32", "fp16"], copies=4)
        before, chance, killed = self.sampler.memory(), random.Random(7), []
        hurt: set[str] = set()
        with a_farm(self.work / "killed-farm", self.cards, lease_seconds=6, renew_seconds=1, retry_delay=0.2) as farm:
            client, settings = farm
            wait_for_probe(client)
            build_id = client.submit(freeze(manifest))["id"]
            start = time.monotonic()
            while client.build(build_id)["state"] == "open" and time.monotonic() - start < 330:
                time.sleep(chance.uniform(0.5, 2.5))
                if len(killed) < self.kills and (victim := a_victim(chance, settings, hurt)):
                    killed.append(victim)
            report = follow(client, build_id, 5)
            audit = list(client.audit())
        time.sleep(2)
        attempts = [cell["attempt"] for cell in report["cells"]]
        after = self.sampler.memory()
        ends = [self.child(uuid)["kind"] for uuid in self.cards]
        return {
            "kills": killed,
            "cells": rows(report),
            "attempts": attempts,
            "audit": audit,
            "memory_before": before,
            "memory_after": after,
            "cards_usable_after": [not kind for kind in ends],
            "ok": succeeded(report) == len(attempts)
            and not any(ends)
            and after == before
            and len(killed) == self.kills,
        }

    def illegal(self) -> dict[str, Any]:
        """A broken kernel is a fault of the GPU; the next child on the card runs."""
        end = run_child(
            {"gpu": self.cards[0], "maker": "nvidia", "action": "illegal"},
            log_path=self.work / "illegal.txt",
            limits=ChildLimits(time=60),
            seal=Seal(read=[ROOT / "farm" / "runner", CHILD]),
            script=CHILD,
        )
        failure = classify(end)
        next_ = self.child(self.cards[0])
        kind = failure.kind.value if failure else ""
        return {
            "kind": kind,
            "message": failure.message if failure else "",
            "next": next_,
            "ok": kind == "gpu_fault" and not next_["kind"],
        }

    def child(self, uuid: str) -> dict[str, str]:
        """Compile a small net on a card, in a sealed child; return the kind of its failure, empty if it has none."""
        folder = Path(tempfile.mkdtemp(dir=self.work))
        model = NETS["residual"](folder / "net.onnx", batch=1)
        (folder / "out").mkdir()
        end = run_child(
            {
                "action": "compile",
                "compiler": "onnxruntime",
                "device": "cuda",
                "threads": THREADS,
                "gpu": uuid,
                "maker": "nvidia",
                "model": {"path": str(model), "format": "onnx", "outputs": []},
                "inputs": {"x": {"dtype": "float32", "shape": [1, 3, 128, 128]}},
                "batch": None,
                "options": {},
                "quantization": {},
                "tuning": {"mode": "off"},
                "calibration": None,
                "precision": "fp32",
                "program": str(folder / "out" / "net.onnx"),
            },
            log_path=folder / "log.txt",
            limits=ChildLimits(time=120),
            seal=Seal(read=[model], write=[folder / "out"]),
        )
        failure = classify(end)
        return {"kind": failure.kind.value if failure else "", "message": failure.message if failure else ""}


@contextmanager
def holding(uuid: str, size: int) -> Iterator[None]:
    command = [sys.executable, str(CHILD), "hold", uuid, str(size)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout and process.stdout.readline() == "holding\n"
        try:
            yield
        finally:
            process.communicate()


def wait_for_probe(client: FarmClient) -> None:
    """Until every worker takes jobs, so that its first health probe is in no time that is compared."""
    deadline = time.monotonic() + 90
    while any(worker["fenced"] or worker["resting"] for worker in client.workers()):
        if time.monotonic() > deadline:
            raise RuntimeError(f"workers take no jobs: {client.workers()}")
        time.sleep(0.2)


def a_victim(chance: random.Random, settings: Settings, hurt: set[str]) -> str:
    """Kill one process of the worker at random: the supervisor, its Celery process, or a child that works.

    A child is not killed twice at one job, since a compiler that dies twice is the model's fault.
    """
    wanted = chance.choices(["child", "celery", "supervisor"], [5, 4, 1])[0]
    found = []
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            if not entry.name.isdigit() or str(settings.data_dir).encode() not in (entry / "environ").read_bytes():
                continue
            words = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
            kind = "celery" if "celery" in words else "supervisor" if words[-2:-1] == ["worker"] else ""
            found += [(int(entry.name), kind, "")] if kind == wanted else []
    if wanted == "child":
        for entry in Path("/proc").iterdir():
            with suppress(OSError):
                words = (
                    (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
                    if entry.name.isdigit()
                    else []
                )
                place = next((word for word in words if word.startswith(f"{settings.data_dir}/work/")), "")
                job = place.removeprefix(f"{settings.data_dir}/work/").partition("-")[0] if place else ""
                found += [(int(entry.name), "child", job)] if job and job not in hurt else []
    if not found:
        return ""
    pid, kind, job = chance.choice(found)
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    hurt.add(job)
    return kind


def draw(run: Run, path: Path) -> None:
    """Processes on each card over time."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 1.2 + 0.7 * len(run.cards)), layout="constrained")
    axes = figure.subplots()
    end = run.sampler.now
    for card in range(len(run.cards)):
        changes = [(at, len(pids)) for at, where, pids in run.sampler.changes if where == card]
        times, counts = [0.0, *(at for at, _ in changes), end], [0, *(count for _, count in changes)]
        axes.stairs([card + 0.35 * count for count in counts], times, baseline=card, fill=True)
    axes.set_yticks(range(len(run.cards)), [f"card {card}" for card in range(len(run.cards))])
    axes.set_xlabel("seconds")
    axes.set_title("processes on each card, by NVML (the height of a step is one)")
    for name, found in run.found.items():
        axes.axvline(found["from"], color="grey", linewidth=0.5)
        axes.text(found["from"], len(run.cards) - 0.2, name, fontsize=7, rotation=20)
    figure.savefig(path, dpi=110)


def table(run: Run) -> str:
    """The report for people."""
    lines = ["# The farm on NVIDIA cards", "", "Written by `python -m tests.gpu`.", ""]
    lines += ["| stage | what | came out as wanted | seconds |", "| --- | --- | --- | --- |"]
    for name, found in run.found.items():
        what = (getattr(Run, name).__doc__ or "").strip().splitlines()[0]
        lines.append(f"| {name} | {what} | {'yes' if found['ok'] else 'NO'} | {found['to'] - found['from']:.0f} |")
    machine = run.found.get("machine", {})
    lines += ["", *(f"- {line}" for line in machine.get("gpus", [])), f"- driver {machine.get('driver', '')}", ""]
    cells = run.found.get("matrix", {}).get("cells", [])
    if cells:
        lines += ["| cell | state | latency, ms | rel_l2 | weak |", "| --- | --- | --- | --- | --- |"]
    for cell in cells:
        latency = f"{cell['latency'] * 1e3:.3f}" if cell["latency"] else ""
        error = f"{cell['error']:.2g}" if cell["error"] is not None else ""
        weak = "weak" if cell["weak"] else ""
        lines.append(f"| {cell['identifier']} | {cell['kind'] or cell['state']} | {latency} | {error} | {weak} |")
    if scaling := run.found.get("scaling", {}).get("ratio"):
        lines += ["", "Times the work of one card: " + ", ".join(f"{n} cards {r}" for n, r in scaling.items())]
    for name, found in run.found.items():
        if found.get("broke"):
            lines += ["", f"## {name} broke", "", "```", found["broke"], "```"]
    return "\n".join(lines) + "\n"


STAGES = ("machine", "matrix", "scaling", "foreign", "memory", "fallback", "hidden", "killed", "illegal")


def main() -> int:
    """Run the stages and write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(".farm/gpu"))
    parser.add_argument("--only", default=",".join(STAGES))
    parser.add_argument("--kills", type=int, default=20)
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="farm-gpu-", ignore_cleanup_errors=True) as work:
        run = Run(Path(work).resolve(), given.kills)
        for name in [name for name in STAGES if name in given.only.split(",")]:
            since = run.sampler.now
            stage: Callable[[], dict[str, Any]] = getattr(run, name)
            try:
                found = stage()
            except Exception:
                found = {"ok": False, "broke": traceback.format_exc()[-3000:]}
                for log in Path(work).glob("*/farm/logs/worker.log"):
                    found["worker_log"] = log.read_text()[-3000:]
            run.found[name] = {**found, "from": since, "to": run.sampler.now}
            print(f"{name}: {'ok' if found['ok'] else 'NOT ok'} {run.sampler.now - since:.0f} s", flush=True)
            document = {"stages": run.found, "samples": run.sampler.samples, "processes": run.sampler.changes}
            (given.out / "gpu.json").write_text(json.dumps(document, indent=1))
            (given.out / "gpu.md").write_text(table(run))
        run.sampler.stop()
        with suppress(ImportError):
            draw(run, given.out / "gpu.png")
    return 0 if all(found["ok"] for found in run.found.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
