"""The sidecar: what it must say, how it is read back, and the facts that are taken from it."""

from __future__ import annotations

import json
from typing import Any, get_type_hints

import jsonschema
import pytest

from farm.artifacts import sidecar as sidecars
from farm.artifacts.storage import blob_key
from farm.errors import UsageError
from farm.jobs.facts import ArtifactFacts
from farm.wire.program import Blobs

DIGEST = "ab" * 32


def make(**fields: Any) -> dict[str, Any]:
    return {
        "schema": 1,
        "key": "cd" * 32,
        "namespace": "main",
        "identifier": "resnet50/onnxruntime-cpu/fp32/b1",
        "spec": {"precision": "fp32"},
        "blobs": {"program": {"path": "program.onnx", "digest": DIGEST, "size": 3}},
        "toolchain": "onnxruntime1.31.1-1a2b3c4d",
        "device": {"arch": "cpu"},
        "created": "2026-11-21T00:00:00+00:00",
        **fields,
    }


FULL = make(
    device={"arch": "gfx942:sramecc+:xnack-", "compute_units": 304, "partition": "SPX", "clocks": {"sclk": 2100.0}},
    inputs=[{"name": "data", "dtype": "float32", "shape": [1, 3, 224, 224], "batch_axis": 0}],
    outputs=[{"name": "scores", "dtype": "float32", "shape": [1, 1000], "parameter": "main:#output_0"}],
    offload_copy=False,
    weight_dtypes=["float32"],
    compute_dtypes=["float16"],
    quantized={"Conv": 53},
    tuning={"mode": "quick", "operations": 53, "known": 3, "tuned": 50, "seconds": 61.5, "published": "tuned"}
    | {"conditions": [{"processes": {"count": 2, "memory": 500}}, {"processes": {"count": 0, "memory": 0}}]},
    verification={
        "reference": "onnxruntime",
        "samples": 8,
        "errors": {"scores": 1e-4},
        "rms": {"scores": 1e-5},
        "equal": {"classes": 1.0},
        "nonfinite": ["extra"],
        "spread": {"scores": 0.7},
        "weak": True,
    },
    measurements={
        "load": 0.5,
        "latency": {"median": 0.002, "p90": 0.0025, "p99": 0.003, "minimum": 0.0018, "repeats": 100},
        "throughput": 500.0,
        "baseline": {"median": 0.004},
        "ratio": 2.0,
        "shared": True,
        "conditions": [
            {"processes": {"count": 1, "memory": 900}},
            {"processes": None, "cpu": "EPYC 9654", "clocks": {"sclk": 2100}},
        ],
    },
    peak_memory=500_000_000,
    node="node-7",
    phases={"compiling": 12.5},
    seconds=20.0,
)


def facts_of(document: dict[str, Any]) -> ArtifactFacts:
    return sidecars.facts(sidecars.validate(document))


def test_the_facts_are_what_builds_judge_by() -> None:
    facts = facts_of(FULL)
    assert facts == {
        "key": "cd" * 32,
        "namespace": "main",
        "sidecar": f"ns/main/artifacts/cd/{'cd' * 32}.json",
        "program": {"path": "program.onnx", "digest": DIGEST, "size": 3},
        "toolchain": "onnxruntime1.31.1-1a2b3c4d",
        "device": "gfx942:sramecc+:xnack-",
        "driver": "",
        "verified": True,
        "unverified": "",
        "errors": {"scores": 1e-4},
        "rms": {"scores": 1e-5},
        "equal": {"classes": 1.0},
        "nonfinite": ["extra"],
        "spread": {"scores": 0.7},
        "weak": True,
        "doubted": {},
        "latency": 0.002,
        "p99": 0.003,
        "range": [0.0018, 0.0025],
        "card": "gfx942:sramecc+:xnack-",
        "cpu": "EPYC 9654",
        "clocks": {"sclk": 2100},
        "baseline_latency": 0.004,
        "ratio": 2.0,
        "against": None,
        "tuning": {
            "mode": "quick",
            "operations": 53,
            "known": 3,
            "tuned": 50,
            "untunable": 0,
            "seconds": 61.5,
            "saved": 0.0,
            "finished": True,
            "published": "tuned",
            "carried": None,
        },
        "load": 0.5,
        "shared": True,
        "fallback": {},
        "processes": {"count": 2, "memory": 500},
        "peak_memory": 500_000_000,
        "quantized": {"Conv": 53},
        "seconds": 20.0,
        "compile_seconds": 12.5,
        "throughput": 500.0,
        "node": "node-7",
        "work": None,
        "created": "2026-11-21T00:00:00+00:00",
        "runs_as": facts["runs_as"],
    }
    other = facts_of({**FULL, "toolchain": "onnxruntime1.99.0-1a2b3c4d"})
    assert facts["runs_as"] != other["runs_as"], "another runtime may run it faster"


def test_facts_of_a_program_that_was_neither_verified_nor_measured() -> None:
    """Nothing is made up for what was turned off."""
    facts = facts_of(make())
    assert facts["verified"] is False
    assert (facts["errors"], facts["latency"], facts["baseline_latency"], facts["load"]) == ({}, None, None, None)


@pytest.mark.parametrize(
    ("errors", "equal", "unverified", "verified"),
    [
        ({"y": 0.0}, {}, {"z": "it is a string"}, True),
        ({}, {"y": 1.0}, {"z": "it is a string"}, True),
        ({}, {}, {"z": "it is a string"}, False),
        ({}, {}, {}, True),
    ],
)
def test_a_program_is_verified_if_one_of_its_outputs_was_compared_or_none_was_left_out(
    errors: dict[str, float], equal: dict[str, float], unverified: dict[str, str], verified: bool
) -> None:
    verification = {**FULL["verification"], "errors": errors, "equal": equal, "unverified": unverified}
    facts = facts_of(make(verification=verification))
    assert (facts["verified"], bool(facts["unverified"])) == (verified, bool(unverified))


def test_the_facts_say_what_durations_are_compared_by() -> None:
    spec = {
        "model": {"digest": DIGEST},
        "compiler": {"name": "migraphx"},
        "device": {"arch": "gfx942"},
        "precision": "fp16",
        "tuning": {"mode": "off"},
    }
    work = facts_of(make(spec=spec, model_size=1000))["work"]
    assert work == {"like": "migraphx-gfx942.fp16.off", "model": DIGEST[:12], "size": 1000}
    assert facts_of(make(spec=spec, model_size=0))["work"] is None
    for name in spec:
        less = {other: value for other, value in spec.items() if other != name}
        assert facts_of(make(spec=less, model_size=1000))["work"] is None, name


@pytest.mark.parametrize("document", [make(), FULL], ids=["least", "full"])
def test_it_is_read_back_as_it_was_written(document: dict[str, Any]) -> None:
    sidecar = sidecars.validate(document)
    assert sidecars.read(sidecars.text(sidecar)) == sidecar
    assert sidecar == json.loads(sidecars.text(sidecar))
    assert sidecars.text(sidecar).startswith(b'{\n "schema": 1,\n'), "a line for each field, for people"


def test_fields_of_a_newer_farm_are_kept() -> None:
    sidecar = sidecars.validate(
        make(colour="red", blobs={**make()["blobs"], "trace": {"path": "t", "digest": DIGEST, "size": 1}})
    )
    again = json.loads(sidecars.text(sidecar))
    assert again["colour"] == "red"
    assert again["blobs"]["trace"]["size"] == 1


@pytest.mark.parametrize("figure", [float("inf"), float("nan")])
def test_an_error_that_is_not_finite_is_refused(figure: float) -> None:
    """JSON has no infinity, and a missing error would look like a good one: the child answers the largest number."""
    with pytest.raises(UsageError, match="finite"):
        sidecars.validate(make(verification={"errors": {"y": figure}}))
    with pytest.raises(ValueError, match="expected value"):
        sidecars.read(json.dumps(make(spec={**make()["spec"], "device": {"arch": figure}})).encode())


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b"\xff\xfe",
        json.dumps(make(schema=2)).encode(),
        json.dumps({name: value for name, value in make().items() if name != "blobs"}).encode(),
        json.dumps(make(key="AB" * 32)).encode(),
        json.dumps(make(blobs={"program": {"path": "p", "digest": DIGEST, "size": -1}})).encode(),
        json.dumps(make()).encode()[:-1],
    ],
)
def test_what_is_not_a_sidecar_is_a_value_error(data: bytes) -> None:
    with pytest.raises(ValueError):
        sidecars.read(data)


def test_every_wrong_field_is_named_before_publishing() -> None:
    with pytest.raises(UsageError) as error:
        sidecars.validate(make(key="short", peak_memory="much", device={}))
    for name in ("key", "peak_memory", "device.arch"):
        assert name in str(error.value)


def test_the_kernel_cache_alone_is_optional() -> None:
    blobs = {name: {"path": name, "digest": DIGEST, "size": 1} for name in get_type_hints(Blobs)}
    required = {blob["path"] for blob in sidecars.required(sidecars.validate(make(blobs=blobs))["blobs"])}
    assert required == set(blobs) - {"kernel_cache"}


def test_the_published_schema_is_valid_and_agrees_with_the_reader() -> None:
    schema = sidecars.schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(schema)
    validator.validate(json.loads(sidecars.text(sidecars.validate(FULL))))
    for wrong in (make(schema=2), make(key="short"), make(device={})):
        assert not validator.is_valid(wrong)


@pytest.mark.parametrize(
    ("outputs", "errors", "said"),
    [
        ({}, {"z": 0.0}, ""),
        ({"x": "too large"}, {}, "not verified: too large"),
        ({"x": "too large"}, {"z": 0.0}, "output `x` was not verified: too large"),
        ({"x": "too large", "y": "no"}, {"z": 0.0}, "output `x` and 1 more were not verified: too large"),
        ({"x": "a", "y": "b", "w": "c"}, {"z": 0.0}, "output `x` and 2 more were not verified: a"),
    ],
)
def test_what_was_compared_with_nothing_is_said(outputs: dict[str, str], errors: dict[str, float], said: str) -> None:
    found = sidecars.Verification(unverified=outputs, errors=errors)
    assert sidecars.unverified_of(found) == said
    equal = sidecars.Verification(unverified=outputs, equal=dict.fromkeys(errors, 1.0))
    assert sidecars.unverified_of(equal) == said


@pytest.mark.parametrize("digest", ["ab" * 31, "AB" * 32, "ab" * 31 + "./", "ab" * 33, ""])
def test_what_is_not_a_digest_names_no_blob(digest: str) -> None:
    """It comes from manifests and requests, and would name any object."""
    with pytest.raises(ValueError, match="is not a SHA-256"):
        blob_key(digest)
    assert blob_key(DIGEST) == f"blobs/sha256/ab/{DIGEST}"
