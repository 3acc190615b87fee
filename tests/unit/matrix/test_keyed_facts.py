"""Workers that differ in what cache keys say never fill each other's keys: whichever came last or lives."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from farm.errors import ManifestError
from farm.manifest.parsing import parse_manifest
from farm.matrix.cells import Cell, expand
from farm.matrix.combinations import combine
from farm.models.frozen import FrozenModel
from farm.spec import Device
from farm.targets.compilers import MIGRAPHX
from farm.targets.pools import Pool, Target, in_use, profiles
from tests.support.tensors import tensor

MODEL = FrozenModel(
    digest="0" * 64,
    format="onnx",
    files=[{"path": "net.onnx", "digest": "0" * 64, "size": 3}],
    inputs=(tensor("x", "float32", ("batch", 3)),),
    outputs=[tensor("y", "float32", ("batch", 10))],
    size=3,
    opset=17,
    weight_dtypes=["float32"],
)
MANIFEST = """
version: 1
name: facts
targets: ["{target}"]
precisions: ["{precision}"]
options: {{level: {level}}}
tuning: {{mode: {mode}, background: {background}}}
models: [{{name: net, source: {{path: net.onnx}}, batches: [1, 8], calibration: {{generate: 2}}}}]
"""
LIBRARIES = {"onnx": "1.23.2", "ml_dtypes": "0.6.0", "sympy": "1.14.0", "onnx_ir": "1.1.0"}
CPU = Pool(
    Target("onnxruntime", "cpu"), "onnxruntime1.31.1-1a2b3c4d", Device("cpu"), 1, LIBRARIES, cpu_family="x86-64-v3"
)
GPU = Pool(
    Target("migraphx", "gfx942"),
    "rocm7.2-migraphx2.15-1a2b3c4d",
    profiles()["mi300x"].device,
    1,
    {},
    tuple(MIGRAPHX.features),
)


def planned(pools: list[Pool], known: list[Pool], *, slots: dict[str, int] | None = None, **asked: str) -> list[Cell]:
    asked = {"precision": "fp32", "level": "standard", "mode": "off", "background": "off", **asked}
    text = MANIFEST.format(**asked)
    return expand(combine(parse_manifest(text, "facts")), {"net": MODEL}, {}, pools, known=known, slots=slots)


def keys(cells: list[Cell]) -> list[str]:
    return [cell.key for cell in cells]


families = st.sampled_from(["x86-64-v2", "x86-64-v3", "x86-64-v4", "x86-64-v4-vnni", "aarch64"])
versions = st.fixed_dictionaries({name: st.sampled_from(["1.0.0", "1.9.0", "1.10.0"]) for name in LIBRARIES})
cpu_workers = st.builds(
    replace,
    st.just(CPU),
    toolchain=st.sampled_from([CPU.toolchain, "onnxruntime1.31.1-99999999"]),
    recipe=st.integers(1, 3),
    libraries=versions,
    cpu_family=families,
)
devices = st.builds(
    Device,
    arch=st.sampled_from(["gfx942", "gfx942:sramecc+:xnack-", "gfx942:sramecc+:xnack+", "gfx942:sramecc-:xnack-"]),
    compute_units=st.sampled_from([304, 228, 80]),
    xcc=st.sampled_from([None, 4, 6, 8]),
)
gpu_workers = st.builds(
    replace,
    st.just(GPU),
    toolchain=st.sampled_from([GPU.toolchain, "rocm7.2-migraphx2.15-cross-1a2b3c4d"]),
    recipe=st.integers(1, 3),
    device=devices,
)
asked_of_cpu = st.fixed_dictionaries(
    {
        "target": st.just("onnxruntime/cpu"),
        "precision": st.sampled_from(["fp32", "fp16", "bf16", "int8", "int4"]),
        "level": st.sampled_from(["standard", "tuned"]),
        "mode": st.sampled_from(["off", "quick"]),
        "background": st.sampled_from(["off", "exhaustive"]),
    }
)
asked_of_gpu = st.fixed_dictionaries(
    {
        "target": st.sampled_from(["migraphx/gfx942", "mi300x", "gfx942:any"]),
        "precision": st.sampled_from(["fp32", "fp16"]),
        "mode": st.sampled_from(["off", "quick"]),
    }
)


@given(
    st.one_of(
        st.tuples(st.lists(cpu_workers, min_size=2, max_size=4), asked_of_cpu),
        st.tuples(st.lists(gpu_workers, min_size=2, max_size=4), asked_of_gpu),
    ),
    st.data(),
)
def test_a_worker_only_gets_cells_whose_keys_it_would_give_them_itself(
    drawn: tuple[list[Pool], dict[str, str]], chance: st.DataObject
) -> None:
    workers, asked = drawn
    alive = chance.draw(st.lists(st.booleans(), min_size=len(workers), max_size=len(workers)))
    registry = {worker.name: Pool.from_dict(worker.as_dict()) for worker in workers}
    live = {worker.name for worker, lives in zip(workers, alive, strict=True) if lives}
    known = list(registry.values())
    slots = {name: 4 * (name in live) for name in registry}
    try:
        cells = planned(in_use([(pool, int(pool.name in live)) for pool in known]), known, slots=slots, **asked)
    except ManifestError:
        assume(False)
    for index, cell in enumerate(cells):
        takers = [worker for worker in workers if worker.name == cell.pool]
        assert takers
        for worker in takers:
            own = planned([worker], [worker], **asked)[index]
            assert own.key == cell.key, (worker, cell.spec)
            assert own.order.get("background") == cell.order.get("background")


@pytest.mark.parametrize(
    ("asked", "change", "splits"),
    [
        ({"level": "tuned"}, {"cpu_family": "x86-64-v4"}, True),
        ({"mode": "quick"}, {"cpu_family": "x86-64-v4"}, True),
        ({"background": "quick"}, {"cpu_family": "x86-64-v4"}, True),
        ({}, {"cpu_family": "x86-64-v4"}, False),
        ({"precision": "int8"}, {"libraries": {**LIBRARIES, "sympy": "1.15.0"}}, True),
        ({}, {"libraries": {**LIBRARIES, "sympy": "1.15.0"}}, False),
        ({}, {"recipe": 2}, True),
    ],
)
def test_a_registration_changes_no_key_of_another_worker(
    asked: dict[str, str], change: dict[str, Any], splits: bool
) -> None:
    """The last one to register decides nothing; what no key says lets both workers take the cells."""
    other = replace(CPU, **change)
    assert other.name != CPU.name
    both: set[str] = set()
    for order in ([CPU, other], [other, CPU]):
        registry = {pool.name: pool for pool in order}
        slots = dict.fromkeys(registry, 2)
        try:
            cells = planned(list(registry.values()), [], slots=slots, target="onnxruntime/cpu", **asked)
        except ManifestError as error:
            assert "choose it by an entry of `toolchains`" in str(error)
            assert splits
            continue
        mine, others = (keys(planned([pool], [], target="onnxruntime/cpu", **asked)) for pool in (CPU, other))
        assert (mine != others) is splits
        assert keys(cells) == others
        both |= {cell.pool for cell in cells}
    assert splits or both <= {CPU.name, other.name}


def test_cells_that_every_family_compiles_alike_go_to_all_nodes_by_their_slots() -> None:
    other = replace(CPU, cpu_family="x86-64-v4")
    text = MANIFEST.format(target="onnxruntime/cpu", precision="fp32", level="standard", mode="off", background="off")
    text = text.replace("[1, 8]", str(list(range(1, 201))))
    cells = expand(
        combine(parse_manifest(text, "facts")), {"net": MODEL}, {}, [CPU, other], slots={CPU.name: 10, other.name: 30}
    )
    shares = [sum(cell.pool == pool.name for cell in cells) for pool in (CPU, other)]
    assert sum(shares) == 200
    assert 25 < shares[0] < 75


@pytest.mark.parametrize("chosen", ["", f"toolchains: [{CPU.toolchain}]\n"])
@pytest.mark.parametrize(
    "other",
    [
        replace(CPU, cpu_family="x86-64-v4"),
        replace(CPU, cpu_family="x86-64-v2"),
        replace(CPU, recipe=2),
        replace(CPU, registered=CPU.stem),
    ],
    ids=["newer family", "older family", "newer recipe", "older release"],
)
@pytest.mark.parametrize("other_is_gone", [True, False])
def test_no_cell_waits_for_workers_that_are_gone_while_others_give_it_the_same_key(
    chosen: str, other: Pool, other_is_gone: bool
) -> None:
    """A manifest that names its toolchain has all that are known to choose from."""
    text = MANIFEST.format(target="onnxruntime/cpu", precision="fp32", level="standard", mode="off", background="off")
    manifest = parse_manifest(text.replace("[1, 8]", str(list(range(1, 401)))) + chosen, "facts")
    here, gone = (CPU, other) if other_is_gone else (other, CPU)
    known = [CPU, other]
    live = in_use([(here, 1), (gone, 0)])
    cells = expand(combine(manifest), {"net": MODEL}, {}, live, known=known, slots={here.name: 1, gone.name: 0})
    assert {cell.pool for cell in cells} == {here.name}


def test_no_cell_waits_for_a_pool_that_takes_none_while_another_gives_it_the_same_key() -> None:
    """Its workers live, but rest: they wait to be started again with what is installed now."""
    resting = replace(CPU, cpu_family="x86-64-v4")
    text = MANIFEST.format(target="onnxruntime/cpu", precision="fp32", level="standard", mode="off", background="off")
    manifest = parse_manifest(text.replace("[1, 8]", str(list(range(1, 401)))), "facts")
    cells = expand(combine(manifest), {"net": MODEL}, {}, [CPU, resting], slots={CPU.name: 1, resting.name: 0})
    assert {cell.pool for cell in cells} == {CPU.name}


def test_a_family_is_chosen_by_toolchains() -> None:
    other = replace(CPU, cpu_family="x86-64-v4")
    text = MANIFEST.format(target="onnxruntime/cpu", precision="fp32", level="tuned", mode="off", background="off")
    text += f"toolchains: [{other.build}]\n"
    cells = expand(combine(parse_manifest(text, "facts")), {"net": MODEL}, {}, [CPU, other])
    assert {cell.pool for cell in cells} == {other.name}
    assert {cell.spec["device"]["cpu_family"] for cell in cells} == {"x86-64-v4"}
    assert {cell.identifier for cell in cells} == {"net/onnxruntime-cpu/fp32/b1", "net/onnxruntime-cpu/fp32/b8"}


def test_a_profile_takes_no_worker_whose_feature_bits_are_others() -> None:
    """Its key would say `xnack-` of a program that a worker with `xnack+` compiled."""
    xnack = replace(GPU, device=replace(GPU.device, arch="gfx942:sramecc+:xnack+"))
    assert {cell.pool for cell in planned([GPU, xnack], [], target="mi300x")} == {GPU.name}
    with pytest.raises(ManifestError, match="no pool serves `mi300x`"):
        planned([xnack], [], target="mi300x")
    (one, _) = planned([xnack], [], target="migraphx/gfx942")
    assert (one.pool, one.spec["device"]["arch"]) == (xnack.name, "gfx942:sramecc+:xnack+")
