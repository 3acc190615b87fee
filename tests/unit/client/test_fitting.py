"""Which artifact fits a machine, and what is said about the others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from farm.artifacts.refs import SnapshotCell
from farm.artifacts.sidecar import validate
from farm.client.fetching import may_run
from farm.client.loading import Loaded, best_fit, why_not
from farm.errors import NotFound
from farm.spec import Device
from farm.targets.pools import Pool, Target
from farm.wire.program import Sidecar

ROCM = "rocm7.2-migraphx2.15-aa11"
ORT = "onnxruntime1.31.1-1a2b3c4d"
CARD = Pool(Target("migraphx", "gfx942"), ROCM, Device("gfx942:sramecc+:xnack-", 304, 8), 1)
CPU = Pool(Target("onnxruntime", "cpu"), ORT, Device("cpu"), 1, cpu_family="x86-64-v4")
REF = Pool(Target("migraphx", "ref"), ROCM, Device("ref"), 1)


def entry(
    target: str = "migraphx/mi300x",
    shape: str = "b8",
    *,
    device: str = "gfx942:sramecc+:xnack-",
    toolchain: str = ROCM,
    sizes: dict[str, Any] | None = None,
) -> SnapshotCell:
    batch = {"batch": int(shape[1:].partition(".")[0])} if sizes is None else sizes
    return SnapshotCell(
        manifest="demo",
        submitted=0.0,
        identifier=f"net/{target.replace('/', '-')}/fp16/{shape}",
        model="net",
        target=target,
        precision="fp16",
        shape=shape,
        sizes=batch,
        key="0" * 64,
        device=device,
        toolchain=toolchain,
        program={"path": "net.mxr", "digest": "1" * 64, "size": 9},
    )


def on_cpu(shape: str = "b8", toolchain: str = ORT, **others: Any) -> SnapshotCell:
    return entry("onnxruntime/cpu", shape, device="cpu", toolchain=toolchain, **others)


def sidecar(latency: float | None = None, **device: Any) -> Sidecar:
    return validate(
        {
            "schema": 1,
            "key": "0" * 64,
            "namespace": "main",
            "identifier": "net",
            "spec": {"compiler": {"name": "migraphx"}, "device": device},
            "blobs": {"program": {"path": "net.mxr", "digest": "1" * 64, "size": 9}},
            "toolchain": ROCM,
            "device": {"arch": "gfx942"},
            "measurements": {"latency": {"median": latency}} if latency else {},
            "created": "2026-11-22T00:00:00+00:00",
        }
    )


@pytest.mark.parametrize(
    ("cell", "reason"),
    [
        (entry(), ""),
        (entry(device="gfx942"), ""),
        (entry(device="gfx942:"), ""),
        (entry(device="gfx942:sramecc+:xnack+"), "it is for gfx942:sramecc+:xnack+, here is gfx942:sramecc+:xnack-"),
        (entry("migraphx/gfx942:any", device="gfx942:sramecc-:xnack+"), ""),
        (entry("migraphx/gfx1100", device="gfx1100"), "it is for gfx1100, here is gfx942:sramecc+:xnack-"),
        (entry(toolchain="rocm7.2-migraphx2.15-bb22"), ""),
        (entry(toolchain="rocm7.2-migraphx2.15-cross-bb22"), ""),
        (entry(toolchain="rocm6.4-migraphx2.12-cc"), f"rocm6.4-migraphx2.12-cc made it, here is {ROCM}"),
        (on_cpu(), "onnxruntime cannot be used here"),
        (entry("migraphx/cpu", device="cpu"), "it is for cpu, here is gfx942:sramecc+:xnack-"),
    ],
)
def test_the_reason_against_a_cell(cell: SnapshotCell, reason: str) -> None:
    assert why_not(cell, [CARD]) == reason


def test_of_one_cell_it_is_what_was_submitted_last_as_for_all_readers() -> None:
    """What this very toolchain made may be of a commit that was taken back."""
    back: SnapshotCell = {**on_cpu(toolchain="onnxruntime1.30.0-ffffffff"), "submitted": 3.0}
    taken_back: SnapshotCell = {**on_cpu(), "submitted": 2.0}
    assert best_fit([(taken_back, sidecar()), (back, sidecar())], [CPU])[0].cell == back
    assert best_fit([(taken_back, sidecar()), ({**back, "submitted": 1.0}, sidecar())], [CPU])[0].cell == taken_back


def test_programs_of_an_older_onnx_runtime_are_read_and_of_a_newer_one_not() -> None:
    assert why_not(on_cpu(toolchain="onnxruntime1.30.0-ffffffff"), [CPU]) == ""
    assert "made it" in why_not(on_cpu(toolchain="onnxruntime1.32.0-ffffffff"), [CPU])
    assert why_not(entry("migraphx/ref", device="cpu"), [REF]) == ""


def test_a_gpu_comes_first_then_the_same_toolchain_then_the_batch_then_speed() -> None:
    cells = [
        (on_cpu("b4"), sidecar(0.001)),
        (entry(shape="b4", toolchain="rocm7.2-migraphx2.15-bb22"), sidecar(0.001)),
        (entry(shape="b16"), sidecar(0.001)),
        (entry(shape="b8"), sidecar(0.009)),
        (entry(shape="b2"), sidecar(0.001)),
    ]
    fits = best_fit(cells, [CPU, CARD], batch=4)
    assert fits[0].cell["identifier"] == "net/migraphx-mi300x/fp16/b8"
    assert fits[0].why == "for gfx942:sramecc+:xnack-, which is here, this toolchain made it, takes batch 8"
    assert fits[1].cell["shape"] == "b16"
    largest = best_fit(cells, [CARD], batch=100)
    assert largest[0].cell["shape"] == "b16" and "takes 16 of 100 samples at once" in largest[0].why
    assert best_fit(cells, [CARD])[0].cell["shape"] == "b16", "nobody said how many there are"
    other_build = best_fit(cells[1:2], [CARD])
    assert "another build of this release" in other_build[0].why and len(other_build) == 1


def test_a_program_that_was_superseded_or_rolled_back_is_taken_only_if_no_other_one_runs() -> None:
    """Although this very toolchain made it: somebody may have rolled it back for its results."""
    older = on_cpu(toolchain="onnxruntime1.30.0-00000000")
    rolled_back: SnapshotCell = {**on_cpu(), "superseded": 1.0}
    found = best_fit([(rolled_back, sidecar(0.001)), (older, sidecar(0.002))], [CPU])
    assert found[0].cell == older
    alone = best_fit([(rolled_back, sidecar(0.001))], [CPU])
    assert alone[0].cell == rolled_back
    assert "another toolchain's program has its place" in alone[0].why


def test_a_range_takes_the_batch_as_it_is() -> None:
    ranged = entry(shape="b1to64", sizes={"batch": {"min": 1, "max": 64}})
    assert best_fit([(entry(shape="b8"), sidecar()), (ranged, sidecar())], [CARD], batch=5)[0].cell == ranged


def test_of_equal_ones_the_faster_is_chosen() -> None:
    slow, fast = entry(), entry("migraphx/gfx942")
    assert best_fit([(slow, sidecar(0.004)), (fast, sidecar(0.002))], [CARD])[0].cell == fast


def test_what_was_tuned_for_another_size_of_the_card_or_another_cpu_does_not_fit() -> None:
    with pytest.raises(NotFound, match="tuned for 228 compute units, here are 304"):
        best_fit([(entry(), sidecar(compute_units=228))], [CARD])
    with pytest.raises(NotFound, match="family x86-64-v3, here is x86-64-v4") as caught:
        best_fit([(on_cpu(), sidecar(cpu_family="x86-64-v3"))], [CPU])
    assert "farm doctor" in caught.value.hint
    fits = best_fit([(entry(), sidecar(compute_units=228)), (on_cpu(), sidecar())], [CARD, CPU])
    assert [fit.cell["target"] for fit in fits] == ["onnxruntime/cpu"]


def test_programs_for_packs_are_for_packs_only() -> None:
    cells = [entry(shape="b8"), entry(shape="b8.pack"), on_cpu("b8")]
    assert [cell["identifier"] for cell in may_run(cells)] == [
        "net/migraphx-mi300x/fp16/b8",
        "net/onnxruntime-cpu/fp16/b8",
    ]
    assert [cell["shape"] for cell in may_run(cells, packed=True)] == ["b8.pack", "b8"]


def test_a_loaded_program_is_shown_in_a_line() -> None:
    shown = repr(Loaded("session", Path("net.onnx"), {"spec": "x" * 4000}, "for cpu", ""))  # type: ignore[typeddict-item]
    assert "net.onnx" in shown and "for cpu" in shown and len(shown) < 200
