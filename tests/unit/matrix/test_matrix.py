"""The matrix: GitHub's rules, unique identifiers, resolved specs, and errors that name place and way out."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from fnmatch import fnmatchcase
from itertools import product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farm.builds.plan import input_files, make_plan
from farm.errors import ManifestError
from farm.jobs.state import keys_of
from farm.manifest.parsing import parse_manifest
from farm.matrix.cells import Cell, check, expand
from farm.matrix.combinations import _compiled, combine, fits_any
from farm.models.frozen import ArrayDocument, FrozenData, FrozenModel
from farm.models.shapes import Span, shape_label, sum_of
from farm.runner.documents import TensorInfo
from farm.spec import Device, cache_key
from farm.targets.compilers import MIGRAPHX
from farm.targets.pools import Pool, Target, begins, profiles, understand_target
from tests.support.tensors import tensor

CPU = Pool(
    Target("onnxruntime", "cpu"), "onnxruntime1.31.1-1a2b3c4d", Device("cpu"), 1,
    {"onnx": "1.23.2", "ml_dtypes": "0.6.0", "sympy": "1.14.0", "onnx_ir": "1.1.0"}, cpu_family="x86-64-v4",
)  # fmt: skip
FEATURES = tuple(MIGRAPHX.features)


def migraphx(device: str, toolchain: str, *of_device: Any, features: tuple[str, ...] = FEATURES) -> Pool:
    return Pool(Target("migraphx", device), toolchain, Device(*of_device), 1, features=features)


REF = migraphx("ref", "migraphx2.15-0011aabb", "cpu")
MI300X = migraphx("gfx942", "rocm7.2-migraphx2.15-aa", "gfx942:sramecc+:xnack-", 304, 8)
MI300A = migraphx("gfx942", "rocm7.2-migraphx2.15-aa", "gfx942:sramecc+:xnack-", 228, 6)
NAVI = migraphx("gfx1100", "rocm7.2-migraphx2.15-bb", "gfx1100", 96)
POOLS = [CPU, REF, MI300X, NAVI]


def model(*inputs: TensorInfo, weights: str = "float32", digest: str = "0") -> FrozenModel:
    digest = digest * 64
    return FrozenModel(
        digest=digest,
        format="onnx",
        files=[{"path": "net.onnx", "digest": digest, "size": 3}],
        inputs=inputs or (tensor("x", "float32", ("batch", 3)),),
        outputs=[tensor("y", "float32", ("batch", 10))],
        size=3,
        opset=17,
        weight_dtypes=[weights],
    )


def data(**shapes: tuple[int, ...]) -> FrozenData:
    arrays: dict[str, ArrayDocument] = {
        name: {"dtype": "float32", "shape": list(shape)} for name, shape in shapes.items()
    }
    return {"digest": "d" * 64, "size": 9, "arrays": arrays}


def manifest_text(*lines: str, targets: str = "[onnxruntime/cpu]", precisions: str = "[fp32]", model: str = "") -> str:
    return "\n".join(
        [
            "version: 1",
            "name: nightly",
            f"targets: {targets}",
            f"precisions: {precisions}",
            "models:",
            "  - name: net",
            "    source: {path: net.onnx}",
            f"    {model or 'batches: [1, 8]'}",
            *lines,
            "",
        ]
    )


def cells(text: str, models: Mapping[str, FrozenModel] | None = None, **options: Any) -> list[Cell]:
    pools = options.pop("pools", POOLS)
    frozen = options.pop("data", {})
    return expand(combine(parse_manifest(text, "farm.yaml")), models or {"net": model()}, frozen, pools, **options)


def names(*args: Any, **options: Any) -> list[str]:
    return [cell.identifier for cell in cells(*args, **options)]


def refusal(text: str, models: Mapping[str, FrozenModel] | None = None, **options: Any) -> str:
    """The one problem of a manifest, as people read it."""
    with pytest.raises(ManifestError) as caught:
        cells(text, models, **options)
    assert len(caught.value.problems) == 1, str(caught.value)
    assert caught.value.problems[0].line
    return str(caught.value)


# --- the rules ----------------------------------------------------------------------------------------------------


def test_the_product_is_in_the_order_written() -> None:
    text = manifest_text(targets="[gfx1100, onnxruntime/cpu]", precisions="[fp16, fp32]")
    assert names(text) == [
        "net/migraphx-gfx1100/fp16/b1",
        "net/migraphx-gfx1100/fp16/b8",
        "net/migraphx-gfx1100/fp32/b1",
        "net/migraphx-gfx1100/fp32/b8",
        "net/onnxruntime-cpu/fp16/b1",
        "net/onnxruntime-cpu/fp16/b8",
        "net/onnxruntime-cpu/fp32/b1",
        "net/onnxruntime-cpu/fp32/b8",
    ]


def test_exclude_comes_before_include() -> None:
    text = manifest_text(
        "exclude: [{precision: fp16}]",
        "include: [{precision: fp16, batches: [8]}]",
        precisions="[fp32, fp16]",
    )
    assert names(text) == ["net/onnxruntime-cpu/fp32/b1", "net/onnxruntime-cpu/fp32/b8", "net/onnxruntime-cpu/fp16/b8"]


def test_include_extends_the_cells_that_have_its_values() -> None:
    text = manifest_text(
        "include: [{precision: fp16, batches: [8], options: {level: tuned}}]", precisions="[fp32, fp16]"
    )
    levels = {cell.identifier: cell.spec["options"]["level"] for cell in cells(text)}
    assert levels == {
        "net/onnxruntime-cpu/fp32/b1": "standard",
        "net/onnxruntime-cpu/fp32/b8": "standard",
        "net/onnxruntime-cpu/fp16/b1": "standard",
        "net/onnxruntime-cpu/fp16/b8": "tuned",
    }


def test_include_adds_where_no_cell_has_its_values_and_what_it_leaves_out_means_all() -> None:
    assert names(manifest_text("include: [{target: gfx1100}]"))[2:] == [
        "net/migraphx-gfx1100/fp32/b1",
        "net/migraphx-gfx1100/fp32/b8",
    ]


def test_include_does_not_extend_what_include_added() -> None:
    text = manifest_text("include: [{precision: fp16}, {precision: fp16, batches: [1]}]")
    assert "is already in the matrix (line 9)" in refusal(text)


def test_sizes_of_an_include_are_taken_one_by_one() -> None:
    text = manifest_text("include: [{batches: [8, 16], salt: again}]")
    assert [(cell.shape, cell.spec["salt"]) for cell in cells(text)] == [("b1", ""), ("b8", "again"), ("b16", "again")]


@pytest.mark.parametrize(
    "select",
    [
        *[
            f"target: '{name}'"
            for name in ("mi300x", "migraphx/mi300x", "gfx942", "migraphx-gfx942", "migraphx/*", "*300*")
        ],
        *[
            "target: '*300*'",
            "precision: 'int8*'",
            "precision: int8+fp16",
            "model: [a, 'n?t']",
            "shape: 'b[0-9]'",
            "toolchain: 'rocm*'",
        ],
    ],
)
def test_a_selector_takes_patterns_lists_and_every_name_of_a_target(select: str) -> None:
    text = f"overrides: [{{select: {{{select}}}, limits: {{time: 8h}}}}]"
    asked = manifest_text(text, "toolchains: [rocm7]", targets="[mi300x]", precisions="[int8+fp16]")
    (cell, *_) = combine(parse_manifest(asked)).combinations
    assert cell.extras == [("overrides", 0)]
    other = asked.replace(select, f"{select.partition(':')[0]}: other")
    assert "matches nothing" in combine(parse_manifest(other)).problems[0].message


@pytest.mark.parametrize(
    ("line", "told_of"),
    [
        ("exclude: [{model: nett}]", "no cell has the model nett"),
        ("exclude: [{model: net, target: gfx1100}]", "no cell has the target gfx1100"),
        ("exclude: [{precision: 'int8*', reason: x}]", "no cell has the precision int8*"),
        ("exclude: [{shape: b2}]", "no cell has the shape b2"),
        ("expected: [{precision: fp16, kind: accuracy}]", "no cell has the precision fp16"),
    ],
)
def test_a_selector_that_matches_nothing_is_an_error_on_its_line(line: str, told_of: str) -> None:
    message = refusal(manifest_text(line))
    assert told_of in message
    assert "farm.yaml:9:" in message


def test_what_is_wrong_is_said_before_that_no_cell_fits_a_choice() -> None:
    empty = parse_manifest(manifest_text("exclude: [{precision: fp32}]"))
    (problem,) = combine(empty, ["net/*"]).problems
    assert problem.message == "nothing is left to compile"


def test_a_selector_whose_fields_match_only_apart_is_an_error_too() -> None:
    text = manifest_text(
        "exclude: [{target: gfx1100}, {target: gfx1100, precision: fp32}]", targets="[gfx1100, onnxruntime/cpu]"
    )
    assert len(cells(text)) == 2
    text = manifest_text(
        "include: [{precision: fp16, batches: [4]}]", "expected: [{precision: fp16, shape: b1, kind: hang}]"
    )
    assert "no cell has all of this" in refusal(text)


def test_patterns_of_everybody_do_not_fill_the_memory_of_a_server() -> None:
    for number in range(3000):
        assert fits_any([f"net-{number}/*"], [f"net-{number}/b1"])
    assert _compiled.cache_info().currsize < 2000


def test_a_matrix_without_a_cell_is_refused() -> None:
    assert "nothing is left to compile" in refusal(manifest_text("exclude: [{precision: fp32}]"))
    assert names(manifest_text("exclude: [{precision: fp32}]", "include: [{precision: fp16}]"))


def test_include_of_an_unknown_model_suggests_one() -> None:
    assert "did you mean `net`?" in refusal(manifest_text("include: [{model: nett, precision: fp16}]"))


AXES = {
    "model": ["m0", "m1"],
    "target": ["onnxruntime/cpu", "gfx1100"],
    "precision": ["fp32", "fp16", "bf16"],
    "batch": [1, 2, 4],
}


@st.composite
def matrices(draw: st.DrawFn) -> dict[str, Any]:
    def some(axis: str) -> list[Any]:
        return draw(st.lists(st.sampled_from(AXES[axis]), min_size=1, unique=True))

    entry = st.fixed_dictionaries({}, optional={axis: st.sampled_from(values) for axis, values in AXES.items()}).filter(
        bool
    )
    return {
        **{axis: some(axis) for axis in AXES},
        "exclude": draw(st.lists(entry, max_size=2)),
        "include": [
            {**each, "salt": f"s{number}"} for number, each in enumerate(draw(st.lists(entry, max_size=3)))
        ],
    }  # fmt: skip


def by_githubs_rules(matrix: dict[str, Any]) -> list[dict[str, Any]]:
    """The rules as GitHub's documentation states them, on plain dictionaries; values left out mean all."""
    original = [dict(zip(AXES, values, strict=True)) for values in product(*(matrix[axis] for axis in AXES))]
    kept = [cell for cell in original if not any(entry.items() <= cell.items() for entry in matrix["exclude"])]
    kept = [dict(cell) for cell in kept]
    added: list[dict[str, Any]] = []
    first = [dict(cell) for cell in kept]
    for entry in matrix["include"]:
        axes = {axis: value for axis, value in entry.items() if axis in AXES}
        extended = [cell for cell, before in zip(kept, first, strict=True) if axes.items() <= before.items()]
        for cell in extended:
            cell["salt"] = entry["salt"]
        if not extended:
            values = [[axes[axis]] if axis in axes else matrix[axis] for axis in AXES]
            added += [{**dict(zip(AXES, each, strict=True)), "salt": entry["salt"]} for each in product(*values)]
    return kept + added


def as_yaml(matrix: dict[str, Any]) -> str:
    def entry(each: dict[str, Any]) -> str:
        fields = {
            ("batches" if key == "batch" else key): ([value] if key == "batch" else value)
            for key, value in each.items()
        }
        return "{" + ", ".join(f"{key}: {value}" for key, value in fields.items()) + "}"

    def selector(each: dict[str, Any]) -> str:
        fields = {
            ("shape" if key == "batch" else key): (f"b{value}" if key == "batch" else value)
            for key, value in each.items()
        }
        return "{" + ", ".join(f"{key}: {value}" for key, value in fields.items()) + "}"

    lines = [
        "version: 1",
        "name: x",
        f"targets: [{', '.join(matrix['target'])}]",
        f"precisions: {matrix['precision']}",
        "models:",
    ]
    for name in matrix["model"]:
        lines += [f"  - name: {name}", "    source: {path: x}", f"    batches: {matrix['batch']}"]
    lines.append(f"exclude: [{', '.join(map(selector, matrix['exclude']))}]")
    lines.append(f"include: [{', '.join(map(entry, matrix['include']))}]")
    return "\n".join(lines)


@settings(max_examples=150, deadline=None)
@given(matrix=matrices())
def test_the_matrix_is_what_githubs_rules_make_of_it(matrix: dict[str, Any]) -> None:
    wanted = [
        (cell["model"], cell["target"], cell["precision"], f"b{cell['batch']}", cell.get("salt", ""))
        for cell in by_githubs_rules(matrix)
    ]
    everything = [dict(zip(AXES, values, strict=True)) for values in product(*(matrix[axis] for axis in AXES))]
    vacuous = any(not any(entry.items() <= cell.items() for cell in everything) for entry in matrix["exclude"])
    strangers = any(entry.get("model", matrix["model"][0]) not in matrix["model"] for entry in matrix["include"])
    doubled = len({row[:4] for row in wanted}) < len(wanted)
    try:
        found = expand(combine(parse_manifest(as_yaml(matrix), "x")), {"m0": model(), "m1": model()}, {}, POOLS)
    except ManifestError as error:
        text = str(error)
        assert vacuous or strangers or doubled or not wanted, text
        assert any(words in text for words in ("matches nothing", "no model", "already", "nothing is left"))
        return
    assert wanted and not (vacuous or strangers or doubled)
    short = [
        (cell.model, cell.target.removeprefix("migraphx/"), cell.precision, cell.shape, cell.spec["salt"])
        for cell in found
    ]
    assert short == wanted
    assert len({cell.identifier for cell in found}) == len(found)


@settings(deadline=None)
@given(
    left=st.dictionaries(st.sampled_from(["batch", "seq", "M1", "m", "a.b", "past_1"]), st.integers(0, 2000)),
    right=st.dictionaries(st.sampled_from(["batch", "seq", "M1", "m", "a.b", "past_1"]), st.integers(0, 2000)),
)
def test_different_sizes_have_different_labels(left: dict[str, int], right: dict[str, int]) -> None:
    assert (shape_label(left) == shape_label(right)) == (left == right)


def test_labels() -> None:
    assert shape_label({}) == "static"
    assert shape_label({"seq": 128, "batch": 8}) == "b8-seq128"
    assert shape_label({"M1": 48}) == "m1_48"


def test_an_identifier_is_made_of_safe_characters() -> None:
    text = manifest_text(targets="['gfx942:any', onnxruntime/cpu]", precisions="[int8+fp16]").replace(
        "    batches", "    calibration: {generate: 4}\n    batches"
    )
    with pytest.raises(ManifestError, match="onnxruntime/cpu has no precision int8-fp16"):
        cells(text)
    text = text.replace(", onnxruntime/cpu", "")
    assert names(text) == ["net/migraphx-gfx942-any/int8-fp16/b1", "net/migraphx-gfx942-any/int8-fp16/b8"]


# --- size ---------------------------------------------------------------------------------------------------------


def test_ten_thousand_cells_are_expanded() -> None:
    sizes = list(range(1, 11))
    entry = "  - name: net{0}\n    source: {{path: x}}\n    dims: {{seq: {1}}}\n    batches: [1, 2, 4, 8, 16]\n"
    entries = "".join(entry.format(number, sizes) for number in range(100))
    text = f"version: 1\nname: n\ntargets: [onnxruntime/cpu, mi300x]\nmodels:\n{entries}"
    text += "exclude: [{model: net7, target: gfx942}]\n"
    manifest = parse_manifest(text, "farm.yaml")
    models = {f"net{number}": model(tensor("x", "float32", ("batch", "seq", 3))) for number in range(100)}
    assert len(expand(combine(manifest), models, {}, POOLS)) == 10_000 - 50


def test_a_matrix_that_is_too_large_is_refused_before_it_is_made() -> None:
    text = manifest_text(model=f"dims: {{a: {list(range(1000))}, b: {list(range(1000))}, c: {list(range(1000))}}}")
    message = refusal(text)
    assert "1,000,000,000 cells" in message
    assert "farm.yaml:8:" in message
    several = manifest_text(
        targets="[onnxruntime/cpu, gfx1100]",
        precisions="[fp32, fp16]",
        model=f"dims: {{a: {list(range(125))}, b: {list(range(101))}}}",
    )
    assert "the matrix has 50,500 cells up to model `net`, more than 50,000" in refusal(several)
    text = manifest_text(f"include: [{{dims: {{a: {list(range(300))}, b: {list(range(300))}}}}}]")
    assert "more than 50,000" in refusal(text)


@pytest.mark.parametrize(
    ("field", "entry"),
    [("exclude", "{model: 'n*'}"), ("expected", "{model: 'n*', kind: hang}"), ("include", "{batches: [1]}")],
)
def test_very_many_selectors_for_very_many_cells_are_refused(
    monkeypatch: pytest.MonkeyPatch, field: str, entry: str
) -> None:
    text = manifest_text(
        f"{field}: [{', '.join([entry] * 20)}]",
        model=f"dims: {{a: {list(range(1, 10))}, b: {list(range(1, 10))}}}\n    batches: [1]",
    )
    inputs = {"net": model(tensor("x", "float32", ("batch", "a", "b")))}
    monkeypatch.setattr("farm.matrix.combinations.MAX_COMPARISONS", 20 * 81 - 1)
    assert "too many selectors" in refusal(text, inputs)
    monkeypatch.setattr("farm.matrix.combinations.MAX_COMPARISONS", 20 * 81)
    if field == "include":
        assert len(cells(text, inputs)) == 81


# --- specs --------------------------------------------------------------------------------------------------------


def one(text: str, *args: Any, **options: Any) -> Cell:
    found = cells(text, *args, **options)
    assert len(found) == 1, [cell.identifier for cell in found]
    return found[0]


ONE = "batches: [8]"


def test_a_cell_is_fully_resolved() -> None:
    cell = one(manifest_text(model=ONE))
    assert cell.spec == {
        "model": {"digest": "0" * 64, "format": "onnx"},
        "compiler": {"name": "onnxruntime", "recipe": 1, "libraries": {}},
        "device": Device("cpu").as_dict(),
        "toolchain": CPU.toolchain,
        "precision": "fp32",
        "inputs": {"x": {"dtype": "float32", "shape": [8, 3], "batch_axis": 0}},
        "batch": 8,
        "options": {"level": "standard"},
        "tuning": {"mode": "off"},
        "env": {},
        "calibration": None,
        "quantization": {},
        "verification": {"samples": {"generate": 8, "seed": 0, "ranges": {}}, "reference": "onnxruntime"},
        "salt": "",
        "schema": 1,
    }
    assert cell.key == cache_key(cell.spec)
    assert cell.pool == CPU.name
    assert cell.line == 6
    assert cell.order == {
        "identifier": "net/onnxruntime-cpu/fp32/b8",
        "pool": CPU.name,
        "target": "onnxruntime/cpu",
        "spec": cell.spec,
        "model": {"format": "onnx", "names": ["y"], "files": [{"path": "net.onnx", "digest": "0" * 64, "size": 3}]},
        "calibration": None,
        "samples": None,
    }


def test_what_does_not_change_the_program_does_not_change_the_key() -> None:
    plain = one(manifest_text(model=ONE)).key
    for line in (
        "labels: {team: vision}", "priority: 5", "limits: {time: 1h, memory: 1GiB}", "max-parallel: 3",
        "fail-fast: true", "verify: {tolerance: 0.5, weak: fail, on-fail: warn}", "tuning: {mode: full, budget: 2h}",
        "expected: [{model: net, kind: hang}]", "options: {offload_copy: false, per_channel: true}",
        "debug: {log-level: trace, trace: [passes], print: true, timings: true}",
    ):  # fmt: skip
        assert one(manifest_text(line, model=ONE)).key == plain, line
    renamed = one(manifest_text(model=ONE).replace("name: net", "name: other"), {"other": model()})
    assert renamed.key == plain


def test_debug_goes_to_the_worker_and_what_is_compiled_already_says_nothing() -> None:
    text = manifest_text(
        "debug: {log-level: debug, trace: [mlir], timings: true}", model="batches: [1]\n    debug: {timings: false}"
    )
    cell = one(text)
    assert cell.order["debug"] == {"log_level": "debug", "trace": ["mlir"]}
    assert "did you mean `passes`?" in refusal(manifest_text("debug: {trace: [passses]}"))
    unknown: dict[str, Any] = {
        "running": (),
        "last": {},
        "read_spec": lambda _: None,
        "live_workers": {CPU.name: 1},
        "estimates": {},
    }
    assert make_plan([cell], known={}, **unknown).warnings == ()
    (warning,) = make_plan([cell], known={cell.key: {"seconds": 1}}, **unknown).warnings
    assert "another `salt` compiles it again" in warning


def test_a_miss_says_what_changed_since_the_last_program_that_passed_and_a_hit_nothing() -> None:
    cell = one(manifest_text("salt: again", model=ONE))

    def planned(spec: Any, known: Any, last: Any) -> tuple[str, str]:
        read: Any = {"last": last, "read_spec": lambda key: spec}
        (row,) = make_plan([cell], known=known, running=(), live_workers={CPU.name: 1}, estimates={}, **read).cells
        return row["state"], row["reason"]

    before, last = {**cell.spec, "salt": "once"}, {cell.identifier: {"key": "k"}}
    assert planned(before, {}, {}) == ("miss", "first compile")
    assert planned(before, {}, last) == ("miss", "salt: once -> again")
    assert planned(None, {}, last) == ("miss", "the cache key changed")
    assert planned(before, {cell.job: {"seconds": 1}}, last) == ("hit", "")


@pytest.mark.parametrize(
    ("gate", "said"),
    [
        ("warn", "net/onnxruntime-cuda/fp32/b8: runs on the CPU, with no kernel on the GPU: Det (`d1`); "
         "runs on CUDA, since TensorRT does not take it: Softmax (`s`)"),
        ("allow", ""),
    ],
)  # fmt: skip
def test_a_plan_names_what_a_known_program_leaves_to_others(gate: str, said: str) -> None:
    pool = Pool(Target("onnxruntime", "cuda"), "onnxruntime1.31.1-cuda13.0-1a2b3c4d", Device("sm_90:h200", 132), 1)
    text = manifest_text(f"verify: {{fallback: {gate}}}", targets="[onnxruntime/cuda]", model="batches: [8]")
    cell = one(text, pools=[pool])
    facts: Any = {"fallback": {"Det": ["d1", "d2"], "Softmax on CUDA": ["s"]}, "seconds": 1}
    plan = make_plan(
        [cell], known={cell.key: facts}, running=(), last={}, read_spec=lambda _: None, live_workers={cell.pool: 1},
        estimates={},
    )  # fmt: skip
    assert plan.warnings == ((said,) if said else ())


@pytest.mark.parametrize(
    ("tuning", "target", "expected"),
    [
        ("full", "onnxruntime/cpu", "`tuning: full` does nothing, onnxruntime/cpu has quick and exhaustive"),
        ("{mode: quick, background: full}", "onnxruntime/cpu", "`background: full` does nothing, onnxruntime/cpu has"),
        ("quick", "gfx942:any", "`tuning: quick` does nothing, gfx942:any shares no tuning"),
        ("full", "gfx1100", ""),
        ("off", "gfx942:any", ""),
    ],
)
def test_a_tuning_that_cannot_be_had_is_reported(tuning: str, target: str, expected: str) -> None:
    warnings = one(manifest_text(f"tuning: {tuning}", model=ONE, targets=f"[{target}]")).warnings
    assert (len(warnings), "".join(warnings)[: len(expected)]) == (bool(expected), expected)


def test_what_changes_the_program_changes_the_key() -> None:
    base = manifest_text(model=ONE)
    keys = [
        one(base).key,
        one(base, {"net": model(digest="1")}).key,
        one(manifest_text("salt: again", model=ONE)).key,
        one(manifest_text("options: {level: tuned}", model=ONE)).key,
        one(manifest_text("verify: off", model=ONE)).key,
        one(manifest_text(model=ONE, precisions="[fp16]")).key,
        one(manifest_text(model="batches: [4]")).key,
        one(manifest_text(model="samples: {generate: 9}\n    " + ONE)).key,
        one(manifest_text(model="inputs: {x: {range: [0, 1]}}\n    " + ONE)).key,
        one(manifest_text(model=ONE, targets="[gfx1100]")).key,
        one(manifest_text("tuning: quick", model=ONE, targets="[gfx1100]")).key,
        one(manifest_text("options: {fast_math: false}", model=ONE, targets="[gfx1100]")).key,
    ]
    assert len(set(keys)) == len(keys)


def test_tuning_is_in_the_key_and_its_budget_is_not() -> None:
    """A finished tuning has no budget in its key; one cut short by a budget has a key of its own."""

    def made(tuning: str, target: str = "gfx1100") -> Cell:
        return one(manifest_text(f"tuning: {tuning}", model=ONE, targets=f"[{target}]"))

    plain, budgeted = made("quick"), made("{mode: quick, budget: 90s}")
    assert plain.key == budgeted.key
    assert keys_of(plain.order, plain.key) == [plain.key]
    assert (
        len({*keys_of(budgeted.order, budgeted.key), *keys_of(made("{mode: quick, budget: 2m}").order, plain.key)}) == 3
    )
    assert made("{mode: quick, miopen_find_enforce: 4}").key != plain.key
    assert made("quick", "gfx942:any").spec["tuning"] == {"mode": "off"}
    tuned, untuned = (made(mode, "onnxruntime/cpu").spec for mode in ("quick", "off"))
    assert (tuned["device"]["cpu_family"], untuned["device"]["cpu_family"]) == ("x86-64-v4", None)


def test_an_option_younger_than_the_keys_is_in_them_only_where_it_is_used() -> None:
    written = [one(manifest_text(line, targets="[migraphx/ref]", model="batches: [1]")).spec for line in (
        "options: {format: msgpack}", "options: {format: json}")]  # fmt: skip
    assert "format" not in written[0]["options"]
    assert written[1]["options"]["format"] == "json"
    assert cache_key(written[0]) == one(manifest_text(targets="[migraphx/ref]", model="batches: [1]")).key


def test_the_outputs_of_a_tensorflow_graph_are_part_of_the_key() -> None:
    graph = {"net": FrozenModel(**{**model(), "format": "tf"})}
    plain, cut = (
        one(manifest_text(f"    format: tf{line}", targets="[migraphx/ref]", model="batches: [1]"), graph)
        for line in ("", "\n    outputs: ['y:0']")
    )
    assert plain.spec["model"] == {"digest": "0" * 64, "format": "tf"}
    assert cut.spec["model"] == {"digest": "0" * 64, "format": "tf", "outputs": ["y"]}
    assert cut.order["model"]["outputs"] == ["y"]
    text = manifest_text("    outputs: [y]", model="batches: [1]")
    assert "`outputs` belongs to `format: tf`" in refusal(text)


@pytest.mark.parametrize(
    ("line", "reference"), [("", "migraphx"), ("\n    verify: {reference: onnxruntime}", "onnxruntime")]
)
def test_a_tensorflow_graph_is_compared_with_what_can_run_it_unless_somebody_names_another(
    line: str, reference: str
) -> None:
    graph = {"net": FrozenModel(**{**model(), "format": "tf"})}
    cell = one(manifest_text(f"    format: tf{line}", targets="[migraphx/ref]", model="batches: [1]"), graph)
    assert cell.spec["verification"]["reference"] == reference


def test_calibration_and_samples_are_named_by_their_digest_and_used_where_needed() -> None:
    text = manifest_text(model="calibration: cal\n    samples: {path: s.npz}\n    " + ONE, precisions="[fp32, int8]")
    text += "datasets: {cal: {path: c.npz}}\n"
    fp32, int8 = cells(text, data={"cal": data(x=(16, 3)), "net/samples": data(x=(5, 3), y=(5, 10))})
    assert fp32.spec["calibration"] is None
    assert int8.spec["calibration"] == {"digest": "d" * 64}
    assert int8.spec["verification"] is not None
    assert int8.spec["verification"]["samples"] == {"digest": "d" * 64}
    assert int8.order["calibration"] == {"path": "calibration.npz", "digest": "d" * 64, "size": 9}
    assert fp32.order["calibration"] is None
    assert fp32.order["samples"]["path"] == "samples.npz"


def test_recipes_have_the_declared_values_in_the_inputs_own_type() -> None:
    net = model(
        tensor("ids", "int64", ("batch", 4)), tensor("mask", "float32", ("batch", 4)), tensor("scale", "float32", ())
    )  # fmt: skip
    inputs = "inputs: {ids: {range: [0, 99]}, 'ma*': {range: [0, 1]}, scale: {value: 2}}\n"
    inputs += "    calibration: {generate: 4, seed: 7}"
    cell = one(manifest_text(model=f"{inputs}\n    {ONE}", precisions="[int8]"), {"net": net})
    ranges = {"ids": {"range": [0, 99]}, "mask": {"range": [0.0, 1.0]}, "scale": {"value": 2.0}}
    assert cell.spec["calibration"] == {"generate": 4, "seed": 7, "ranges": ranges}
    assert all(isinstance(value, float) for value in cell.spec["calibration"]["ranges"]["mask"]["range"])
    assert cell.spec["inputs"]["scale"] == {"dtype": "float32", "shape": []}
    assert "whole numbers" in refusal(manifest_text(model="inputs: {ids: {range: [0, 0.5]}}\n    " + ONE), {"net": net})


def test_samples_that_a_dataset_generates_are_generated() -> None:
    cell = one(manifest_text("datasets: {made: {generate: 5, seed: 7}}", model=f"samples: made\n    {ONE}"))
    assert cell.spec["verification"] is not None
    assert cell.spec["verification"]["samples"] == {"generate": 5, "seed": 7, "ranges": {}}


def test_the_reference_target_gets_fewer_samples() -> None:
    cell = one(manifest_text(model=ONE, targets="[migraphx/ref]"))
    assert cell.spec["verification"] is not None
    assert cell.spec["verification"]["samples"]["generate"] == 2


def test_quantization_options_go_to_the_precision_that_has_them() -> None:
    text = manifest_text(
        "options: {per_channel: true}", model="calibration: {generate: 4}\n    " + ONE, precisions="[fp32, int8]"
    )
    fp32, int8 = cells(text)
    assert fp32.spec["quantization"] == {}
    assert int8.spec["quantization"]["per_channel"] is True
    assert "per_channel" not in int8.spec["options"]
    assert int8.spec["compiler"]["libraries"] == {"sympy": "1.14.0"}


def test_options_that_bind_a_program_to_a_cpu_say_so_in_the_device() -> None:
    assert (
        one(manifest_text("options: {level: tuned}", model=ONE)).spec["device"]
        == Device("cpu", cpu_family="x86-64-v4").as_dict()
    )
    assert one(manifest_text(model=ONE)).spec["device"] == Device("cpu").as_dict()


def test_a_models_settings_are_laid_over_the_manifests_and_an_includes_over_both() -> None:
    text = manifest_text(
        "options: {level: tuned}", "limits: {time: 1h, memory: 1GiB}", "priority: 1", "salt: a",
        "verify: {tolerance: {fp32: 0.5, fp16: 0.4}, weak: fail}",
        "include: [{precision: fp16, limits: {time: 3h}, priority: 9}]",
        model="batches: [8]\n    limits: {time: 2h}\n    salt: b\n    verify: {tolerance: {fp32: {y: 0.1}}}",
        precisions="[fp32, fp16]",
    )  # fmt: skip
    fp32, fp16 = cells(text)
    assert (fp32.limits, fp32.priority) == ({"time": 7200.0, "memory": 1 << 30}, 1)
    assert (fp16.limits, fp16.priority) == ({"time": 10800.0, "memory": 1 << 30}, 9)
    assert (fp32.spec["salt"], fp32.spec["options"]) == ("b", {"level": "tuned"})
    assert fp32.gates == {
        "tolerance": {"*": 0.5, "y": 0.1},
        "weak": "fail",
        "on_fail": "fail",
        "unverifiable": "publish",
    }
    assert fp16.gates["tolerance"] == {"*": 0.4}


def test_gates_and_limits_have_defaults() -> None:
    cell = one(manifest_text(model=ONE), limits={"time": 60.0, "memory": 5})
    assert cell.limits == {"time": 60.0, "memory": 5}
    assert cell.gates == {"tolerance": {"*": 1e-3}, "weak": "warn", "on_fail": "fail", "unverifiable": "publish"}


def test_a_pair_has_the_tolerance_of_its_coarser_half_unless_it_has_its_own() -> None:
    made = "calibration: {generate: 4}\n    " + ONE
    pair = {"model": made, "targets": "[gfx1100]", "precisions": "[int8+fp16]"}
    assert one(manifest_text(**pair)).gates["tolerance"] == {"*": 0.2}
    text = manifest_text("verify: {tolerance: {int8: 0.1, fp16: 0.15}}", **pair)
    assert one(text).gates["tolerance"] == {"*": 0.15}
    text = manifest_text("verify: {tolerance: {fp16: 0.005}}", **pair)
    assert one(text).gates["tolerance"] == {"*": 0.2}, "int8 has its default"
    text = manifest_text("verify: {tolerance: {fp16: {y: 0.005}, int8: {y: 0.1}}}", **pair)
    assert one(text).gates["tolerance"] == {"*": 0.2, "y": 0.1}
    text = manifest_text("verify: {tolerance: {fp16: {y: 0.005}}}", **pair)
    assert one(text).gates["tolerance"] == {"*": 0.2, "y": 0.2}
    text = manifest_text("verify: {tolerance: {int8: 0.1, int8+fp16: 0.05}}", **pair)
    assert one(text).gates["tolerance"] == {"*": 0.05}


def test_a_model_that_the_compiler_does_not_read_is_refused() -> None:
    frozen = {"net": FrozenModel(**{**model(), "format": "tf"})}
    message = refusal(manifest_text(model="batches: [1]"), frozen)
    assert "onnxruntime does not read tf files (model `net`)" in message
    assert "it reads onnx" in message


@pytest.mark.parametrize(
    ("lines", "cannot"),
    [
        (["tuning: {mode: off}", "verify: off"], ""),
        (["tuning: {mode: quick}", "verify: off"], "tuning quick"),
        (["tuning: {mode: off}"], "verification"),
        (["tuning: {mode: quick}"], "tuning quick, verification"),
    ],
)
def test_nobody_believes_that_a_worker_without_the_gpu_tuned_or_verified(lines: list[str], cannot: str) -> None:
    text = manifest_text(*lines, targets="[gfx1100]", model="batches: [1]")
    pools = [dataclasses.replace(NAVI, untuned=True)]
    if cannot:
        message = refusal(text, pools=pools)
        assert f"no worker has a `gfx1100`, those that compile for it cannot do this: {cannot}\n" in message
    else:
        assert names(text, pools=pools) == ["net/migraphx-gfx1100/fp32/b1"]
    assert names(text) == ["net/migraphx-gfx1100/fp32/b1"], "a worker with the GPU does all of it"


def test_an_expected_failure_may_have_a_link() -> None:
    entries = (
        "{shape: b8, kind: hang, reason: known, link: 'https://example.org/7'}, {shape: b1, kind: hang, reason: x}"
    )
    linked = [cell.expected and cell.expected.get("link") for cell in cells(manifest_text(f"expected: [{entries}]"))]
    assert linked == [None, "https://example.org/7"]


def test_expected_cells_carry_their_entry() -> None:
    text = manifest_text("expected: [{shape: b8, kind: accuracy, reason: known, until: 2027-01-31}]")
    first, second = cells(text)
    assert first.expected is None
    assert second.expected == {"kind": "accuracy", "reason": "known", "until": "2027-01-31"}


# --- shapes -------------------------------------------------------------------------------------------------------


def test_sums_patterns_and_named_dimensions_become_numbers() -> None:
    net = model(
        tensor("past.0.key", "float32", (None, 8, None, 64)),
        tensor("past.0.value", "float32", (None, 8, None, 64)),
        tensor("mask", "int64", ("N", "past + seq")),
        tensor("ids", "int64", ("N", "seq")),
    )
    text = manifest_text(
        model="inputs: {'past.*': {shape: [batch, 8, past, 64]}, mask: {shape: [batch, past+seq]},"
        " ids: {shape: [batch, seq]}}\n"
        "    dims: {seq: 1, past: [0, 1024]}\n    batches: [2]"
    )
    first, second = cells(text, {"net": net})
    assert (first.shape, second.shape) == ("b2-past0-seq1", "b2-past1024-seq1")
    assert second.spec["inputs"]["past.0.value"] == {"dtype": "float32", "shape": [2, 8, 1024, 64], "batch_axis": 0}
    assert second.spec["inputs"]["mask"]["shape"] == [2, 1025]
    assert second.spec["batch"] == 2


def test_dimensions_that_the_model_names_itself_need_only_a_size() -> None:
    cell = one(manifest_text(model="dims: {N: 4}"), {"net": model(tensor("x", "float32", ("N", "N+1")))})
    assert (cell.spec["inputs"]["x"]["shape"], cell.shape, cell.spec["batch"]) == ([4, 5], "n4", None)


BLOCK = """inputs: {'past.*': {shape: [batch, 8, past, 64]}, mask: {shape: [batch, past+seq], value: 1}}
    shapes:
      prefill: {seq: 512, past: 0}
      decode: {seq: 1, past: 1024}"""


FIXED = tensor("x", "float32", (1, 3))


def block() -> FrozenModel:
    return model(
        tensor("past.0.key", "float32", (None, 8, None, 64)),
        tensor("mask", "int64", ("N", None)),
        tensor("ids", "int64", ("batch", "seq")),
    )


def test_named_shapes_are_points_next_to_the_product_of_sizes() -> None:
    made = cells(manifest_text(model=f"{BLOCK}\n    batches: [1, 8]"), {"net": block()})
    assert [cell.shape for cell in made] == ["prefill-b1", "prefill-b8", "decode-b1", "decode-b8"]
    assert made[0].identifier == "net/onnxruntime-cpu/fp32/prefill-b1"
    shapes = {name: spec["shape"] for name, spec in made[0].spec["inputs"].items()}
    assert shapes == {"past.0.key": [1, 8, 0, 64], "mask": [1, 512], "ids": [1, 512]}
    assert made[3].spec["inputs"]["mask"] == {"dtype": "int64", "shape": [8, 1025], "batch_axis": 0}
    assert made[3].spec["verification"]["samples"]["ranges"] == {"mask": {"value": 1}}


def test_a_named_shape_has_the_key_of_its_sizes() -> None:
    """Names are not part of a key: a point that was compiled as a product of sizes is a hit."""
    named = cells(manifest_text(model=f"{BLOCK}\n    batches: [8]"), {"net": block()})[1]
    text = BLOCK.split("shapes:", maxsplit=1)[0] + "dims: {seq: 1, past: 1024}\n    batches: [8]"
    assert one(manifest_text(model=text), {"net": block()}).key == named.key


def test_selectors_and_includes_know_named_shapes() -> None:
    lines = [
        "exclude: [{shape: prefill*}]",
        "include:",
        "  - {model: net, dims: {past: 1024}, salt: again}",
        "  - {model: net, batches: [2]}",
        "expected: [{shape: decode-b2, kind: accuracy}]",
    ]
    made = cells(manifest_text(*lines, model=f"{BLOCK}\n    batches: [1]"), {"net": block()})
    assert [(cell.shape, cell.spec["salt"]) for cell in made] == [
        ("decode-b1", "again"),
        ("prefill-b2", ""),
        ("decode-b2", ""),
    ]
    assert made[2].expected


IMAGE = "inputs: {x: {shape: [batch, 3, size, size]}}\n    dims: "


def image() -> FrozenModel:
    return model(tensor("x", "float32", (None, 3, None, None)), tensor("scale", "float32", ("batch", "size+1")))


def test_a_dynamic_dimension_is_a_range_in_the_spec() -> None:
    dims = "{batch: [1, {min: 1, max: 8, optimals: [4, 2, 4]}], size: 32}"
    static, dynamic = cells(manifest_text(model=IMAGE + dims), {"net": image()})
    assert (static.shape, dynamic.shape) == ("b1-size32", "b1to8-size32")
    span = {"min": 1, "max": 8, "optimals": [2, 4]}
    assert dynamic.spec["inputs"]["x"] == {"dtype": "float32", "shape": [span, 3, 32, 32], "batch_axis": 0}
    assert dynamic.spec["batch"] == dynamic.sizes["batch"] == span
    assert dynamic.key == cache_key(dynamic.spec) != static.key


def test_the_first_pattern_that_fits_an_input_says_its_values() -> None:
    inputs = "inputs: {x: {range: [0, 1]}, '*': {range: [0, 9]}}\n    "
    assert one(manifest_text(model=inputs + ONE)).key == one(manifest_text(model=inputs.replace("9", "8") + ONE)).key
    assert one(manifest_text(model=inputs + ONE)).key != one(manifest_text(model=inputs.replace("1]", "2]") + ONE)).key


def test_a_worker_hears_how_a_model_was_converted_and_the_key_does_not() -> None:
    conversion = {"from": "torch"}
    converted = FrozenModel(**{**model(), "conversion": conversion})
    plain, told = (one(manifest_text(model=ONE), {"net": each}) for each in (model(), converted))
    assert plain.order and told.order
    assert "conversion" not in plain.order["model"]
    assert told.order["model"]["conversion"] == conversion
    assert plain.key == told.key


@pytest.mark.parametrize("tuning", ["{mode: quick, background: quick}", "{mode: exhaustive, background: quick}"])
def test_tuning_in_the_background_is_more_thorough_than_what_goes_before(tuning: str) -> None:
    assert "finds nothing that `mode: " in refusal(manifest_text(f"tuning: {tuning}", model=ONE))


def test_a_sum_with_a_dynamic_dimension_moves_its_range() -> None:
    cell = one(manifest_text(model=IMAGE + "{batch: 1, size: {min: 8, max: 64, optimals: [32]}}"), {"net": image()})
    assert cell.spec["inputs"]["scale"]["shape"] == [1, {"min": 9, "max": 65, "optimals": [33]}]
    assert sum_of([Span(0, 8, (2, 4)), 1, Span(1, 2)]) == Span(2, 11, (5, 7))


@pytest.mark.parametrize(
    ("target", "expected"),
    [("gfx942:any", "8 submodules, one for each size from 1 to 8"), ("migraphx/ref", ""), ("onnxruntime/cpu", "")],
)
def test_the_price_of_a_dynamic_dimension_is_said_when_planning(target: str, expected: str) -> None:
    text = manifest_text(model="dims: {batch: {min: 1, max: 8}}", targets=f"[{target}]")
    (warnings,) = [cell.warnings for cell in cells(text)]
    assert "".join(warnings).startswith(expected)
    assert bool(warnings) == bool(expected)


@pytest.mark.parametrize(
    ("target", "operators", "expected"),
    [
        ("migraphx/cpu", ["Conv", "Relu", "Sigmoid"], "MIGraphX's cpu target refuses a range in Conv, Relu, which"),
        ("migraphx/cpu", ["Sigmoid"], ""),
        ("migraphx/ref", ["Conv", "LayerNormalization"], "MIGraphX refuses a range in LayerNormalization, which"),
        ("gfx942:any", ["LayerNormalization"], "MIGraphX refuses a range in LayerNormalization, which"),
    ],
)
def test_operators_that_refuse_a_range_are_named_when_planning(
    target: str, operators: list[str], expected: str
) -> None:
    text = manifest_text(model="dims: {batch: {min: 1, max: 8}}", targets=f"[{target}]")
    with_them = FrozenModel(**{**model(), "operators": dict.fromkeys(operators, 1)})
    pools = [*POOLS, migraphx("cpu", "migraphx2.15-0011aabb", "cpu")]
    warnings = one(text, {"net": with_them}, pools=pools).warnings
    assert "".join(warnings).startswith(expected)
    assert any("refuses a range" in warning for warning in warnings) == bool(expected)


def test_two_dynamic_dimensions_on_a_gpu_need_to_be_asked_for() -> None:
    dims = "{batch: {min: 1, max: 8}, size: {min: 8, max: 64}}"
    text = refusal(manifest_text(model=IMAGE + dims, targets="[gfx942:any]"), {"net": image()})
    assert (
        "farm.yaml:9:19: model `net` at b1to8-size8to64 on migraphx/gfx942: MIGraphX compiles for one dynamic" in text
    )
    asked = manifest_text("    env: {MIGRAPHX_ENABLE_FULL_DYNAMIC: 1}", model=IMAGE + dims, targets="[gfx942:any]")
    assert "when the program runs" in one(asked, {"net": image()}).warnings[0]


@pytest.mark.parametrize(
    ("size", "message"),
    [
        ("{min: 1}", "`min`, `max`"),
        ("{min: 8, max: 8}", "`min` 8 must be below `max` 8"),
        ("{min: 1, max: 8, optimals: [9]}", "sizes from 1 to 8"),
        ("{min: 1, max: 8, optimals: 4}", "must be a list"),
        ("{min: 0, max: 8}", "a batch has at least one sample"),
        ("{min: 1, max: many}", "is not a size"),
    ],
)
def test_a_range_that_is_none_is_refused(size: str, message: str) -> None:
    assert message in refusal(manifest_text(model=f"dims: {{batch: {size}}}"))


def test_a_sweep_builds_the_cells_of_its_batches() -> None:
    plain = cells(manifest_text(model="batches: [1, 8]"))
    swept = cells(manifest_text(model="sweep: {batches: [1, 8], max-latency: 10ms}"))
    assert [(cell.identifier, cell.key) for cell in swept] == [(cell.identifier, cell.key) for cell in plain]
    assert [cell.sweep for cell in plain] == [None, None]
    assert swept[1].sweep == {"metric": "throughput", "max_latency": 0.01}
    assert "farm.yaml:8:13: model" in refusal(manifest_text(model="sweep: {batches: [8]}"), {"net": model(FIXED)})


def test_a_named_shape_without_a_size_says_which() -> None:
    text = refusal(manifest_text(model=f"{BLOCK.replace('seq: 1, ', '')}\n    batches: [1]"), {"net": block()})
    assert "at decode-b1: input `mask`: dimension 1 of [batch, past+seq], `past+seq`, has no size" in text


def test_a_size_that_no_input_has_is_found_where_the_shape_says_it() -> None:
    text = refusal(
        manifest_text(model=f"{BLOCK}\n    batches: [1]".replace("1024", "1024, heads: 8")), {"net": block()}
    )
    assert text.startswith("farm.yaml:11:36: model `net`: no input has the dimension `heads`")


def test_a_model_without_open_dimensions_is_static() -> None:
    cell = one(manifest_text(model="priority: 0"), {"net": model(tensor("x", "float32", (1, 3)))})
    assert cell.identifier == "net/onnxruntime-cpu/fp32/static"
    assert cell.spec["inputs"] == {"x": {"dtype": "float32", "shape": [1, 3]}}


@pytest.mark.parametrize(
    ("entry", "shape", "message", "hint"),
    [
        ("priority: 0", ("batch", 3), "dimension 0 of [batch, 3], `batch`, has no size", "dims: {batch: 1}"),
        ("priority: 0", (None, 3), "dimension 0 of [?, 3] has no size", '`inputs: {"x": {shape: [batch, 3]}}`'),
        ("priority: 0", None, "unknown rank", "shape:"),
        ("batches: [1]", (None, 3), "dimension 0 of [?, 3] has no size", "shape: [batch, 3]"),
        ("batches: [1]", (1, 3), "no input has the dimension `batch`", "shape: [batch, 3]"),
        ("dims: {btach: 1}", ("batch", 3), "has no size", "dims: {batch: 1}"),
        ("dims: {batch: 1, seq: 2}", ("batch", 3), "no input has the dimension `seq`", "known: batch"),
        ("inputs: {y: {shape: [1]}}", (1, 3), "no input of the model matches `y`", "known: x"),
        ("inputs: {x: {shape: [1]}}", (1, 3), "has 2 dimensions in the model, [1, 3], not 1", ""),
        ("inputs: {x: {shape: [1, 4]}}", (1, 3), "the model fixes dimension 1 at 3, not 4", ""),
        ("inputs: {x: {shape: [batch, 3]}}\n    batches: [8]", (1, 3), "the model fixes dimension 0 at 1", "dynamic"),
    ],
)
def test_a_shape_that_does_not_work_out_is_explained(entry: str, shape: Any, message: str, hint: str) -> None:
    text = refusal(manifest_text(model=entry), {"net": model(tensor("x", "float32", shape))})
    assert message in text
    assert hint in text


# --- what cannot be done ------------------------------------------------------------------------------------------


def test_int8_without_calibration_names_the_model_and_what_to_write() -> None:
    message = refusal(manifest_text(model=ONE, precisions="[int8]"))
    assert "farm.yaml:6:11: int8 of model `net` needs calibration data" in message
    assert "calibration: {path: FILE.npz}" in message
    assert "`x`" in message


def test_a_precision_that_the_compiler_does_not_have_lists_those_it_has() -> None:
    message = refusal(manifest_text(model=ONE, precisions="[fp32, fp8]"))
    assert "farm.yaml:4:20: onnxruntime/cpu has no precision fp8" in message
    assert "native, fp32, fp16, bf16, int8, int4" in message
    assert "exclude: [{target: onnxruntime/cpu, precision: fp8}]" in message


def test_fp32_of_a_model_that_is_lower_already_hints_at_native() -> None:
    message = refusal(manifest_text(model=ONE), {"net": model(weights="float16")})
    assert "lower already (float16 weights)" in message
    assert "precisions: [native]" in message
    assert one(manifest_text(model=ONE, precisions="[native]"), {"net": model(weights="float16")}).precision == "native"


def test_a_pool_never_seen_is_an_error_that_lists_those_known() -> None:
    message = refusal(manifest_text(model=ONE, targets="[gfx90a]"))
    assert "farm.yaml:3:11: no pool serves `gfx90a`" in message
    assert "migraphx/gfx1100, migraphx/gfx942, migraphx/ref, onnxruntime/cpu" in message


def test_several_devices_of_one_architecture_ask_for_a_profile() -> None:
    message = refusal(manifest_text(model=ONE, targets="[gfx942]"), pools=[MI300X, MI300A])
    assert MI300X.name in message
    assert MI300A.name in message
    assert "name the device (mi300x" in message


def test_several_toolchains_and_none_chosen_is_an_error_that_lists_them() -> None:
    newer = Pool(CPU.target, "onnxruntime1.32.0-ffffffff", CPU.device, 1)
    message = refusal(manifest_text(model=ONE), pools=[CPU, newer])
    assert CPU.name in message
    assert newer.name in message


def test_a_profile_takes_its_own_device_and_keeps_its_name() -> None:
    first, second = cells(manifest_text(model=ONE, targets="[mi300x, mi300a]"), pools=[MI300X, MI300A])
    assert (first.identifier, second.identifier) == ("net/migraphx-mi300x/fp32/b8", "net/migraphx-mi300a/fp32/b8")
    assert first.spec["device"] == profiles()["mi300x"].device.as_dict()
    assert (first.pool, second.pool) == (MI300X.name, MI300A.name)
    assert first.order["target"] == "migraphx/gfx942"
    assert "no pool serves `mi325x-cpx`" in refusal(manifest_text(model=ONE, targets="[mi325x-cpx]"))


def test_any_device_of_an_architecture_is_keyed_by_the_architecture_only() -> None:
    cell = one(manifest_text(model=ONE, targets="['gfx942:any']"), pools=[MI300A, MI300X])
    assert cell.spec["device"] == Device("gfx942:any").as_dict()


def test_a_bare_architecture_takes_the_device_of_its_pool() -> None:
    assert one(manifest_text(model=ONE, targets="[gfx942]")).spec["device"] == MI300X.device.as_dict()


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"x": (16, 4)}, "array `x` has shape [16, 4], N samples would be [N, 3]"),
        ({"z": (16, 3), "x": (16, 3)}, "array `z` is neither an input nor an output"),
        ({"y": (16, 10)}, "there is no array for input `x`"),
        ({"x": (0, 3)}, "array `x` holds no sample"),
    ],
)
def test_data_that_does_not_fit_is_reported_at_its_place(arrays: dict[str, tuple[int, ...]], message: str) -> None:
    text = manifest_text(model="calibration: {path: c.npz}\n    " + ONE, precisions="[int8]")
    said = refusal(text, data={"net/calibration": data(**arrays)})
    assert "farm.yaml:8:18: calibration of model `net` at b8" in said
    assert message in said


def test_what_was_not_brought_is_named() -> None:
    assert "model `net` was not submitted" in refusal(manifest_text(model=ONE), {"other": model()})
    text = manifest_text(model="samples: {path: s.npz}\n    " + ONE)
    assert "samples of model `net` was not submitted" in refusal(text)


def test_all_problems_come_at_once() -> None:
    text = manifest_text(
        "  - name: half",
        "    source: {path: half.onnx}",
        "exclude: [{model: no-such}]",
        model=ONE,
        targets="[onnxruntime/cpu, gfx90a]",
        precisions="[fp32, int8, fp8]",
    )
    models = {"net": model(), "half": model(tensor("x", "float32", (1, 3)), weights="float16")}
    with pytest.raises(ManifestError) as caught:
        cells(text, models)
    said = [problem.message for problem in caught.value.problems]
    for words in (
        "no pool serves",
        "fp32 for model `half`",
        "needs calibration data",
        "no precision fp8",
        "matches nothing",
    ):
        assert any(words in message for message in said), words
    lines = [problem.line for problem in caught.value.problems]
    assert lines == sorted(lines)
    assert len(said) == len(set(said))


def test_an_output_that_a_model_does_not_have_has_no_tolerance() -> None:
    entry = "verify: {tolerance: {fp32: {logits: 0.1}}}\n    " + ONE
    assert "model `net` has no output `logits`" in refusal(manifest_text(model=entry))


def test_a_check_needs_no_pools_and_skips_models_it_was_not_given() -> None:
    manifest = parse_manifest(manifest_text(model=ONE, precisions="[int8]", targets="[gfx90a]"), "farm.yaml")
    assert [problem.message for problem in check(combine(manifest), {"net": model()}, {})] == [
        "int8 of model `net` needs calibration data"
    ]
    manifest = parse_manifest(manifest_text(model=ONE, targets="[gfx90a]"), "farm.yaml")
    assert check(combine(manifest), {}, {}) == []


def test_every_profile_belongs_to_a_gpu_that_a_compiler_knows() -> None:
    for name, profile in profiles().items():
        choice = understand_target(name)
        nvidia = profile.device.arch.startswith("sm_")
        assert (str(choice.served) == "onnxruntime/cuda") if nvidia else fnmatchcase(choice.served.device, "gfx*")
        assert profile.device.compute_units
        assert profile.memory >= 8 << 30


# --- overrides ----------------------------------------------------------------------------------------------------


def test_overrides_come_after_include_and_the_later_wins() -> None:
    text = manifest_text(
        "include: [{precision: fp16, batches: [8], options: {fast_math: false}, limits: {time: 1h}}]",
        "overrides:",
        "  - {select: {precision: fp16}, options: {fast_math: true, offload_copy: false}, limits: {time: 2h}}",
        "  - {select: {shape: b8}, options: {offload_copy: true}, verify: {weak: fail}}",
        targets="[gfx1100]",
        precisions="[fp32, fp16]",
    )
    found = {cell.identifier.partition("gfx1100/")[2]: cell for cell in cells(text)}
    assert {
        label: (cell.spec["options"]["fast_math"], cell.spec["options"]["offload_copy"])
        for label, cell in found.items()
    } == {
        "fp32/b1": (True, True),
        "fp32/b8": (True, True),
        "fp16/b1": (True, False),
        "fp16/b8": (True, True),
    }
    assert [cell.limits["time"] for cell in found.values()] == [14_400, 14_400, 7200, 7200]
    assert {label for label, cell in found.items() if cell.gates["weak"] == "fail"} == {"fp32/b8", "fp16/b8"}


OVERRIDES = st.lists(
    st.fixed_dictionaries(
        {
            "select": st.fixed_dictionaries(
                {"model": st.just("net")},
                optional={"precision": st.sampled_from(["fp32", "fp16", "*"]), "shape": st.sampled_from(["b1", "b8"])},
            ),
        },
        optional={
            "options": st.dictionaries(st.sampled_from(["fast_math", "offload_copy"]), st.booleans()),
            "env": st.dictionaries(st.sampled_from(["MIGRAPHX_DISABLE_MLIR", "MIGRAPHX_ENABLE_CK"]), st.booleans()),
            "limits": st.fixed_dictionaries({"time": st.sampled_from(["1h", "2h"])}),
            "tuning": st.sampled_from(["off", "quick", "full"]),
        },
    ),
    max_size=5,
)


@settings(max_examples=100, deadline=None)
@given(overrides=OVERRIDES)
def test_every_cell_has_what_the_last_override_that_takes_it_says(overrides: list[dict[str, Any]]) -> None:
    """Against a plain retelling of the rule: field by field, entry after entry."""
    text = manifest_text(f"overrides: {json.dumps(overrides)}", targets="[gfx1100]", precisions="[fp32, fp16]")
    for cell in cells(text):
        options, env, time_limit, mode = {"fast_math": True, "offload_copy": True}, {}, 14_400, "off"
        for entry in overrides:
            chosen = entry["select"]
            if fnmatchcase(cell.precision, chosen.get("precision", "*")) and cell.shape == chosen.get(
                "shape", cell.shape
            ):
                options |= entry.get("options", {})
                env |= entry.get("env", {})
                mode = entry.get("tuning", mode)
                time_limit = {"1h": 3600, "2h": 7200}.get(entry.get("limits", {}).get("time"), time_limit)
        assert {name: cell.spec["options"][name] for name in options} == options
        assert cell.spec["env"] == {name: "1" for name, on in env.items() if on}
        assert (cell.limits["time"], cell.spec["tuning"]["mode"]) == (time_limit, mode)
        assert cell.key == cache_key(cell.spec)


def test_an_override_that_selects_nothing_is_an_error_on_its_line() -> None:
    message = refusal(manifest_text("overrides:", "  - {select: {precision: int8*}, limits: {time: 8h}}"))
    assert "farm.yaml:10:26: overrides[0] matches nothing: no cell has the precision int8*" in message


def test_an_override_brings_calibration_of_its_own_to_the_cells_that_it_selects() -> None:
    text = manifest_text(
        "    calibration: {path: a.npz}",
        "overrides: [{select: {shape: b8}, calibration: {path: b.npz}}]",
        precisions="[int8]",
    )
    frozen = {
        "net/calibration": {**data(x=(8, 3)), "digest": "a" * 64},
        "net/calibration/0": {**data(x=(8, 3)), "digest": "b" * 64},
    }
    assert [cell.spec["calibration"] for cell in cells(text, data=frozen)] == [
        {"digest": "a" * 64},
        {"digest": "b" * 64},
    ]
    assert combine(parse_manifest(text)).overridden_calibration() == [(0, 0)]
    # Where no cell that it selects needs any, nobody has to bring it.
    assert combine(parse_manifest(text.replace("[int8]", "[fp32]"))).overridden_calibration() == []
    assert "overrides[0]" not in refusal(text, data={"net/calibration": frozen["net/calibration"]})


# --- toolchains ---------------------------------------------------------------------------------------------------

OLD = migraphx("gfx1100", "rocm7.1-migraphx2.14-cc", "gfx1100", 96)


def test_toolchains_are_an_axis_for_the_compilers_that_can_have_them() -> None:
    text = manifest_text("toolchains: [rocm7.1, rocm7.2]", targets="[gfx1100, onnxruntime/cpu]", model="batches: [1]")
    found = {cell.identifier: cell.spec["toolchain"] for cell in cells(text, pools=[*POOLS, OLD])}
    assert found == {
        "net/migraphx-gfx1100.rocm7.1/fp32/b1": "rocm7.1-migraphx2.14-cc",
        "net/migraphx-gfx1100.rocm7.2/fp32/b1": "rocm7.2-migraphx2.15-bb",
        "net/onnxruntime-cpu/fp32/b1": CPU.toolchain,
    }


def test_the_only_toolchain_of_a_target_leaves_its_identifiers_as_they_are() -> None:
    with_one = cells(manifest_text("toolchains: [rocm7.2]", targets="[gfx1100]"), pools=[*POOLS, OLD])
    without = cells(manifest_text(targets="[gfx1100]"))
    assert [(cell.identifier, cell.key) for cell in with_one] == [(cell.identifier, cell.key) for cell in without]


def test_toolchains_choose_among_all_that_are_known() -> None:
    """The operator's default, or who has workers, counts only where the manifest does not choose."""
    text = manifest_text("toolchains: [rocm7.1]", targets="[gfx1100]")
    assert {cell.spec["toolchain"] for cell in cells(text, pools=[NAVI], known=[NAVI, OLD])} == {OLD.toolchain}


def test_a_selector_and_an_include_may_name_a_toolchain() -> None:
    text = manifest_text(
        "toolchains: [rocm7.1, rocm7.2]",
        "exclude: [{toolchain: rocm7.1, shape: b8}]",
        "include: [{toolchain: rocm7.2, salt: x}]",
        targets="[gfx1100]",
    )
    assert [(cell.identifier, cell.spec["salt"]) for cell in cells(text, pools=[*POOLS, OLD])] == [
        ("net/migraphx-gfx1100.rocm7.1/fp32/b1", ""),
        ("net/migraphx-gfx1100.rocm7.2/fp32/b1", "x"),
        ("net/migraphx-gfx1100.rocm7.2/fp32/b8", "x"),
    ]


def test_an_included_toolchain_that_is_no_other_cells_shows_in_its_identifier() -> None:
    text = manifest_text("include: [{toolchain: rocm7.1}]", targets="[gfx1100]", model="batches: [1]")
    assert names(text, pools=[NAVI], known=[NAVI, OLD]) == [
        "net/migraphx-gfx1100/fp32/b1",
        "net/migraphx-gfx1100.rocm7.1/fp32/b1",
    ]


def test_a_toolchain_that_no_pool_has_is_an_error_that_lists_those_there_are() -> None:
    message = refusal(manifest_text("toolchains: [rocm6.4]", targets="[gfx1100]"), pools=[*POOLS, OLD])
    assert "farm.yaml:9:14: no pool of `gfx1100` has the toolchain `rocm6.4`" in message
    assert "known: rocm7.1-migraphx2.14-cc, rocm7.2-migraphx2.15-bb" in message


@pytest.mark.parametrize(
    ("toolchain", "prefix", "expected"),
    [
        ("rocm7.1-migraphx2.14-cc112233", "rocm7.1", True),
        ("rocm7.1.2-migraphx2.14-cc112233", "rocm7.1", True),
        ("rocm7.10-migraphx2.14-cc112233", "rocm7.1", False),
        ("rocm7.1-migraphx2.14-12345678", "rocm7.1-migraphx2.14-1234", True),
        ("rocm7.1-migraphx2.14-12345678", "rocm7.1-migraphx2.1", False),
        ("rocm7.1-migraphx2.14-12345678", "migraphx", False),
        ("rocm7.1-migraphx2.14-12345678", "", True),
    ],
)
def test_the_start_of_a_toolchain_ends_where_a_number_ends(toolchain: str, prefix: str, expected: bool) -> None:
    assert begins(toolchain, prefix) is expected


# --- what a toolchain can do, and what a device only emulates --------------------------------------------------------


def test_what_a_toolchain_cannot_do_is_reported_when_planning() -> None:
    old = migraphx("gfx1100", "rocm6.3-migraphx2.11-dd", "gfx1100", 96, features=("quantize_fp16", "quantize_int8"))
    message = refusal(manifest_text(targets="[gfx1100]", precisions="[fp16, bf16]"), pools=[old])
    assert "farm.yaml:4:20: toolchain_mismatch: rocm6.3-migraphx2.11-dd has no quantize_bf16" in message
    assert "MIGraphX 2.12 (ROCm 6.4) and newer have it" in message
    symbols = refusal(manifest_text("options: {use_debug_symbols: true}", targets="[gfx1100]"), pools=[old])
    assert "which option `use_debug_symbols` needs" in symbols
    assert cells(manifest_text("options: {use_debug_symbols: false}", targets="[gfx1100]"), pools=[old])


def test_an_emulated_precision_is_said_of_each_cell_and_once_in_the_plan() -> None:
    text = manifest_text("    calibration: {generate: 8}", targets="[gfx1100, mi300x]", precisions="[fp8+fp16, fp16]")
    found = cells(text)
    assert {(cell.target, cell.precision): cell.emulated for cell in found} == {
        ("migraphx/gfx1100", "fp8-fp16"): ("fp8",),
        ("migraphx/gfx1100", "fp16"): (),
        ("migraphx/mi300x", "fp8-fp16"): (),
        ("migraphx/mi300x", "fp16"): (),
    }
    assert found[0].order["emulated"] == ["fp8"]
    plan = make_plan(found, known={}, running=(), last={}, read_spec=lambda key: None, live_workers={}, estimates={})
    assert [warning for warning in plan.warnings if "no units" in warning] == [
        "migraphx/gfx1100 has no units for fp8: 2 cells can only round to it, and compute no faster"
    ]


def test_int4_is_for_the_targets_and_formats_that_have_it() -> None:
    assert "migraphx/cpu has no precision int4" in refusal(manifest_text(targets="[migraphx/cpu]", precisions="[int4]"))
    graph = FrozenModel(**{**model(), "format": "tf"})
    text = manifest_text(targets="[migraphx/ref]", precisions="[int4+fp16]")
    assert "int4 needs an ONNX model" in refusal(text, {"net": graph})
    assert names(text)[0] == "net/migraphx-ref/int4-fp16/b1"


# --- environment --------------------------------------------------------------------------------------------------


def test_environment_is_laid_over_at_every_level_and_reaches_only_its_compiler() -> None:
    text = manifest_text(
        "    env: {MIGRAPHX_ENABLE_NHWC: true, MIGRAPHX_NSTREAMS: 2}",
        "env: {MIGRAPHX_DISABLE_MLIR: 1, MIGRAPHX_NSTREAMS: 8}",
        "overrides: [{select: {shape: b8}, env: {MIGRAPHX_DISABLE_MLIR: false}}]",
        targets="[gfx1100, onnxruntime/cpu]",
    )
    first, second, *others = cells(text)
    assert first.spec["env"] == {"MIGRAPHX_DISABLE_MLIR": "1", "MIGRAPHX_ENABLE_NHWC": "1", "MIGRAPHX_NSTREAMS": "2"}
    assert second.spec["env"] == {"MIGRAPHX_ENABLE_NHWC": "1", "MIGRAPHX_NSTREAMS": "2"}
    assert [cell.spec["env"] for cell in others] == [{}, {}]


def test_a_file_in_the_environment_is_in_the_key_by_its_digest() -> None:
    text = manifest_text("env: {HIPBLASLT_TUNING_OVERRIDE_FILE: {path: gemms.txt}}", targets="[gfx1100]")
    files = {"gemms.txt": {"digest": "f" * 64, "size": 12}}
    cell = cells(text, files=files)[0]
    assert cell.spec["env"] == {"HIPBLASLT_TUNING_OVERRIDE_FILE": "sha256:" + "f" * 64}
    assert {"path": "HIPBLASLT_TUNING_OVERRIDE_FILE", **files["gemms.txt"]} in input_files(cell.order)
    assert "was not submitted with the manifest" in refusal(text)
    other = cells(text, files={"gemms.txt": {"digest": "e" * 64, "size": 12}})[0]
    assert cell.key != other.key


def test_what_a_compiler_may_refuse_and_another_takes_is_a_warning() -> None:
    doubtful = {"net": FrozenModel(**{**model(), "doubts": ["the model imports no opset of domain 'com.microsoft'"]})}
    for target, compiler in (("gfx1100", "migraphx"), ("onnxruntime/cpu", "onnxruntime")):
        (warning,) = one(manifest_text(model=ONE, targets=f"[{target}]"), doubtful).warnings
        assert warning.startswith(f"the model imports no opset of domain 'com.microsoft'; if {compiler}")


# --- packs --------------------------------------------------------------------------------------------------------


def test_packs_add_a_program_that_leaves_copies_to_its_caller() -> None:
    text = manifest_text("packs: [onnxruntime]", targets="[gfx1100, onnxruntime/cpu]", model="sweep: [1, 8]")
    found = {cell.identifier: cell for cell in cells(text)}
    assert list(found) == [
        "net/migraphx-gfx1100/fp32/b1",
        "net/migraphx-gfx1100/fp32/b1.pack",
        "net/migraphx-gfx1100/fp32/b8",
        "net/migraphx-gfx1100/fp32/b8.pack",
        "net/onnxruntime-cpu/fp32/b1",
        "net/onnxruntime-cpu/fp32/b8",
    ]
    twin, packed = found["net/migraphx-gfx1100/fp32/b8"], found["net/migraphx-gfx1100/fp32/b8.pack"]
    assert (packed.shape, packed.sizes, packed.sweep) == ("b8.pack", {"batch": 8}, None)
    changed = {name for name, value in packed.spec.items() if value != twin.spec[name]}
    assert changed == {"options"}, "all that tuning shares is the same"
    assert packed.spec["options"] == {**twin.spec["options"], "offload_copy": False}
    assert [cell for cell in cells(text.replace("packs: [onnxruntime]", "")) if cell.key == twin.key], "no key changes"


def test_a_model_has_its_own_packs_or_none() -> None:
    text = manifest_text("    packs: []", "packs: [triton]", targets="[gfx1100]", model="batches: [8]")
    assert names(text) == ["net/migraphx-gfx1100/fp32/b8"]
    text = manifest_text("    packs: [triton]", targets="[gfx1100]", model="batches: [8]")
    assert names(text) == ["net/migraphx-gfx1100/fp32/b8", "net/migraphx-gfx1100/fp32/b8.pack"]


def test_what_selects_a_cell_selects_its_program_for_packs_too() -> None:
    text = manifest_text(
        "packs: [onnxruntime]",
        "overrides: [{select: {shape: b8}, options: {fast_math: false, offload_copy: true, format: json}}]",
        "expected: [{shape: b8, kind: compiler_error, reason: known}]",
        targets="[gfx1100]",
        model="batches: [8]",
    )
    twin, packed = cells(text)
    assert twin.expected and twin.expected == packed.expected
    assert (twin.spec["options"]["format"], "format" in packed.spec["options"]) == ("json", False)
    assert (twin.spec["options"]["offload_copy"], packed.spec["options"]["offload_copy"]) == (True, False)
    assert packed.spec["options"]["fast_math"] is False


def test_packs_that_no_program_fits_are_refused_with_the_plan() -> None:
    dynamic = manifest_text("packs: [onnxruntime]", targets="[gfx1100]", model="dims: {batch: {min: 1, max: 8}}")
    assert "takes fixed sizes only, and `batch` is a range" in refusal(dynamic)
    graph = manifest_text("    format: tf", "packs: [onnxruntime-cache]", targets="[gfx1100]", model="batches: [8]")
    frozen = {"net": FrozenModel(**{**model(), "format": "tf"})}
    assert "ONNX Runtime does not read tf" in refusal(graph, frozen)
    assert len(names(graph.replace("onnxruntime-cache", "onnxruntime"), frozen)) == 2


def test_packs_that_a_target_cannot_have_are_a_warning() -> None:
    targets = "[gfx1100, migraphx/ref, onnxruntime/cpu]"
    text = manifest_text("packs: [onnxruntime-cache, triton]", targets=targets, model="batches: [8]")
    said = {cell.target: cell.warnings for cell in cells(text)}
    what = "only programs of MIGraphX for AMD GPUs fit there"
    assert said == {
        "migraphx/gfx1100": (),
        "migraphx/ref": (f"no pack for onnxruntime-cache, triton: {what}",),
        "onnxruntime/cpu": (f"no pack for onnxruntime-cache: {what}",),
    }
    own = manifest_text(
        "    packs: []", "packs: [onnxruntime-cache]", targets="[onnxruntime/cpu]", model="batches: [8]"
    )
    assert one(own).warnings == ()


def test_overrides_set_the_priority_and_the_salt_of_the_cells_that_they_select() -> None:
    text = manifest_text(
        "priority: 1",
        "salt: all",
        "overrides: [{select: {shape: b8}, priority: 5, salt: again}]",
        model="batches: [1, 8]",
    )
    assert [(cell.priority, cell.spec["salt"]) for cell in cells(text)] == [(1, "all"), (5, "again")]


# --- just at the limits -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("most", "sizes", "lines", "said"),
    [
        (4, "[1, 2, 3, 4]", (), ""),
        (4, "[1, 2, 3, 4, 5]", (), "the matrix has 5 cells up to model `net`, more than 4"),
        (4, "[1, 2]", ("include: [{batches: [5, 6]}]",), ""),
        (4, "[1, 2]", ("include: [{batches: [5, 6]}, {batches: [7]}]",), "the matrix has more than 4 cells with this"),
        (4, "[1]", ("include: [{batches: [5, 6, 7]}]",), ""),
        (4, "[1, 2]", ("include: [{target: gfx1100, batches: [1, 2]}]",), ""),
    ],
)
def test_a_matrix_has_at_most_so_many_cells_with_what_is_included(
    monkeypatch: pytest.MonkeyPatch, most: int, sizes: str, lines: tuple[str, ...], said: str
) -> None:
    monkeypatch.setattr("farm.matrix.combinations.MAX_CELLS", most)
    text = manifest_text(*lines, model=f"batches: {sizes}")
    if said:
        assert said in refusal(text)
    else:
        assert names(text)


def test_options_that_contradict_each_other_are_refused_where_they_stand(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(*_: Any) -> Any:
        raise ValueError("`level` and `threads` contradict each other")

    monkeypatch.setattr("farm.targets.compilers.Compiler.resolved", wrong)
    message = refusal(manifest_text("options: {level: tuned}"))
    assert "contradict each other" in message
    assert "farm.yaml:9:1" in message
    assert "farm.yaml:9:14" in refusal(manifest_text("    options: {level: tuned}"))
