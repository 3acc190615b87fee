"""Tuning as a user sees it, with ONNX Runtime: what is shared, what a budget cuts, what is reported."""

from __future__ import annotations

import zipfile
from pathlib import Path

from farm.client.fetching import place_kernels
from tests.support.farm_command import Command

MANIFEST = """
version: 1
name: tuned
targets: [onnxruntime/cpu]
precisions: [fp32]
tuning: {tuning}
salt: "{salt}"
models:
  - name: squeezenet
    source: {{package: onnx/backend/test/data/light/light_squeezenet.onnx}}
    inputs: {{data_0: {{range: [0, 1]}}}}
"""


def test_tuning_is_shared_cut_by_its_budget_and_reported(quickstart: Command, tmp_path: Path) -> None:
    """A budget leaves operations for the next build, which finds those that were tuned, and says so."""
    manifest = tmp_path / "tuned.yaml"

    def run(tuning: str, salt: str = "") -> dict[str, object]:
        manifest.write_text(MANIFEST.format(tuning=tuning, salt=salt))
        (cell,) = quickstart.json("submit", str(manifest))["cells"]
        assert cell["state"] == "succeeded", cell
        return {
            "hit": cell["hit"],
            **cell["facts"]["tuning"],
            "key": cell["facts"]["key"],
            "ratio": cell["facts"]["ratio"],
        }

    short = run("{mode: quick, budget: 1s}")
    assert (short["operations"], short["finished"]) == (26, False)
    assert run("{mode: quick, budget: 1s}")["hit"]
    whole = run("{mode: quick, budget: 10m}")
    assert (whole["hit"], whole["finished"]) == (False, True)
    assert whole["known"] == short["tuned"]
    assert whole["known"] + whole["tuned"] == 26
    assert whole["key"] != short["key"]
    assert run("quick")["hit"], "a finished tuning has no budget in its key"
    again = run("quick", salt="again")
    assert (again["known"], again["tuned"]) == (26, 0)
    assert again["saved"] > 0
    assert again["ratio"] > 0


def test_kernel_binaries_go_into_one_folder(tmp_path: Path) -> None:
    """An archive decides nothing but bytes: names lead nowhere else, and other files stay out."""
    packed = tmp_path / "kernels.zip"
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr("gfx942130.ukdb", b"kernels")
        archive.writestr("../../escaped.ukdb", b"elsewhere")
        archive.writestr("run.sh", b"not ours")
    kernels = tmp_path / "out"
    place_kernels(lambda blob, place: place.write_bytes(packed.read_bytes()), {}, kernels)
    assert sorted(path.name for path in kernels.iterdir()) == ["escaped.ukdb", "gfx942130.ukdb"]
    assert [path for path in tmp_path.rglob("*.ukdb") if path.parent != kernels] == []
