"""Builds to look at: planned, compiled and failed as the test says, in a farm over real servers, without a compiler."""

from __future__ import annotations

import hashlib
import json
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, NamedTuple

from farm.app import Farm
from farm.artifacts.sidecar import facts, validate
from farm.extras.triggers.stored_manifests import StoredManifests
from farm.extras.webhooks.hooks import Webhooks
from farm.jobs.state import FailureKind, Outcome
from farm.spec import Device, cache_key
from farm.targets.pools import Pool, Target
from tests.support.api_farm import POOL
from tests.support.helpers import wait_until

GPU = Pool(Target("migraphx", "gfx942"), "rocm7.2-5f3a9c01", Device("gfx942", 304), 1)
POOLS = {"onnxruntime/cpu": POOL, "migraphx/gfx942": GPU}
PRECISIONS = ("fp32", "fp16", "int8")
LOG = """\
{identifier} attempt {number}
== fetching ==
model from the node's cache
== compiling ==
reading {model}.onnx: 214 nodes, 25.6 MB
\x1b[32mparsed\x1b[0m in 0.41 s
pass: eliminate_contiguous 0.012 s
pass: \x1b[1mfuse_mlir\x1b[0m 1.204 s
\x1b[33mwarning:\x1b[0m 2 operators run in fp32
"""


class Cell(NamedTuple):
    """One cell to plan; a salt makes its key another one."""

    model: str
    target: str = "onnxruntime/cpu"
    precision: str = "fp32"
    shape: str = "b1"
    salt: str = ""
    reason: str = "first compile"
    expected: Mapping[str, Any] | None = None
    sweep: Mapping[str, Any] | None = None
    before: Mapping[str, Any] | None = None
    """The numbers of `prod`, with which a gate compares its size."""

    @property
    def identifier(self) -> str:
        return f"{self.model}/{self.target.replace('/', '-')}/{self.precision}/{self.shape}"


def matrix_of(
    models: Iterable[str],
    *,
    targets: Sequence[str] = ("onnxruntime/cpu", "migraphx/gfx942"),
    precisions: Sequence[str] = PRECISIONS,
    shapes: Sequence[str] = ("b1", "b8"),
) -> list[Cell]:
    """Every combination, in the order of a manifest."""
    return [
        Cell(model, target, precision, shape)
        for model in models
        for target in targets
        for precision in precisions
        for shape in shapes
    ]


def spec_of(cell: Cell) -> dict[str, Any]:
    pool = POOLS[cell.target]
    compiler, _, _ = cell.target.partition("/")
    batch = int(cell.shape.removeprefix("b")) if cell.shape.startswith("b") else 1
    return {
            "model": {"digest": hashlib.sha256(cell.model.encode()).hexdigest(), "format": "onnx"},
            "compiler": {"name": compiler, "recipe": 1, "libraries": {}},
            "device": asdict(pool.device),
            "toolchain": pool.toolchain,
            "precision": cell.precision,
            "inputs": {"data": {"dtype": "float32", "shape": [batch, 3, 224, 224]}},
            "batch": batch,
            "options": {"level": "standard"},
            "tuning": {"mode": "off"},
            "env": {},
            "calibration": None,
            "quantization": {},
            "verification": {"samples": {"generate": 8, "seed": 0, "ranges": {}}, "reference": "onnxruntime"},
            "salt": cell.salt,
        }  # fmt: skip


def plan_cells(farm: Farm, cells: Iterable[Cell]) -> list[dict[str, Any]]:
    """The cells of a plan; what is published already is a hit."""
    wanted = [(cell, spec := spec_of(cell), cache_key(spec)) for cell in cells]
    known = farm.store.index.get_many("main", [key for *_, key in wanted])
    return [_plan_cell(cell, spec, key, known.get(key)) for cell, spec, key in wanted]


def _plan_cell(cell: Cell, spec: dict[str, Any], key: str, known: Any) -> dict[str, Any]:
    model = {"path": f"{cell.model}.onnx", "digest": spec["model"]["digest"], "size": 71}
    order = {
        "identifier": cell.identifier,
        "pool": POOLS[cell.target].name,
        "target": cell.target,
        "spec": spec,
        "model": {"format": "onnx", "files": [model], "names": ["y"]},
        "calibration": None,
        "samples": None,
    }  # fmt: skip
    return {
        "identifier": cell.identifier,
        "model": cell.model,
        "target": cell.target,
        "precision": cell.precision,
        "shape": cell.shape,
        "sizes": {"batch": int(cell.shape[1:])} if cell.sweep else {},
        "key": key,
        "pool": POOLS[cell.target].name,
        "emulated": [],
        "state": "hit" if known else "miss",
        "reason": "" if known else cell.reason,
        "live_workers": 1,
        "expected_seconds": None,
        "estimate": None,
        "expected": cell.expected,
        "line": 6,
        "warnings": [],
        "order": None if known else order,
        "limits": {"time": 14400.0, "memory": 0},
        "priority": 0,
        "gates": {
            "tolerance": {"*": 0.05},
            "weak": "warn",
            "on_fail": "fail",
            "unverifiable": "publish",
            **({"limits": {"size": 0.05}, "baseline": "prod"} if cell.before else {}),
        },
        "baseline": cell.before
        and {"ref": "prod", "key": "0" * 64, "toolchain": "", "values": cell.before, "by_node": {}},
        "sweep": cell.sweep,
        "facts": known,
    }


def accept(farm: Farm, name: str, cells: Iterable[Cell], **build: Any) -> str:
    """Accept a build of these cells, and return its id."""
    planned = plan_cells(farm, cells)
    build_id = f"b-{secrets.token_hex(8)}"
    document = {
        "schema": 1,
        "build": {
            "id": build_id,
            "namespace": "main",
            "name": name,
            "labels": {},
            "created_by": "nightly",
            "created_at": farm.store.now(),
            "cells": len(planned),
            "hits": sum(each["state"] == "hit" for each in planned),
            "max_parallel": None,
            "fail_fast": False,
            "warnings": [],
            **build,
        },
        "cells": planned,
    }
    farm.admission.accept(document, b"version: 1\n")
    return build_id


def register(farm: Farm) -> None:
    """Register a worker for each pool, with its node."""
    for name, (pool, slots) in {"n1-cpu": (POOL, 4), "n2-gpu": (GPU, 8)}.items():
        worker = {"id": name, "node": name.partition("-")[0], "pid": 1, "host": name, "slots": slots}
        farm.store.workers.register({**worker, "pools": [pool.as_dict()]}, ttl=3600)


Decide = Callable[[str, Mapping[str, Any], str, int], Outcome]
"""How an attempt ends: job, order, cache key, number of the attempt."""


def claim(farm: Farm, pool: Pool, most: int = 10_000) -> list[Any]:
    """Claim up to so many waiting jobs of a pool: `(job, claim)` each."""
    worker = "n1-cpu" if pool is POOL else "n2-gpu"
    taken: list[Any] = []
    while len(taken) < most:
        # What was handed out before and not claimed comes first: nothing hands it out again.
        handed = _handed(farm, pool) or farm.store.jobs.hand_out(pool.name, 100)
        handed = handed[: most - len(taken)]
        if not handed:
            break
        taken += [
            (job, farm.store.jobs.claim(job, number, nonce=secrets.token_hex(4), worker=worker, node=worker[:2]))
            for job, number in handed
        ]
    return taken


def _handed(farm: Farm, pool: Pool) -> list[tuple[str, int]]:
    return farm.store.jobs.strays(pool.name, 0.0)


def play(farm: Farm, decide: Decide) -> None:
    """Run everything that waits, also what is tried again."""
    while any(build["counts"]["queued"] for build in farm.build_reader.list("main", 10_000)):
        if not sum(_play(farm, pool, decide) for pool in POOLS.values()):
            # Nothing to claim now: something is to be tried again soon, or was handed out this very moment.
            wait_until(lambda: farm.store.jobs.promote() or any(_handed(farm, pool) for pool in POOLS.values()))


def _play(farm: Farm, pool: Pool, decide: Decide) -> int:
    taken = claim(farm, pool)
    for job, claimed in taken:
        made = decide(job, claimed.order, claimed.key, claimed.attempt)
        assert farm.store.jobs.finish(job, claimed.token, made) == "ok"
    return len(taken)


def passed(
    farm: Farm,
    order: Mapping[str, Any],
    key: str,
    *,
    job: str = "",
    latency: float = 0.002,
    error: float = 3e-4,
    driver: str | None = None,
    shared: bool = False,
    against: Mapping[str, Any] | None = None,
) -> Outcome:
    """Publish a program, and succeed."""
    sidecar = sidecar_of(farm, order, key, job=job, latency=latency, error=error)
    sidecar["device"]["driver"] = driver
    sidecar["measurements"] |= {"shared": shared, "against": against}
    farm.artifacts.publish("main", sidecar)
    farm.store.index.put("main", key, facts(validate(sidecar)))
    return Outcome.success(facts(validate(sidecar)), log=sidecar["blobs"]["log"]["digest"], phases=PHASES)


def only_recorded(order: Mapping[str, Any], key: str, latency: float = 0.002) -> Outcome:
    """Succeed without a program in object storage: for builds of many cells, of which nothing is fetched."""
    return Outcome.success(facts(validate(sidecar_of(None, order, key, latency=latency))), phases=PHASES)


COMPILED = {
    "passes": {"fuse_mlir": 1.204, "eliminate_contiguous": 0.012, "compile_ops": 5.31, "memory_coloring": 0.094},
    "tuning": {
        "mode": "fast",
        "operations": 54,
        "known": 38,
        "tuned": 14,
        "untunable": 2,
        "database": "migraphx-gfx942-304cu.rocm7.2-migraphx2.15-1a2b3c4d/mi300x/fast",
        "rows": ["5d" * 32, "e1" * 32],
        "seconds": 41.0,
        "saved": 118.0,
    },
    "quantized": {"Conv": 53, "MatMul": 1},
}
"""What a compiler for GPUs says about a program."""


def sidecar_of(
    farm: Farm | None, order: Mapping[str, Any], key: str, *, job: str = "", latency: float, error: float = 3e-4
) -> dict[str, Any]:
    """The sidecar of a program; with a farm its blobs are uploaded."""
    gpu = order["target"].startswith("migraphx")
    text = LOG.format(identifier=order["identifier"], number=1, model=order["identifier"].partition("/")[0])
    weights = 5_000 * {"fp32": 4, "fp16": 2}.get(order["spec"]["precision"], 1)
    program, log = (_blob(farm, data) for data in (f"program {key}".encode().ljust(weights), text.encode()))
    name = order["identifier"].replace("/", "--")
    port = {"dtype": "float32", "shape": order["spec"]["inputs"]["data"]["shape"]}
    return {
        "schema": 1,
        "key": key,
        "namespace": "main",
        "identifier": order["identifier"],
        "spec": order["spec"],
        "blobs": {
            "program": {"path": f"{name}.{'mxr' if gpu else 'onnx'}", **program},
            "log": {"path": "log.txt", **log},
        },
        "toolchain": order["spec"]["toolchain"],
        "device": {"arch": order["spec"]["device"]["arch"], "model": "AMD Instinct MI300X" if gpu else None},
        "inputs": [{"name": "data", **port}],
        "outputs": [{"name": "logits", "dtype": "float32", "shape": [port["shape"][0], 1000]}],
        "offload_copy": True if gpu else None,
        "verification": {
            "reference": "onnxruntime",
            "samples": 8,
            "errors": {"logits": error},
            "rms": {"logits": error / 3},
            "spread": {"logits": 0.7},
        },
        "measurements": {
            "load": 0.21,
            "latency": {
                "median": latency,
                "p90": latency * 1.12,
                "p99": latency * 1.4,
                "minimum": latency * 0.94,
                "repeats": 400,
            },
            "throughput": port["shape"][0] / latency,
        },
        **(COMPILED if gpu else {}),
        "peak_memory": 1_200_000_000,
        "seconds": 12.0,
        "phases": PHASES,
        "worker": "n2-gpu" if gpu else "n1-cpu",
        "farm_version": "0.2.0",
        "created": "2026-11-21T00:00:00+00:00",
        "job": job,
    }


def _blob(farm: Farm | None, data: bytes) -> dict[str, Any]:
    if farm:
        farm.artifacts.put_blob_bytes(data)
    return {"digest": hashlib.sha256(data).hexdigest(), "size": len(data)}


PHASES = {"fetching": 0.4, "compiling": 8.1, "verifying": 1.3, "measuring": 3.2, "uploading": 0.3}


def failed(
    farm: Farm,
    order: Mapping[str, Any],
    *,
    number: int = 1,
    kind: FailureKind = FailureKind.COMPILER_ERROR,
    message: str = "MIGraphX: fuse_mlir: no kernel for this convolution",
    detail: str = "error: unsupported layout for convolution node_38\nin pass fuse_mlir",
    log: bytes | None = None,
) -> Outcome:
    """Fail, with a log."""
    identifier = order["identifier"]
    text = LOG.format(identifier=identifier, number=number, model=identifier.partition("/")[0])
    text += "".join(f"trace: lowering node_{place}\n" for place in range(40))
    text += f"\x1b[31m{detail}\x1b[0m\nterminate called without an active exception\n"
    digest, _ = farm.artifacts.put_blob_bytes(log if log is not None else text.encode())
    phases = {"fetching": 0.4, "compiling": 5.6}
    return replace(Outcome.failure(kind, message, detail=detail, log=digest), phases=phases)


def backdate(farm: Farm, redis_url: str) -> None:
    """Let the attempts of all jobs have taken 13.3 s: pictures should not show milliseconds."""
    import redis

    with redis.Redis.from_url(redis_url, decode_responses=True) as connection:
        for key in connection.scan_iter("{farm}:job:*:attempts"):
            for name, text in connection.hgetall(key).items():
                number, _, part = name.partition(":")
                if part not in ("start", "end"):
                    continue
                document = json.loads(text)
                if part == "start":
                    start = document["started_at"]
                    document["started_at"] = int(start) - 13_300 * (3 - int(number))
                else:
                    document["at"] = int(document["at"]) - 13_300 * (2 - int(number))
                    connection.hincrby(key.removesuffix(":attempts"), "spent", 13_300)
                connection.hset(key, name, json.dumps(document))


def automate(farm: Farm, manifest: str, build: str, *, error: str = "several pools serve onnxruntime/cpu") -> str:
    """Store a manifest with two triggers, of which one made no build, and a webhook; return a message that failed."""
    idle = {"timezone": "", "next": None, "seen": [], "tried": [], "fired": 1, "problem": "", "pending": None}
    made = {"at": time.time() - 3600, "why": "schedule", "version": 2, "build": build, "error": ""}
    triggers: list[Any] = [
        {**idle, "kind": "schedule", "text": "17 3 * * 1-5", "timezone": "Europe/Berlin", "last": made},
        {**idle, "kind": "toolchain", "text": "onnxruntime/cpu", "last": {**made, "build": "", "error": error}},
    ]
    pushed: Any = [{"version": number, "digest": "d" * 64, "pushed": time.time(), "by": "ci"} for number in (1, 2)]
    triggers[0]["next"] = time.time() + 7200
    head: Any = {"schema": 1, "id": "a" * 16, "name": manifest, "version": 2, "versions": pushed, "triggers": triggers}
    farm.part(StoredManifests).move("main", manifest, lambda _: head)
    Webhooks(farm).create("main", "ci", "https://ci.example/hooks/farm", ["build.finished"], by="admin")
    Webhooks(farm).tell("main", "build.finished", build, {"id": build})
    message = Webhooks(farm).deliveries("main", "ci", 1)[0]["id"]
    found = Webhooks(farm).claim("main", "ci", message, 60)
    assert isinstance(found, tuple)
    attempt: Any = {"at": time.time(), "status": 500, "error": "it answered 500", "seconds": 0.2}
    delivery: Any = {**found[0], "state": "failed", "next": None, "attempts": [attempt]}
    Webhooks(farm).ended("main", "ci", delivery, found[1])
    return message
