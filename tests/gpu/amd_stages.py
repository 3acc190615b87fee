"""What is done on AMD cards, for owners of one: the stages of `stages.py` with MIGraphX, and what only AMD's have."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from farm.client.freezing import freeze
from farm.compiling.child_process import Seal, run_child
from farm.compiling.failures import ChildLimits, classify
from farm.node.gpus import FORGET_SECONDS, NODES, PROCESSES, Gpu, Machine, kernel_gpus
from farm.node.survey import survey
from farm.settings import load_settings
from tests.gpu.card_sampler import KfdSampler
from tests.gpu.stages import CHILD, Run, build, rows, succeeded, wait_for_probe
from tests.support.places import ROOT

PROVIDER = "MIGraphXExecutionProvider"
HELD = 1 << 30
"""Bytes that a foreign process holds."""


class AmdRun(Run):
    """One run of all stages on AMD cards. A rehearsal takes MIGraphX's `ref`; without MIGraphX, ONNX Runtime.

    Where `HIP_STANDIN` names a stand-in for the HIP runtime, as in the tree of `make test-amd`, it takes the `gpu`
    target instead: the machine and KFD are played, nothing is verified, and all nets are a small one.
    """

    maker = "amd"
    visible = "ROCR_VISIBLE_DEVICES"
    precisions: tuple[str, ...] = ("fp32", "fp16", "bf16")
    more_of_matrix = "packs: [onnxruntime]"
    nobodys = "GPU-0000000000000000"
    open_to_all = ()
    needs_card: Mapping[str, str] = {
        "provider": "the provider loads programs for GPUs alone",
        **dict.fromkeys(("foreign", "dirty", "memory", "hidden", "illegal"), "needs KFD and HIP"),
    }

    def __init__(self, work: Path, *, kills: int = 20, short: bool = False, rehearsal: bool = False) -> None:
        standin = os.environ.get("HIP_STANDIN", "") if rehearsal else ""
        self.kfd = PlayedKfd() if standin else None
        self.environment = {"HIP_STANDIN": standin} if standin else {}
        findings = survey(settings := load_settings())
        self.search = [findings.migraphx_path] if findings.migraphx_path else []
        self.python = settings.migraphx_python
        compilers = {pool.target.compiler for pool in findings.pools}
        self.compiler = "migraphx" if not rehearsal or "migraphx" in compilers else "onnxruntime"
        super().__init__(work, kills=kills, short=short, rehearsal=rehearsal)
        if self.kfd or not rehearsal:
            # A manifest is for one arch: cards of another one do nothing here.
            self.cards = [gpu.pin for gpu in self.sampler.gpus if gpu.arch == self.sampler.gpus[0].arch]
            self.device = self.device_of_cards()
        if self.kfd:
            self.gpu = {"gpu": self.cards[0], "maker": self.maker}
            self.precisions = ("fp16",)
            self.played = "rehearsed, no card: a genuine MIGraphX; HIP's runtime, KFD and the machine are played"
            self.played += ". Accuracy and speed are not measured: times are invented"
            self.measured = False
            self.needs_card = dict.fromkeys(("loop", "gated"), "launches do nothing, so all times are invented")
        elif rehearsal:
            self.device = "ref" if self.compiler == "migraphx" else "cpu"
            self.more_of_matrix = ""

    def sampler_of_cards(self) -> KfdSampler:
        """Return what watches the cards."""
        return KfdSampler()

    def device_of_cards(self) -> str:
        """Return the device that manifests name: the first card's arch."""
        return self.sampler.gpus[0].arch.partition(":")[0] if self.sampler.gpus else ""

    def manifest(self, name: str, precisions: Sequence[str], *, more: str = "", **others: Any) -> Path:
        """Write a manifest; on a stand-in for HIP nothing can be verified, and MIOpen compiles for minutes."""
        if self.kfd:
            others["nets"], more = ["small"], f"verify: off\n{more}"
        return super().manifest(name, precisions, more=more, **others)

    @contextmanager
    def holding(self) -> Iterator[int]:
        """Hold memory of the first card in a process of its own while the block runs; yield its pid."""
        command = [sys.executable, str(CHILD), "hold-amd", self.cards[0], str(HELD)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout and process.stdout.readline() == "holding\n"
            if self.kfd:
                self.kfd.note(process.pid, HELD)
            try:
                yield process.pid
            finally:
                process.communicate()

    def provider(self) -> dict[str, Any]:
        """A pack of a program is loaded by ONNX Runtime's MIGraphX provider, without a compile."""
        python = os.environ.get("FARM_TEST_ORT_MIGRAPHX", sys.executable)
        asked = [python, "-c", "import onnxruntime; print(onnxruntime.get_available_providers())"]
        if PROVIDER not in subprocess.run(asked, capture_output=True, text=True, check=False).stdout:
            why = "this interpreter's ONNX Runtime has no MIGraphX provider, and FARM_TEST_ORT_MIGRAPHX names no other"
            return {"left_out": why, "ok": True}
        net = "small" if self.rehearsal else "residual"
        manifest = self.manifest("provider", ["fp32"], nets=[net], more="packs: [onnxruntime-cache]")
        folder = self.work / "provider-pack"
        with self.farm(self.work / "provider-farm", self.cards[:1]) as (client, _):
            wait_for_probe(client)
            report = build(client, manifest, 200 * self.patience)
            asked = {"folder": folder, "layout": "onnxruntime-cache", "python": python}
            pack = client.fetch(f"{net}-0", self.device, "fp32", **asked)
        command = [python, str(CHILD), "use", str(folder), str(manifest.parent / f"{net}-0.onnx")]
        # As a library that is linked: the stand-in has to be there before ROCm's.
        played = {"LD_PRELOAD": self.environment["HIP_STANDIN"]} if self.kfd else {}
        variables = {**os.environ, **played, self.visible: self.cards[0]}
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=variables)
        ran = done.returncode == 0
        error = float(done.stdout) if ran and self.measured else None
        for file in (folder / "cache").iterdir():
            file.unlink()
        without = subprocess.run(command, capture_output=True, text=True, check=False, env=variables)
        compiled, compiles = ("Model Compile" in each.stderr for each in (done, without))
        compared = f"rel_l2 {error} of the same model on the CPU" if self.measured else "it ran" if ran else "it failed"
        return {
            "cells": rows(report),
            "pack": [file["path"] for file in pack.pack.index["files"]] if pack.pack else [],
            "error": error,
            "said": done.stderr[-2000:],
            "said_without_the_program": without.stderr[-2000:],
            "seen": f"{compared}, {'compiled again' if compiled else 'no compile'}; without our file"
            f" {'it compiles' if compiles else 'it says nothing of a compile either'}",
            "ok": ran and not compiled and compiles and (error is None or error < 1e-3),
        }

    def exhaustive(self) -> dict[str, Any]:
        """An exhaustive search ends, its program carries what it found, and is published only if it is faster."""
        nets = [] if self.rehearsal else ["residual"]
        manifest = self.manifest("exhaustive", ["fp16"], nets=nets, more="tuning: exhaustive")
        with self.farm(self.work / "exhaustive-farm", self.cards[:1]) as (client, _):
            wait_for_probe(client)
            report = build(client, manifest, 400 * self.patience)
            sidecars = [client.artifacts.get(cell["key"]) for cell in report["cells"] if cell["facts"]]
        tuning = [each["tuning"] for each in sidecars]
        return {
            "cells": rows(report),
            "tuning": tuning,
            "ratio": [each["measurements"]["ratio"] for each in sidecars],
            "seen": ", ".join(f"{each['tuned']} tuned, {each['published']} published" for each in tuning),
            "ok": succeeded(report) == len(report["cells"])
            and all(each["finished"] and (each["carried"] or each["published"] == "untuned") for each in tuning),
        }

    def hidden(self) -> dict[str, Any]:
        """A card that a child cannot see is a fault of the GPU, and no compile on the CPU; the next child runs."""
        found = super().hidden()
        kinds = [found[name]["kind"] for name in ("hidden", "next")]
        return {**found, "seen": f"{kinds[0]}; the next child {kinds[1] or 'ran'}", "ok": kinds == ["gpu_fault", ""]}

    def memory(self) -> dict[str, Any]:
        """A child that takes more memory than the card has ends as `gpu_memory`, and the next child runs."""
        return self._ends("too-much", "gpu_memory")

    def illegal(self) -> dict[str, Any]:
        """A broken kernel is a fault of the GPU; the next child on the card runs."""
        return self._ends("illegal", "gpu_fault")

    def _ends(self, action: str, wanted: str) -> dict[str, Any]:
        end = run_child(
            {**self.gpu, "action": action, "arch": self.sampler.gpus[0].arch},
            log_path=self.work / f"{action}.txt",
            limits=ChildLimits(time=60),
            environment=self.environment,
            seal=Seal(read=[ROOT / "farm" / "runner", CHILD]),
            script=CHILD,
        )
        failure = classify(end)
        kind = failure.kind.value if failure else ""
        next_ = self.child(self.cards[0])
        return {
            "kind": kind,
            "message": failure.message if failure else "",
            "log": end.log_tail[-1000:],
            "next": next_,
            "seen": f"{kind or 'no failure'}; the next child {next_['kind'] or 'ran'}",
            "ok": kind == wanted and not next_["kind"],
        }

    def foreign(self) -> dict[str, Any]:
        """While a process of others holds memory of the card, the worker rests and names it; then the job runs."""
        manifest = self.manifest("foreign", ["fp32"], nets=["residual"])
        with self.farm(self.work / "foreign-farm", self.cards[:1]) as (client, _):
            wait_for_probe(client)
            with self.holding() as pid:
                deadline = time.monotonic() + 60
                # It looks once in a heartbeat: what came before would run, and be marked as shared.
                while not (said := _resting(client)) and time.monotonic() < deadline:
                    time.sleep(0.2)
                submitted = client.submit(freeze(manifest))["id"]
                waits = [cell["state"] for cell in client.report(submitted)["cells"]]
            deadline = time.monotonic() + 120 * self.patience
            while client.build(submitted)["state"] == "open" and time.monotonic() < deadline:
                time.sleep(0.2)
            report = client.report(submitted)
        return {
            "pid": pid,
            "said": said,
            "while_it_rested": waits,
            "cells": rows(report),
            "seen": said or "the worker did not rest",
            "ok": "is not free" in said and succeeded(report) == len(report["cells"]),
        }

    def dirty(self) -> dict[str, Any]:
        """A process that holds memory is killed (-9): KFD forgets it, its memory is free, and the next child runs."""
        before = self.sampler.memory()
        with self.holding() as pid:
            during = self.sampler.memory()
            os.kill(pid, signal.SIGKILL)
            since = time.monotonic()
        while self.sampler.memory() != before and time.monotonic() - since < FORGET_SECONDS:
            time.sleep(0.01)
        seconds = round(time.monotonic() - since, 2)
        next_ = self.child(self.cards[0])
        after = self.sampler.memory()
        return {
            "bytes": {"before": before, "during": during, "after": after},
            "seconds_until_forgotten": seconds,
            "next": next_,
            "seen": f"KFD forgot it after {seconds} s; the next child {next_['kind'] or 'ran'}",
            "ok": during != before and after == before and not next_["kind"],
        }


def _resting(client: Any) -> str:
    return next((worker["resting"] for worker in client.workers.all() if "is not free" in worker["resting"]), "")


class PlayedKfd:
    """A stand-in for KFD in a recorded tree: it remembers who holds memory of the first card, and forgets the dead."""

    def __init__(self) -> None:
        machine = Machine()
        self.folder = machine.path(PROCESSES)
        self.folder.mkdir(exist_ok=True)
        for node in machine.numbered(NODES):
            machine.path(f"{NODES}/{node}/gpu_id").write_text(f"{1000 + node}\n")
        self.first = next(gpu.node for gpu in kernel_gpus(machine))
        threading.Thread(target=self._forget, daemon=True).start()

    def note(self, pid: int, size: int) -> None:
        """Say that a process holds memory."""
        (self.folder / str(pid)).mkdir()
        (self.folder / str(pid) / f"vram_{1000 + self.first}").write_text(f"{size}\n")

    def _forget(self) -> None:
        while True:
            for folder in self.folder.iterdir():
                if not Path("/proc", folder.name).exists():
                    shutil.rmtree(folder)
            time.sleep(0.05)


def card_name(run: Run) -> str:
    """Return the file name of a report: the card's model and arch (`instinct-mi210-gfx90a`), or `rehearsal`."""
    if run.rehearsal or not run.cards:
        return "rehearsal-gpu-target" if run.gpu else "rehearsal"
    gpu: Gpu = run.sampler.gpus[0]
    words = f"{gpu.model.removeprefix('AMD ')} {gpu.arch.partition(':')[0]}".lower()
    return re.sub(r"[^a-z0-9]+", "-", words).strip("-")
