"""The published JSON Schema says the same as the parser, in both drafts."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from farm.errors import ManifestError
from farm.manifest.entries import _as_draft7, manifest_schema
from farm.manifest.parsing import parse_manifest
from farm.manifest.yaml import read_document
from tests.support.places import ROOT

CONFIGS = ROOT / "configs"
NEWEST = jsonschema.Draft202012Validator(manifest_schema())
DRAFT7 = jsonschema.Draft7Validator(manifest_schema(draft7=True))

GOOD: dict[str, Any] = {
    "version": 1,
    "name": "nightly",
    "targets": ["mi300x", "onnxruntime/cpu"],
    "datasets": {"images": {"path": "a.npz"}},
    "models": [{"name": "net", "source": {"path": "net.onnx"}}],
}
SHA = "a" * 64

CHANGES: dict[str, list[Any]] = {
    "version": [1, 2, "1", True, None],
    "name": ["a", "a.b-c_d", "A", "", "-a", "a b", 3, "x" * 100, "x" * 101],
    "labels": [{}, {"team": "x"}, {"Team": "x"}, {"team": 1}, [], {"a/b": ""}],
    "targets": [[], ["gfx942:any"], ["GFX942"], "mi300x", [1], ["mi300x"]],
    "precisions": [["int8+fp16"], ["int8-fp16"], ["fp16+int8"], ["int9"], [], "fp32", [8]],
    "options": [
        {}, {"level": "tuned"}, {"level": 1.5}, {"level": None}, {"Level": "x"}, [], {"fp16_operators": ["dot"]},
        {"fp16_operators": []},
    ],
    "tuning": [
        "off", "full", "max", {}, {"mode": "quick", "budget": "2h"}, {"budget": 2}, None, {"budget": "2h"},
        {"budget": "2 h"}, {"budget": "90s"}, {"budget": "1.5d"}, {"budget": "h"}, {"budget": "2w"}, {"budget": ""},
    ],
    "verify": [
        "off", "on", {}, {"mode": "off"}, {"weak": "fail"}, {"weak": "no"}, {"x": 1}, 3, {"tolerance": 0.1},
        {"tolerance": 1}, {"tolerance": 0}, {"tolerance": -1}, {"tolerance": "1"}, {"tolerance": {}},
        {"tolerance": {"int8": 0.1}}, {"tolerance": {"int8": {"out": 0.1}}}, {"tolerance": {"*": 0.1}},
        {"tolerance": {"int9": 0.1}}, {"tolerance": {"int8": {}}}, {"tolerance": {"int8": {"a": 0}}},
        {"tolerance": [1]},
    ],
    "limits": [
        {}, {"time": "4h"}, {"time": 4}, {"memory": "32GiB"}, {"memory": "32 GiB"}, {"memory": 1}, {"time": None},
        {"cpu": 1}, None,
    ],
    "max-parallel": [1, 0, 100000, 100001, "1", 1.5, None, True],
    "fail-fast": [True, False, "yes", 1, None],
    "priority": [0, -100, 101, 1.5, "1", True],
    "salt": ["", "x", "x" * 101, 1, None],
    "fail_fast": [True],
    "toolchains": [[], ["rocm7.2"], ["rocm7.2", "migraphx2.16"], ["ROCm"], "rocm7.2", [7.2]],
    "env": [
        {}, {"MIGRAPHX_DISABLE_MLIR": True}, {"MIGRAPHX_NSTREAMS": 2}, {"MIOPEN_DEBUG_X": "a"}, {"a": 1}, [],
        {"HIPBLASLT_TUNING_OVERRIDE_FILE": {"path": "x"}}, {"HIPBLASLT_TUNING_OVERRIDE_FILE": {}},
        {"HIPBLASLT_TUNING_OVERRIDE_FILE": {"path": "x", "y": 1}}, {"MIOPEN_DEBUG_X": None}, {"MIOPEN_DEBUG_X": 1.5},
    ],
    "overrides": [
        [], [{}], [{"select": {}}], [{"select": {"model": "*"}}], [{"select": {"toolchain": "rocm*"}}],
        [{"select": {"model": "*"}, "options": {"level": "tuned"}, "limits": {"time": "4h"}, "reason": "x"}],
        [{"select": {"model": "*"}, "salt": "x"}], [{"options": {}}], [{"select": "net"}],
        [{"select": {"model": "*", "reason": "x"}}], [{"select": {"shape": "b8"}, "calibration": {"generate": 8}}],
    ],
    "triggers": [
        [], {}, [{}], [{"schedule": "17 3 * * 1-5"}], [{"schedule": "17 3 * * MON", "timezone": "Europe/Berlin"}],
        [{"schedule": "17 3 * *"}], [{"schedule": 3}], [{"source": "s3://bucket/key"}], [{"source": "bucket/key"}],
        [{"source": "s3://bucket/key", "timezone": "UTC"}], [{"toolchain": "mi300x"}], [{"toolchain": "MI300X"}],
        [{"toolchain": "mi300x", "source": "s3://bucket/key"}], [{"timezone": "UTC"}], None, [{"every": "1d"}],
    ],
    "concurrency": [
        "nightly", "a b", None, {}, {"group": "x"}, {"group": "x", "cancel-in-progress": True}, {"group": 1},
        {"group": "x", "cancel_in_progress": True}, {"group": "x", "per": "branch"}, {"group": "x", "per": "A"},
        {"cancel-in-progress": True}, {"group": "x", "cancel-in-progress": "yes"}, [],
    ],
    "unknown": [[]],
    "datasets": [{}, {"A": {"path": "x"}}, {"a": {}}, {"a": {"dataset": "b"}}, {"a": "b"}],
    "datasets.x": [
        {"generate": 8}, {"generate": 8, "seed": 1}, {"generate": 0}, {"seed": 1}, {"path": "a", "seed": 1},
        {"path": ""}, {"path": "a", "package": "b/c"}, {"https": "https://h/f"}, {"path": "a", "sha256": SHA},
        {"https": "https://h/f", "sha256": SHA},
    ],
    "models": [[], {}, None, [{}], ["net"]],
    "models.0.source": [
        {}, {"path": "x"}, {"path": ""}, "x", {"package": "a/b.onnx"}, {"package": "a"}, {"s3": "s3://bucket/key"},
        {"s3": "bucket/key"}, {"https": "https://h/f", "sha256": SHA}, {"https": "https://h/f"},
        {"path": "x", "sha256": SHA}, {"s3": "s3://bucket/k", "sha256": SHA}, {"path": "x", "s3": "s3://bucket/k"},
        {"glob": "*"}, {"sha256": SHA},
    ],
    "models.0": [
        {"source": {"glob": {"*": ["a.onnx"]}}}, {"source": {"glob": {}}}, {"source": {"glob": {"*": []}}},
        {"source": {"glob": ""}}, {"source": {"path": "x"}}, {"name": "net", "source": {"glob": {"*": ["a.onnx"]}}},
        {"name": "net"}, {"source": {"glob": {"*": ["a"], "b": ["c"]}}}, {"source": {"glob": {"*": [1]}}},
        {"name": "net", "source": {"path": "x"}, "format": "tf", "outputs": ["a", "b"]},
        {"name": "net", "source": {"path": "x"}, "format": "tf", "outputs": ["a", "a"]},
        {"name": "net", "source": {"path": "x"}, "format": "tf", "outputs": []},
    ],
    "models.0.format": ["onnx", "tf", "pt", None],
    "models.0.inputs": [{}, {"x": {}}, {"x.*": {"shape": []}}, {"x": None}, {"x": []}, []],
    "models.0.inputs.x": [
        {"shape": [1, 3]}, {"shape": ["batch", "past+seq"]}, {"shape": ["a + 1"]}, {"shape": ["1+a"]},
        {"shape": [-1]}, {"shape": [1.5]}, {"shape": [True]}, {"shape": [None]}, {"shape": ["a*b"]}, {"shape": 3},
        {"shape": [2147483648]}, {"shape": [""]}, {"range": [0, 1]}, {"range": [0]}, {"range": ["a", 1]},
        {"value": 1}, {"value": "1"}, {"range": [0, 1], "value": 1}, {"value": None},
    ],
    "models.0.dims": [
        {}, {"seq": 1}, {"seq": [1, 2]}, {"seq": []}, {"seq": [1, 1]}, {"1a": 1}, {"seq": -1}, {"seq": "1"},
        {"seq": 0}, {"M1": 3}, {"seq": None}, [],
    ],
    "models.0.batches": [[1, 8], [0], [], 1, [1, 1], ["1"]],
    "models.0.calibration": ["images", {"dataset": "images"}, {"generate": 4}, None, "A b", 3, {}],
    "models.0.samples": ["images", {"path": "x"}, {"path": "x", "generate": 1}],
    "models.0.verify": ["off", {"on-fail": "warn"}, {"on_fail": "warn"}, {"reference": "migraphx"}],
    "exclude": [
        [], [{}], [{"model": "*"}], [{"model": []}], [{"model": ["a", "b"]}], [{"model": 1}], [{"reason": "x"}],
        [{"shape": "b*", "reason": "x"}], [{"model": "a", "x": 1}], {},
    ],
    "include": [
        [{"model": "net"}], [{"model": "net*"}], [{"precision": "int8+fp16"}], [{"x": 1}], [{"batches": [4]}],
        [{"target": "mi300x", "options": {"level": "x"}}], [{"shape": "b"}],
    ],
    "expected": [
        [{"model": "net", "kind": "accuracy"}], [{"model": "net"}], [{"kind": "accuracy"}],
        [{"model": "net", "kind": "hang"}], [{"model": "net", "kind": "slow"}], [{"model": "net", "kind": 1}],
        [{"model": "net", "kind": "hang", "until": "2027-01-31"}],
        [{"model": "net", "kind": "hang", "until": "31.1.2027"}], [{"model": "net", "kind": "hang", "until": 2027}],
    ],
}  # fmt: skip
"""Values to try by their place in a manifest."""

CASES = [(tuple(int(part) if part.isdigit() else part for part in place.split(".")), value)
         for place, values in CHANGES.items() for value in values]  # fmt: skip

SEMANTIC = ("mi300x", "known:", "no compiler has", "no dataset", "must be one of", "occurs twice", "targets, and the")
"""Words of problems between entries, which a schema cannot see."""


def changed(path: tuple[str | int, ...], value: Any) -> Any:
    document: Any = copy.deepcopy(GOOD)
    inner = document
    for part in path[:-1]:
        inner = inner.setdefault(part, {}) if isinstance(inner, dict) else inner[part]
    inner[path[-1]] = value
    return document


def accepted(document: Any) -> tuple[bool, str]:
    """Whether the parser takes a document, problems between entries left out."""
    try:
        parse_manifest(json.dumps(document), "x")
    except ManifestError as error:
        problems = [problem for problem in error.problems if "option `" not in problem.message]
        return not problems, "\n".join(map(str, problems))
    return True, ""


def compare(document: Any) -> None:
    parser, problems = accepted(document)
    for name, validator in (("2020-12", NEWEST), ("draft-07", DRAFT7)):
        errors = [error.message[:200] for error in validator.iter_errors(document)]
        assert (not errors) == parser, f"{document}\nparser: {problems or 'fine'}\n{name}: {errors or 'fine'}"


@pytest.mark.parametrize(("path", "value"), CASES)
def test_schema_and_parser_agree(path: tuple[str | int, ...], value: Any) -> None:
    compare(changed(path, value))


def test_there_are_enough_samples_of_both_kinds() -> None:
    verdicts = [accepted(changed(path, value))[0] for path, value in CASES]
    assert sum(verdicts) >= 50
    assert len(verdicts) - sum(verdicts) >= 100


SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(-5, 300), st.sampled_from(["net", "off", "8", "", "4h", "1GiB", "b*"])
)
PLACES = st.sampled_from(sorted({path for path, _ in CASES}, key=str))
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=2),
        st.dictionaries(
            st.sampled_from(["mode", "path", "generate", "shape", "model", "kind", "time", "int8", "*"]),
            inner,
            max_size=2,
        ),
    ),
    max_leaves=4,
)


@settings(max_examples=300, suppress_health_check=[HealthCheck.too_slow])
@given(path=PLACES, value=VALUES)
def test_schema_and_parser_agree_on_anything(path: tuple[str | int, ...], value: Any) -> None:
    document = changed(path, value)
    _, problems = accepted(document)
    between = any(words in problems for words in SEMANTIC)
    if not between:
        compare(document)


@pytest.mark.parametrize("validator", [NEWEST, DRAFT7])
def test_the_schema_is_a_schema(validator: Any) -> None:
    validator.check_schema(validator.schema)


def test_draft_7_says_the_same_in_its_words() -> None:
    """A reference hides its neighbours there, and what depends on what has one name."""
    newest = {
        "$defs": {"size": [{"$ref": "#/$defs/size", "description": "d"}, {"$ref": "#/$defs/alone"}]},
        "dependentRequired": {"a": ["b"]},
        "dependentSchemas": {"c": {"$ref": "#/$defs/size", "minimum": 1}},
        "type": "object",
    }
    assert json.loads(json.dumps(newest), object_hook=_as_draft7) == {
        "definitions": {"size": [{"allOf": [{"$ref": "#/$defs/size"}], "description": "d"}, {"$ref": "#/$defs/alone"}]},
        "dependencies": {"a": ["b"], "c": {"allOf": [{"$ref": "#/$defs/size"}], "minimum": 1}},
        "type": "object",
    }
    assert _as_draft7({"type": "object"}) == {"type": "object"}


@pytest.mark.parametrize(("name", "draft7"), [("manifest.schema.json", False), ("manifest.draft7.schema.json", True)])
def test_the_published_file_is_what_the_code_says(name: str, draft7: bool) -> None:
    published = json.loads((CONFIGS / name).read_text())
    assert published == manifest_schema(draft7=draft7), f"write it again: farm schema > configs/{name}"


def test_the_examples_in_the_documentation_are_manifests() -> None:
    text = (CONFIGS.parent / "docs" / "manifest.md").read_text()
    whole, converted, sweep, debug, verify, gates, triggers = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    parse_manifest(whole, "docs/manifest.md")
    parse_manifest(whole.replace("    batches: [1, 8, 32]\n", f"    {sweep}"), "docs/manifest.md")
    parse_manifest(whole + debug, "docs/manifest.md")
    parse_manifest(whole + gates, "docs/manifest.md")
    parse_manifest(whole + triggers, "docs/manifest.md")
    parse_manifest(whole.replace("verify: {tolerance: {int8: 0.1}, weak: warn}\n", verify), "docs/manifest.md")
    added = whole.replace("models:\n", f"models:\n{converted}")
    parse_manifest(added, "docs/manifest.md")
    assert list(NEWEST.iter_errors(read_document(added, "x").data)) == []


@pytest.mark.parametrize("file", sorted((CONFIGS / "manifests").glob("*.yaml")), ids=lambda file: file.name)
def test_the_example_manifests_are_valid_and_name_the_schema(file: Path) -> None:
    text = file.read_text()
    document = read_document(text, "x").data
    assert list(NEWEST.iter_errors(document)) == []
    assert list(DRAFT7.iter_errors(document)) == []
    named = text.splitlines()[0].removeprefix("# yaml-language-server: $schema=")
    assert (file.parent / named).is_file()


def test_every_field_says_what_it_is_for() -> None:
    schema = manifest_schema()
    for entry in [schema, *schema["$defs"].values()]:
        for name, field in entry.get("properties", {}).items():
            assert field.get("description"), name


def test_no_pattern_counts_characters_of_a_class_with_most_of_unicode() -> None:
    patterns = re.findall(r'"pattern": ("(?:[^"\\]|\\.)*")', json.dumps(manifest_schema()))
    counted = [json.loads(text) for text in patterns if re.search(r"(\[\^[^\]]*\]|\.|\\\\[SWD])\{", text)]
    assert len(patterns) > 20 and counted == [], "pydantic copies such a class for each repeat: use max_length"
