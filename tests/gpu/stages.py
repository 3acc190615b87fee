"""What is done on the cards, stage by stage, and what came of it."""

from __future__ import annotations

import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from farm.artifacts.sidecar import validate
from farm.client.client import FarmClient
from farm.client.freezing import freeze
from farm.compiling.attempt import Slot
from farm.compiling.child_process import Seal, run_child
from farm.compiling.failures import ChildLimits, classify
from farm.extras.packs.layouts import for_own_program
from farm.local.embedded import EmbeddedFarm
from farm.node.gpus import Machine
from farm.node.survey import share_out, survey
from farm.settings import Settings, load_settings
from farm.targets.compilers import Maker, compilers, filled
from tests.gpu.card_sampler import CardSampler, NvmlSampler
from tests.gpu.larger_nets import LARGER, NETS, left_out
from tests.support.places import ROOT
from tests.support.plain_loop import plain_loop, plain_process, work_orders
from tests.support.reaching import HOSTILE, PROBES, make_places, within_reach

CHILD = Path(__file__).with_name("card_child.py")
THREADS = 4
"""Threads of each slot, however many cards there are."""
LONGEST_PROBE = 300.0
"""Seconds for the first health probe: MIGraphX and MIOpen build their first kernels then."""
LONGEST_START = 60.0
"""Seconds after which some job of a build has begun, or its stage breaks: time on a card is dear."""
MOST_OVERHEAD = 1.05
"""What the farm may take of one card's time, in times of a plain loop's."""
PROOF = ("ratio", "interval", "tuned", "baseline")
"""What a sidecar says of the tuned program and the untuned one, which took turns."""
LEAST_OF_FOUR = 3.4
"""What four cards do at least, in times of one's work."""


def build(client: FarmClient, manifest: Path, seconds: float) -> dict[str, Any]:
    """Submit a manifest and wait for its verdict, so long at most; return the report."""
    return follow(client, client.submit(freeze(manifest))["id"], seconds)


def follow(client: FarmClient, build_id: str, seconds: float) -> dict[str, Any]:
    """Wait for a build's end, so long at most; raises at once if the workers have begun nothing for a minute."""
    start = time.monotonic()
    while client.build(build_id)["state"] == "open" and time.monotonic() - start < seconds:
        time.sleep(0.2)
        if time.monotonic() - start > LONGEST_START:
            cells = client.report(build_id)["cells"]
            if all(cell["state"] == "queued" for cell in cells):
                raise RuntimeError(f"no job has begun: {sorted({cell['waiting'] or '' for cell in cells})}")
    return client.report(build_id)


def for_others(text: str) -> str:
    """Return a report's text without the folders of this machine and the UUIDs of its cards."""
    for place, name in ((sys.prefix, "VENV"), (str(ROOT), "FARM"), (str(Path.home()), "HOME")):
        text = text.replace(f"{place}/", f"{name}/")
    return re.sub(r"GPU-[0-9a-f-]{16,36}", "GPU-…", text)


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


class Run:
    """One run of all stages, and what they found.

    A short one does each thing once, with the larger nets alone. A rehearsal does on this machine's CPU what needs no
    card, to show that the stages themselves work.
    """

    maker: Maker = "nvidia"
    visible = "CUDA_VISIBLE_DEVICES"
    compiler = "onnxruntime"
    precisions = ("fp32", "tf32", "fp16", "bf16")
    more_of_matrix = ""
    nobodys = "GPU-00000000-0000-0000-0000-000000000000"
    """The UUID of no card."""
    open_to_all = ("listen on a local socket", "keep bytes in a pair of sockets")
    """What a hostile child may reach on a card: CUDA listens on a local socket."""
    needs_card: Mapping[str, str] = dict.fromkeys(
        ("foreign", "memory", "fallback", "hidden", "tensorrt", "illegal"), "needs a card and its libraries"
    )
    """Stages that no rehearsal takes, and why."""
    played = "rehearsed, no card: on this machine's CPU"
    """What a rehearsal shows instead of a card."""
    measured = True
    """Whether times of programs are what something took."""
    environment: Mapping[str, str] = {}
    """Further variables for children that use the card by the driver's own interface."""
    search: Sequence[str] = ()
    python = ""
    """Where the compiler is: folders to import it from, and its interpreter; empty: this one's."""

    def __init__(self, work: Path, *, kills: int = 20, short: bool = False, rehearsal: bool = False) -> None:
        self.work = work
        # A short run has six cells: with more kills, one of them may use up its attempts, as it should.
        self.kills = min(kills, 5) if short else kills
        self.short = short
        self.rehearsal = rehearsal
        # How much longer than on a card stages wait for builds: a rehearsal measures nothing.
        self.patience = 5 if rehearsal else 1
        self.sampler = self.sampler_of_cards()
        self.cards = ["rehearsal"] if rehearsal else self.sampler.cards
        self.device = "cpu" if rehearsal else self.device_of_cards()
        self.gpu = {} if rehearsal or not self.cards else {"gpu": self.cards[0], "maker": self.maker}
        self.found: dict[str, Any] = {}

    def sampler_of_cards(self) -> CardSampler:
        """Return what watches the cards."""
        return NvmlSampler()

    def device_of_cards(self) -> str:
        """Return the device that manifests name."""
        return "cuda"

    @contextmanager
    def farm(self, folder: Path, cards: list[str], **more: Any) -> Iterator[tuple[FarmClient, Settings]]:
        """A farm whose worker sees these cards."""
        before = os.environ.get(self.visible)
        if self.gpu:
            os.environ[self.visible] = ",".join(cards)
        settings = load_settings(data_dir=folder, threads=THREADS, cpu_slots=1, measure_seconds=0.5, **more)
        farm = EmbeddedFarm(settings)
        try:
            with farm as running, FarmClient.from_settings(running) as client:
                yield client, running
        finally:
            os.environ.pop(self.visible, None)
            if before is not None:
                os.environ[self.visible] = before

    def take(self, name: str) -> dict[str, Any]:
        """Take a stage, and keep and return what it found; one that breaks found why."""
        since = self.sampler.now
        stage: Callable[[], dict[str, Any]] = getattr(self, name)
        why = self.needs_card.get(name) if self.rehearsal else None
        try:
            found = {"left_out": why, "ok": True} if why else stage()
        except Exception:
            found = {"ok": False, "broke": traceback.format_exc()[-3000:]}
        if not found["ok"]:
            logs = sorted(self.work.glob("**/logs/worker.log"), key=lambda log: log.stat().st_mtime)
            found["worker_log"] = logs[-1].read_text()[-3000:] if logs else ""
        at = datetime.now(UTC).isoformat(timespec="seconds")
        self.found[name] = {**found, "from": since, "to": self.sampler.now, "at": at}
        return self.found[name]

    def manifest(
        self,
        name: str,
        precisions: Sequence[str],
        *,
        nets: Sequence[str] = (),
        copies: int = 1,
        more: str = "",
        device: str = "",
    ) -> Path:
        """Write a manifest of nets, each so often with other weights: the larger ones, or a small one to rehearse."""
        nets = nets or (["small"] if self.rehearsal else LARGER)
        folder = self.work / name
        folder.mkdir(parents=True, exist_ok=True)
        device = device or self.device
        known = [each for each in precisions if each in compilers()[self.compiler].device(device).precisions]
        lines = ["version: 1", f"name: {name}", f"targets: [{self.compiler}/{device}]"]
        lines += [f"precisions: [{', '.join(known)}]", "models:"]
        for copy in range(copies):
            for seed, net in enumerate(nets):
                path = NETS[net](folder / f"{net}-{copy}.onnx", seed=10 * copy + seed)
                lines += [f"  - name: {net}-{copy}", f"    source: {{path: {path.name}}}"]
        manifest = folder / f"{name}.yaml"
        manifest.write_text("\n".join([*lines, more]) + "\n")
        return manifest

    def machine(self) -> dict[str, Any]:
        """The cards, the driver, the libraries, and what `farm doctor` says of them."""
        findings = survey(load_settings())
        doctor = subprocess.run([sys.executable, "-m", "farm", "doctor"], capture_output=True, text=True, check=False)
        return {
            "gpus": [str(gpu) for gpu in findings.gpus],
            "driver": findings.gpus[0].driver if findings.gpus else "",
            "pools": [pool.name for pool in findings.pools],
            "cpus": os.cpu_count(),
            "kernel": os.uname().release,
            "python": sys.version.split()[0],
            "doctor": doctor.stdout.splitlines(),
            "ok": self.rehearsal or any(pool.target.kind.maker == self.maker for pool in findings.pools),
        }

    def sealed(self) -> dict[str, Any]:
        """A hostile child with the card's runtime reaches nothing but its own; a compiler works in the same seal."""
        folder = self.work / "sealed"
        places = make_places(folder)
        readable = [places["input"].parent, ROOT / "farm" / "runner", CHILD.parent, HOSTILE.parent]
        with within_reach(places) as fields:
            end = run_child(
                {
                    "action": "reach",
                    "start": self.maker if self.gpu else "",
                    "key": os.getpid(),
                    **self.gpu,
                    **fields,
                },
                log_path=folder / "log.txt",
                limits=ChildLimits(time=60),
                environment=self.environment,
                seal=Seal(read=readable, write=[places["output"].parent]),
                folder=folder,
                script=CHILD,
            )
        answer = end.result or {}
        probes = answer.get("probes", {})
        reached = [name for name, said in probes.items() if not said.startswith("refused")]
        next_ = self.child(self.cards[0])
        return {
            "started": answer.get("started"),
            "probes": probes,
            "ipc": answer.get("ipc"),
            "reached": reached,
            "log": end.log_tail[-1000:],
            "next": next_,
            "ok": len(probes) == PROBES
            and reached == ([] if self.rehearsal else list(self.open_to_all))
            and set(answer["ipc"].values()) == {"refused"}
            and not next_["kind"],
        }

    def matrix(self) -> dict[str, Any]:
        """The quickstart's nets (not if short, nor on AMD), and the larger ones, in every precision of the card."""
        manifests = [] if self.short or self.maker == "amd" else [self.quickstart()]
        manifests.append(self.manifest("larger", self.precisions, more=self.more_of_matrix))
        since = self.sampler.now
        with self.farm(self.work / "matrix-farm", self.cards) as (client, _):
            wait_for_probe(client)
            builds = [client.submit(freeze(path))["id"] for path in manifests]
            reports = [follow(client, each, 200 * self.patience) for each in builds]
            cells = [row for report in reports for row in rows(report)]
            sidecars = [
                client.artifacts.get(cell["key"]) for report in reports for cell in report["cells"] if cell["facts"]
            ]
        marks = {each["identifier"]: each["emulated"] for each in sidecars}
        emulates = compilers()[self.compiler].emulates
        return {
            "cells": cells,
            "verdicts": [report["build"]["verdict"] for report in reports],
            "placement": {each["identifier"]: each["placement"] for each in sidecars},
            "emulated": marks,
            "computed_in": {each["identifier"]: each["compute_dtypes"] for each in sidecars},
            "conditions": sidecars[0]["measurements"]["conditions"] if sidecars else [],
            "most_processes_on_a_card": self.sampler.most(since),
            "ok": all((report["build"]["verdict"] or {}).get("exit_code") == 0 for report in reports)
            and self.sampler.most(since) <= 1
            and all(list(mark) == list(emulates(self.device, name.split("/")[2])) for name, mark in marks.items()),
        }

    def quickstart(self) -> Path:
        """Write the quickstart's manifest for CUDA, with its samples."""
        text = (ROOT / "configs" / "manifests" / "quickstart.yaml").read_text()
        text = re.sub(r"(?m)^targets: .*", f"targets: [onnxruntime/{self.device}]", text)
        if self.device == "cuda":
            text = re.sub(r"(?m)^precisions: .*", "precisions: [fp32, tf32, fp16, bf16, int8]", text)
            reason = "in fp16 on CUDA another label wins"
            text += f"  - {{model: magika, precision: fp16, kind: accuracy, reason: {reason}}}\n"
        folder = self.work / "matrix"
        folder.mkdir()
        demo = folder / "demo"
        subprocess.run([sys.executable, str(ROOT / "configs" / "demo_data.py"), str(demo)], check=True, stdout=2)
        manifest = folder / "quickstart.yaml"
        manifest.write_text(text.replace("../../.farm/demo", str(demo)))
        return manifest

    def loop(self) -> dict[str, Any]:
        """One card through the farm, from the end of the upload on, against a plain loop over the same children.

        Both one after the other in turns, with equal threads; at most 1.05 times as long. Shown next to it: one process
        that takes the same steps with one context on the card, and how much longer the farm takes than that outside
        measuring and the two contexts that each of its cells has.
        """
        manifest = self.manifest("loop", ["fp32", "fp16"], nets=["encoder"] if self.rehearsal else LARGER)
        text = manifest.read_text()
        through, looped, alone = [], [], []
        with self.farm(self.work / "loop-farm", self.cards[:1]) as (client, settings):
            wait_for_probe(client)
            for turn in range(1 if self.short else 3):
                manifest.write_text(f"{text}salt: turn {turn}\n")
                frozen = freeze(manifest)
                submitted = client.submit(frozen)["id"]
                start = time.monotonic()
                report = follow(client, submitted, 240 * self.patience)
                through.append(round(time.monotonic() - start, 2))
                assert succeeded(report) == len(report["cells"]), rows(report)
                orders = work_orders(client, report["cells"])
                installed = {"search": list(self.search), "python": self.python}
                seconds = settings.measure_seconds
                took = plain_loop(orders, frozen.files, THREADS, seconds, self.slot(settings), **installed)
                looped.append(round(took, 2))
                if not installed["search"] and not installed["python"]:
                    alone.append(round(plain_process(orders, frozen.files, THREADS, seconds, self.slot(settings)), 2))
        ratio = round(statistics.median(through) / statistics.median(looped), 3)
        found = {"farm": through, "loop": looped, "process": alone, "ratio": ratio, "ok": ratio <= MOST_OVERHEAD}
        if alone and self.maker == "nvidia" and not self.rehearsal:
            found["context"] = context = context_seconds()
            measured = 2 * seconds * len(orders)  # With copies from and to the host, and without.
            outside = statistics.median(through) - measured - 2 * context * len(orders)
            found["outside"] = round(outside / (statistics.median(alone) - measured), 3)
        return {"cells": rows(report), **found}

    def slot(self, settings: Settings) -> Slot:
        """Return the slot that a worker gives the first card's children."""
        findings = survey(settings)
        kinds = share_out(findings.pools, findings.gpus, settings, Machine())
        slots = [slot for kind in kinds for slot in kind.slots]
        return next(slot for slot in slots if slot.gpu == self.gpu.get("gpu", ""))

    def scaling(self) -> dict[str, Any]:
        """The same work on one card, on two and on four: equal threads a slot, from the end of the upload on.

        Four do at least 3.4 times the work of one.
        """
        if len(self.cards) < 2:
            return {"left_out": "there is one card", "ok": True}
        manifest = self.manifest("scaling", ["fp32", "fp16"], copies=max(1 if self.short else 2, len(self.cards)))
        seconds = {}
        for count in sorted({1, 2, 4, len(self.cards)} & set(range(1, len(self.cards) + 1))):
            with self.farm(self.work / f"scaling-{count}", self.cards[:count]) as (client, _):
                wait_for_probe(client)
                submitted = client.submit(freeze(manifest))["id"]
                start = time.monotonic()
                report = follow(client, submitted, 240 * self.patience)
                seconds[count] = round(time.monotonic() - start, 2)
                assert succeeded(report) == len(report["cells"]), rows(report)
        ratio = {n: round(seconds[1] / s, 2) for n, s in seconds.items()}
        return {"seconds": seconds, "ratio": ratio, "ok": ratio.get(4, LEAST_OF_FOUR) >= LEAST_OF_FOUR}

    def foreign(self) -> dict[str, Any]:
        """A process that is not the farm's holds memory of the card while a program is measured."""
        manifest = self.manifest("foreign", ["fp32"])
        with self.farm(self.work / "foreign-farm", self.cards[:1]) as (client, _):
            wait_for_probe(client)
            with holding(self.cards[0], 1 << 30):
                cells = rows(build(client, manifest, 100))
        return {"cells": cells, "ok": all(row["shared"] and row["processes"]["count"] for row in cells)}

    def memory(self) -> dict[str, Any]:
        """A limit under which the net does not fit fails as such, and the next job runs."""
        folder = self.work / "memory"
        tight = self.manifest("tight", ["fp32"], more="options: {gpu_mem_limit: 1000000}")
        roomy = self.manifest("roomy", ["fp32"])
        with self.farm(folder / "farm", self.cards[:1]) as (client, _):
            wait_for_probe(client)
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
        with self.farm(folder / "farm", self.cards[:1]) as (client, _):
            wait_for_probe(client)
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
        ends = [self.child(uuid) for uuid in (self.nobodys, self.cards[0])]
        return {"hidden": ends[0], "next": ends[1], "ok": ends[0]["kind"] == "gpu_lost" and ends[1]["kind"] == ""}

    def killed(self) -> dict[str, Any]:
        """Workers, their processes and children are killed at random points while a build runs."""
        manifest = self.manifest("killed", ["fp32", "fp16"], copies=1 if self.short else 4)
        before, chance, killed = self.sampler.memory(), random.Random(7), []
        hurt: set[str] = set()
        with self.farm(
            self.work / "killed-farm", self.cards, lease_seconds=6, renew_seconds=1, retry_delay=0.2
        ) as farm:
            client, settings = farm
            wait_for_probe(client)
            build_id = client.submit(freeze(manifest))["id"]
            start, longest = time.monotonic(), self.patience * (120 if self.short and not self.rehearsal else 330)
            while client.build(build_id)["state"] == "open" and time.monotonic() - start < longest:
                time.sleep(chance.uniform(0.5, 2.5))
                if len(killed) < self.kills and (victim := a_victim(chance, settings, hurt)):
                    killed.append(victim)
            report = follow(client, build_id, 5)
            audit = list(client.upkeep.audit())
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

    def tuning(self) -> dict[str, Any]:
        """Tuning goes on after a kill; a second build takes it all from the database; what is not faster stays out."""
        nets = ["segmenter"] if self.short else list(LARGER)
        manifest = self.manifest("tuned", ["fp32"], nets=nets, more="tuning: quick")
        chance, victim = random.Random(3), ""
        found = []
        with self.farm(
            self.work / "tuned-farm", self.cards[:1], lease_seconds=6, renew_seconds=1, retry_delay=0.2
        ) as farm:
            client, settings = farm
            wait_for_probe(client)
            for turn in (1, 2):
                build_id = client.submit(freeze(manifest))["id"]
                deadline = time.monotonic() + 60
                while not victim and time.monotonic() < deadline:
                    time.sleep(0.2)
                    jobs = [client.jobs.get(cell["job"]) for cell in client.report(build_id)["cells"] if cell["job"]]
                    if any(job["phase"] == "tuning" for job in jobs):
                        time.sleep(chance.uniform(3, 6))  # Something is in the database, and something is not.
                        victim = a_victim(chance, settings, set())
                report = follow(client, build_id, 240 * self.patience)
                sidecars = {
                    cell["identifier"]: client.artifacts.get(cell["key"]) for cell in report["cells"] if cell["facts"]
                }
                found.append(
                    [
                        {
                            **row,
                            "tuning": sidecars[row["identifier"]]["tuning"] if row["latency"] else None,
                            **{name: sidecars[row["identifier"]]["measurements"].get(name) for name in PROOF},
                        }
                        for row in rows(report)
                        if row["latency"]
                    ]
                )
                manifest.write_text(f"{manifest.read_text()}salt: turn {turn}\n")
        first, second = found
        good = len(first) == len(second) == len(nets)
        return {
            "killed": victim,
            "cells": first,
            "next": second,
            "ok": good
            and bool(victim)
            and all(row["tuning"]["known"] and not row["tuning"]["tuned"] for row in second),
        }

    def gated(self) -> dict[str, Any]:
        """A gate on latency has the card run a program in turns with its baseline: a new one, and one that is a hit."""
        net = "small" if self.rehearsal else "encoder"
        manifest = self.manifest("gated", ["fp32"], nets=[net], more="gates: {latency: 75%}")
        turns, builds = {}, []
        with self.farm(self.work / "gated-farm", self.cards[:1]) as (client, _):
            wait_for_probe(client)
            for name, seed in (("first", 0), ("miss", 1), ("hit", 0)):
                NETS[net](manifest.parent / f"{net}-0.onnx", seed=seed)
                report = build(client, manifest, 120 * self.patience)
                (cell,) = report["cells"]
                builds.append({**rows(report)[0], "hit": cell["hit"]})
                facts = cell["facts"] or {}
                turns[name] = facts.get("turns") or facts.get("against")
        return {
            "cells": builds,
            "turns": turns,
            "ok": [each["hit"] for each in builds] == [False, False, True]
            and all(each["state"] == "succeeded" for each in builds)
            and all(turns[name] and turns[name]["ratio"] for name in ("miss", "hit")),
        }

    def tensorrt(self) -> dict[str, Any]:
        """The larger nets by TensorRT, if its libraries are here: the program is the engine."""
        if not any(pool.target.device == "tensorrt" for pool in survey(load_settings()).pools):
            return {"left_out": "TensorRT's libraries are not here", "ok": True}
        manifest = self.manifest("tensorrt", ["fp32", "tf32", "fp16", "bf16"], device="tensorrt")
        with self.farm(self.work / "tensorrt-farm", self.cards) as (client, _):
            wait_for_probe(client)
            report = build(client, manifest, 400)
            sidecars = [client.artifacts.get(cell["key"]) for cell in report["cells"] if cell["facts"]]
        return {
            "cells": rows(report),
            "placement": {each["identifier"]: each["placement"] for each in sidecars},
            "computed_in": {each["identifier"]: each["compute_dtypes"] for each in sidecars},
            "ok": succeeded(report) == len(report["cells"]),
        }

    def loaded(self) -> dict[str, Any]:
        """A fetched program runs by its pack as it was verified: fp32 without TF32, tf32 with it."""
        manifest = self.manifest("loaded", ["fp32", "tf32"], nets=["residual"])
        found = {}
        with self.farm(self.work / "loaded-farm", self.cards[:1]) as (client, _):
            wait_for_probe(client)
            report = build(client, manifest, 100)
            for cell in report["cells"]:
                sidecar = client.artifacts.get(cell["key"])
                folder = self.work / "loaded-farm" / "packs" / cell["precision"]
                folder.mkdir(parents=True)
                client.artifacts.download(sidecar["blobs"]["program"], folder)
                (folder / "use.py").write_text(for_own_program(validate(sidecar)))
                command = [sys.executable, str(CHILD), "use", str(folder), str(manifest.parent / "residual-0.onnx")]
                done = subprocess.run(command, capture_output=True, text=True, check=False)
                assert done.returncode == 0, done.stderr[-2000:]
                found[cell["precision"]] = float(done.stdout)
        good = found.get("fp32", 1) < 1e-5 and ("tf32" not in found or found["tf32"] > 1e-5)
        return {"cells": rows(report), "error": found, "ok": good}

    def illegal(self) -> dict[str, Any]:
        """A broken kernel is a fault of the GPU; the next child on the card runs."""
        end = run_child(
            {"gpu": self.cards[0], "maker": self.maker, "action": "illegal"},
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
        model = NETS["small" if self.rehearsal else "residual"](folder / "net.onnx", batch=1)
        program = folder / "out" / ("net.mxr" if self.compiler == "migraphx" else "net.onnx")
        program.parent.mkdir()
        end = run_child(
            {
                "action": "compile",
                "compiler": self.compiler,
                "device": self.device,
                "threads": THREADS,
                "search": list(self.search),
                **({"gpu": uuid, "maker": self.maker} if self.gpu else {}),
                "model": {"path": str(model), "format": "onnx", "names": ["y"]},
                "inputs": {"x": {"dtype": "float32", "shape": [1, 3, 128, 128]}},
                "batch": None,
                "options": filled(compilers()[self.compiler].options_of(self.device), {}),
                "quantization": {},
                "tuning": {"mode": "off"},
                "calibration": None,
                "precision": "fp32",
                "program": str(program),
            },
            log_path=folder / "log.txt",
            python=self.python,
            limits=ChildLimits(time=120 * self.patience),
            seal=Seal(read=[model], write=[folder / "out"]),
        )
        failure = classify(end)
        return {"kind": failure.kind.value if failure else "", "message": failure.message if failure else ""}


def context_seconds() -> float:
    """Return the median seconds in which a process gets a context on the first card from NVIDIA's driver."""
    text = (
        "import ctypes, time; start = time.perf_counter(); cuda = ctypes.CDLL('libcuda.so.1'); "
        "there = ctypes.c_void_p(); "
        "wrong = cuda.cuInit(0) or cuda.cuDevicePrimaryCtxRetain(ctypes.byref(there), 0); "
        "assert not wrong, wrong; print(time.perf_counter() - start)"
    )
    runs = [subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True) for _ in range(5)]
    return round(statistics.median(float(run.stdout) for run in runs), 3)


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
    """Until every worker takes jobs: else a stage would wait for its whole time, or count the first health probe."""
    deadline = time.monotonic() + LONGEST_PROBE
    while reasons := [reason for worker in client.workers.all() if (reason := worker["fenced"] or worker["resting"])]:
        if time.monotonic() > deadline or any(
            word in reason for reason in reasons for word in ("dies at start", "GPU")
        ):
            raise RuntimeError(f"workers take no jobs: {'; '.join(reasons)}")
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
            kind = "celery" if "tasks" in words else "supervisor" if words[-2:-1] == ["worker"] else ""
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
