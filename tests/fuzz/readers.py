"""The readers of foreign bytes: what each reads, what it may raise, and genuine bytes to begin with.

A new reader is one line of `READERS`.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, cast

import httpx
import numpy as np
from onnx import numpy_helper

from farm.artifacts.refs import RefCommit, RefView, ShownRef, canonical, parse_ref, stored_ref
from farm.artifacts.s3_bucket import Object
from farm.artifacts.sidecar import facts, serving_of
from farm.builds.reading import JobLog
from farm.client.fetching import read_sidecar
from farm.client.inspection import disagreements, inspect_if_small, wrong_card
from farm.client.transport import _lines, events
from farm.errors import FarmError, UsageError
from farm.extras.packs.fetch import read_index
from farm.extras.packs.pack_checks import wrong_files
from farm.extras.signing import statements
from farm.extras.signing.signed_refs import Roles, Sealer, role_signed, signed_ref, target_of
from farm.extras.signing.signing_keys import clock, load_public
from farm.extras.signing.trust import judge, load_policy
from farm.jobs.rows import BuildEvent
from farm.manifest.parsing import read_manifest
from farm.models.frozen import FrozenModel, freeze_data
from farm.node.amd_gpus import of_amd_smi, of_rocminfo
from farm.pages import job_view
from farm.results.report import BuildChange
from farm.runner.onnx_models import BadModel, check_onnx
from farm.runner.protocol import RequestFailed
from farm.runner.samples import make_samples
from farm.runner.tf_check import check_tf
from farm.tuning import exchange
from farm.tuning.formats import read_files
from farm.tuning.records import Record, RecordSource, RecordStore, Snapshot
from farm.wire.checking import checked, parsed
from tests.fuzz.reader import Reader, Seeds
from tests.support.gpu_programs import CODE_OBJECTS, sidecar_of, write_mxr
from tests.support.hostile_manifests import SOUND, with_model
from tests.support.hostile_models import model
from tests.support.places import ROOT
from tests.support.signed import NOW, POLICY, Signed, key_in
from tests.support.signed import sidecar_of as signed_sidecar
from tests.support.signed_refs import Ceremony
from tests.support.tensors import tensor

# --- models, programs, data -------------------------------------------------------------------------------------------

MODEL = FrozenModel(
    digest="0" * 64, format="onnx", files=[], size=0,
    inputs=[tensor("x", "float32", ("batch", 3))], outputs=[tensor("y", "float32", ("b", 2))],
)  # fmt: skip
SYMBOLIC = {each["name"]: each for each in MODEL["inputs"]}


def _program(path: Path) -> None:
    inside = inspect_if_small(path)
    wrong_card(inside, ["gfx942:sramecc+:xnack-"])
    disagreements(cast(Any, _mxr_sidecar()), inside, path)


@cache
def _mxr_sidecar() -> dict[str, Any]:
    return sidecar_of(CODE_OBJECTS / "cnn_gfx1100.mxr")


def _programs(suffix: str, *more: Path) -> Seeds:
    return lambda folder: [write_mxr(folder / f"net{suffix}").read_bytes(), *(path.read_bytes() for path in more)]


def _models(folder: Path) -> list[bytes]:
    return [model().SerializeToString()]


def _graphs(folder: Path) -> list[bytes]:
    """Frozen graphs of TensorFlow's: a placeholder, a constant and a node that reads both."""

    def message(*parts: tuple[int, bytes | int]) -> bytes:
        return b"".join(
            bytes([field << 3, value]) if isinstance(value, int) else bytes([field << 3 | 2, len(value)]) + value
            for field, value in parts
        )

    def node(name: bytes, operator: bytes, *inputs: bytes, value: bytes = b"") -> bytes:
        made = message((1, b"value"), (2, message((8, value)))) if value else b""
        attribute = [(5, made)] if made else []
        return message((1, message((1, name), (2, operator), *[(3, each) for each in inputs], *attribute)))

    tensor = message((1, 1), (2, message((2, message((1, 2))))), (4, bytes(8)))
    ends = node(b"y", b"Add", b"x", b"w:0")
    return [node(b"x", b"Placeholder") + node(b"w", b"Const", value=tensor) + ends + message((4, message((1, 9))))]


def _arrays(folder: Path) -> list[bytes]:
    x = np.arange(12, dtype=np.float32).reshape(4, 3)
    made = []
    for write in (np.savez, np.savez_compressed):
        file = io.BytesIO()
        cast(Any, write)(file, x=x, y=np.zeros((4, 2), np.float32))
        made.append(file.getvalue())
    file = io.BytesIO()
    np.save(file, x)
    return [*made, file.getvalue()]


def _freeze(path: Path) -> None:
    freeze_data(path, MODEL, SYMBOLIC, path.parent / "frozen")


def _freeze_tensor(path: Path) -> None:
    freeze_data(path.parent, MODEL, SYMBOLIC, path.parent / "frozen")


def _tensors(folder: Path) -> list[bytes]:
    return [numpy_helper.from_array(np.ones((1, 3), np.float32), "x").SerializeToString()]


def _samples(path: Path) -> None:
    given: Any = {"x": {"dtype": "float32", "shape": [1, 3]}}
    for run in make_samples({"path": str(path)}, given, 1, what="samples", output_ranks={"y": 2}):
        run["x"].sum()


# --- what describes programs, and who vouches for it ------------------------------------------------------------------


def _sidecar(path: Path) -> None:
    found = read_sidecar(path.read_bytes(), "the sidecar")
    facts(found)
    serving_of(found)
    disagreements(found, inspect_if_small(CODE_OBJECTS / "cnn_gfx1100.mxr"), CODE_OBJECTS / "cnn_gfx1100.mxr")


def _sidecars(folder: Path) -> list[bytes]:
    return [json.dumps(document).encode() for document in (signed_sidecar(), _mxr_sidecar())]


def _provider_cache(path: Path) -> None:
    write_mxr(path.with_name("net.mxr"))
    list(wrong_files(path.parent, ["gfx942"]))


def _pack(folder: Path) -> list[bytes]:
    files = [{"path": "model.onnx", "digest": "a" * 64}]
    return [json.dumps({"schema": 1, "layout": "triton", "identifier": "n", "files": files}).encode()]


@cache
def _signed(folder: Path) -> Signed:
    folder.mkdir(exist_ok=True)
    return Signed(signed_sidecar(), key_in(folder, "farm"))


def _bundle(path: Path) -> None:
    """Judge a bundle as it is, and one whose payload it is, by somebody who is trusted."""
    signed = _signed(path.parent / "keys")
    policy = _policy(path.parent / "keys")
    data = path.read_bytes()
    judge(policy, signed.at_hand(), [data], NOW)
    judge(policy, signed.at_hand(), [statements.sign_bundle(data, statements.IN_TOTO, signed.signer)], NOW)


@cache
def _policy(folder: Path) -> Any:
    key_in(folder, "root")
    (folder / "trust.toml").write_text(POLICY)
    return load_policy(folder / "trust.toml")


def _statements(folder: Path) -> list[bytes]:
    signed = _signed(folder / "keys")
    whole = [signed.provenance(), signed.results(), signed.summary("prod")]
    return [*whole, *(statements.read_bundle(each).payload for each in whole)]


def _keys(folder: Path) -> list[bytes]:
    key_in(folder, "farm")
    return [(folder / "farm.pub").read_bytes()]


# --- refs that are signed ---------------------------------------------------------------------------------------------


@cache
def _ceremony(folder: Path) -> Ceremony:
    folder.mkdir(exist_ok=True)
    made = Ceremony(folder)
    made.issue("root", "targets", root="root", targets="targets", server="server", promoters=["alice"])
    return made


def _roles(path: Path) -> None:
    roles = Roles.read(path.read_bytes())
    roles.role_of("main/latest")


CELLS: dict[str, Any] = {"schema": 1, "cells": {}}
SNAPSHOT_OF_NONE = hashlib.sha256(canonical(CELLS)).hexdigest()
POINTS: RefView = {
    "tag": "latest", "generation": 1, "snapshot": SNAPSHOT_OF_NONE, "previous": None, "moved": "2026-11-22T00:00:00Z"
}  # fmt: skip


def _sealed(folder: Path, tag: str = "latest", before: RefView | None = None, signed: str = "") -> RefView:
    """Return what a server stores of a ref that it signs: `prod` needs what its promoter has `signed`."""
    made = _ceremony(folder)
    assert made.roles
    signer = made.signer("server")
    sealer = Sealer(made.roles, {signer.public_key.keyid: signer})
    return sealer.seal(RefCommit("main", tag, before, {**POINTS, "tag": tag}, signed), clock())


def _shown(folder: Path) -> list[bytes]:
    return [json.dumps({**_sealed(folder.parent / "ceremony"), **CELLS, "namespace": "main"}).encode()]


def _ref(path: Path) -> None:
    made = _ceremony(path.parent / "ceremony")
    assert made.roles
    found = checked(parsed(path.read_bytes(), "a farm"), ShownRef, "a farm")
    signed_ref(made.roles, path.parent / "memory", "main/latest", lambda: found)


def _stored(folder: Path) -> list[bytes]:
    return [stored_ref(_sealed(folder.parent / "ceremony"))]


def _stored_ref(path: Path) -> None:
    """Read a ref from storage, and move it."""
    _sealed(
        path.parent / "ceremony", before=parse_ref("latest", Object("ns/main/refs/latest.json", path.read_bytes(), "1"))
    )


def _promised(folder: Path) -> list[bytes]:
    signer = _ceremony(folder.parent / "ceremony").signer("alice")
    data = role_signed("main/prod", target_of(POINTS), 1, signer, clock())
    return [json.dumps({"ref": {**POINTS, "tag": "prod"}, "role": data.decode()}).encode()]


def _promise(path: Path) -> None:
    _sealed(path.parent / "ceremony", "prod", signed=path.read_text(errors="replace"))


# --- what servers and machines say ------------------------------------------------------------------------------------


def _stream(path: Path) -> None:
    with httpx.Client(
        transport=httpx.MockTransport(lambda _: httpx.Response(200, content=path.read_bytes()))
    ) as client:
        for _, _, data in events(_lines(client.get("http://farm/"))):
            for kind in (BuildEvent, BuildChange):
                with suppress(UsageError):
                    checked(parsed(data, "a farm"), cast(type[object], kind), "a farm")


def _log(path: Path) -> None:
    data = path.read_bytes()
    log = JobLog(len(data), lambda start, end: data[start:end])
    for number in range(log.parts):
        job_view.stages(job_view.page(log.part(number), known="error: it went wrong"))
        job_view.page(log.part(number), start=1)
    job_view.search(map(log.part, range(log.parts)), "e")
    b"".join(log.last())


EVENTS = (
    b'id: 1\nevent: x\ndata: {"id": "1", "at": 1.5, "build": "b-1", "type": "cell"}\n\n: x\n\n',
    b'data: {"type": "cells", "id": "1-2",\ndata: "cells": [], "state": "open"}\r\n\r\n',
)
LOG = (
    b"== compile ==\nInformation: 12 nodes\n\x1b[1;31mterminate called\x1b[0m after throwing\n what(): out of memory\n"
    b"Traceback (most recent call last):\n  File 'x'\nValueError: no\n\x1b[38;5;12m0 errors\x1b[39m\xc3\xa9\r\n"
)


def _text_of(read: Callable[[str], object]) -> Callable[[Path], object]:
    return lambda path: read(path.read_text(errors="replace"))


_ASIC = {"market_name": "MI300X", "asic_serial": "0x1", "num_compute_units": 304, "target_graphics_version": "gfx942"}
AMD_SMI = {"gpu_data": [{"gpu": 0, "asic": _ASIC, "bus": {"bdf": "0000:05:00.0"}, "partition": {
    "accelerator_partition": "SPX"}, "vram": {"size": {"value": 196592, "unit": "MB"}}}]}  # fmt: skip
ROCMINFO = b"""\
*******
Agent 1
*******
  Name:                    gfx942
  Uuid:                    GPU-0123456789abcdef
  Marketing Name:          AMD Instinct MI300X
  Device Type:             GPU
  BDFID:                   1280
  Node:                    2
  Compute Unit:            304
    Segment:                 GLOBAL; FLAGS: COARSE GRAINED
      Size:                    201310208(0xbffc000) KB
    Name:                    amdgcn-amd-amdhsa--gfx942:sramecc+:xnack-
"""

# --- tuning -----------------------------------------------------------------------------------------------------------

DEVICE = {"cu_count": 304, "device_name": "MI300X", "gfx_name": "gfx942", "wavefront_size": 64}
ENTRIES: list[Any] = [
    [{"name": "gpu::mlir_op", "problem": "gfx942\t304\t8\tconv"}, "v4:64,16"],
    [{"name": "g", "problem": []}, None],
]
CACHES = [json.dumps(each).encode() for each in (ENTRIES, [[DEVICE, ENTRIES]])]
MIOPEN = b"1x1=A:0.1,0,x;B:1,0,y\n2x2=C:1,2,3\r\n"
SLICES = json.dumps({"0" * 64: {"operations": 1, "seconds": 2.5}}).encode()
SOURCE = RecordSource("2026-01-01T00:00:00+00:00", "worker-1", "job-1")
RECORDS = Snapshot.of([
    Record(RecordStore.PROBLEM_CACHE, "", '{"name":"gemm","problem":1}', '"v4:1"', SOURCE),
    Record(RecordStore.PERF_DB, "gfx942130.HIP.3_5_1_4dddc24.udb.txt", "1x1=Solver", "1,2", SOURCE),
    Record(RecordStore.SLICES, "", "0" * 64, '{"operations":1,"seconds":2.5}', SOURCE),
])  # fmt: skip
SNAPSHOT = exchange.write(RECORDS).encode()


def _offered(path: Path) -> None:
    exchange.read_offered(gzip.compress(path.read_bytes()), SOURCE)


def _tuned(path: Path) -> None:
    read_files([path], SOURCE)


def _given(*seeds: bytes) -> Seeds:
    return lambda folder: seeds


def _sqlite(folder: Path) -> list[bytes]:
    import sqlite3

    database = sqlite3.connect(folder / "made.db")
    with database:
        database.execute("CREATE TABLE solutions (device_key TEXT, problem_key TEXT, solution TEXT)")
        rows = [(json.dumps(DEVICE), json.dumps(key), json.dumps(value)) for key, value in ENTRIES]
        database.executemany("INSERT INTO solutions VALUES (?, ?, ?)", rows)
    database.close()
    return [(folder / "made.db").read_bytes()]


def _manifests(folder: Path) -> Iterator[bytes]:
    for path in sorted((ROOT / "configs" / "manifests").glob("*.yaml")):
        yield path.read_bytes()
    yield SOUND.encode()
    yield with_model("dims: {batch: {min: 1, max: 4}}, batches: [1, 2], verify: {tolerance: 0.5}").encode()


NPZ = (FarmError, RequestFailed)
READERS = (
    Reader("mxr", _program, _programs(".mxr", CODE_OBJECTS / "cnn_gfx1100.mxr"), "net.mxr"),
    Reader("mxr-json", _program, _programs(".json"), "net.json"),
    Reader("onnx", check_onnx, _models, "net.onnx", (BadModel,)),
    Reader("tensorflow", check_tf, _graphs, "net.pb", (BadModel,)),
    Reader("data", _freeze, _arrays, "data.npz"),
    Reader("tensor", _freeze_tensor, _tensors, "input_0.pb"),
    Reader("samples", _samples, _arrays, "samples.npz", NPZ),
    Reader("sidecar", _sidecar, _sidecars),
    Reader("provider-cache", _provider_cache, _sidecars, "net.mxr.artifact.json"),
    Reader("pack", lambda path: read_index(path.parent), _pack, "pack.json"),
    Reader("statement", _bundle, _statements),
    Reader("public-key", load_public, _keys),
    Reader("roles", _roles, lambda folder: [_ceremony(folder / "ceremony").roles.text()]),  # type: ignore[union-attr]
    Reader("ref", _ref, _shown),
    Reader("stored-ref", _stored_ref, _stored),
    Reader("promise", _promise, _promised),
    Reader("events", _stream, _given(*EVENTS)),
    Reader("log", _log, _given(LOG, b"x\n" * 5_000 + LOG)),
    Reader("manifest", read_manifest, lambda folder: list(_manifests(folder)), "farm.yaml"),
    Reader("problem-cache", _tuned, _given(*CACHES), "p.json"),
    Reader("problem-cache-sqlite", _tuned, _sqlite, "p.db"),
    Reader("find-db", _tuned, _given(MIOPEN), "gfx942130.HIP.3_5_1_4dddc24.ufdb.txt"),
    Reader("perf-db", _tuned, _given(MIOPEN), "gfx942130.HIP.3_5_1_4dddc24.udb.txt"),
    Reader("slices", _tuned, _given(SLICES), "slices.json"),
    Reader("tuning-snapshot", lambda path: exchange.read(path.read_bytes()), _given(SNAPSHOT)),
    Reader("tuning-import", _offered, _given(SNAPSHOT)),
    Reader("amd-smi", _text_of(of_amd_smi), _given(json.dumps(AMD_SMI).encode())),
    Reader("rocminfo", _text_of(of_rocminfo), _given(ROCMINFO)),
)  # fmt: skip
