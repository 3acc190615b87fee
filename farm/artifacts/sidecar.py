"""The sidecar: the document that makes a compiled program an artifact. Published as JSON Schema (`schema()`).

Fields that a compiler or a device does not offer are null or empty, never made up. Readers ignore fields they
do not know, so a newer farm may add some; a change of meaning is a new schema number.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic_core import from_json

from farm.artifacts.storage import sidecar_key
from farm.errors import UsageError
from farm.jobs.facts import ArtifactFacts, ComparableWork, TuningSummary
from farm.jobs.state import Phase
from farm.runner.documents import Evidence, Verification
from farm.runner.onnxruntime_sessions import device_of, environment_of, providers_of
from farm.spec import FileReference, JsonSchema, comparable, digest_of, program_extension, program_name
from farm.units import view_of
from farm.wire.program import Blobs, Conditions, Measurements, Sidecar

_READER = TypeAdapter(list[Sidecar], config=ConfigDict(extra="allow", allow_inf_nan=False))
"""In a list, since a TypedDict takes no configuration from outside."""
_NONE = TypeAdapter(Verification).validate_python({})  # Of a sidecar without one: every field has its default.


def of_cell(sidecar: Sidecar, identifier: str) -> Sidecar:
    """Return it with the names of a cell that shares the program: the stored ones are those of the first cell."""
    program = sidecar["blobs"]["program"]
    path = program_name(identifier, program_extension(program["path"], sidecar["identifier"]))
    blobs: Blobs = {**sidecar["blobs"], "program": {**program, "path": path}}
    return {**sidecar, "identifier": identifier, "blobs": blobs}


def read(data: bytes) -> Sidecar:
    """Parse a sidecar. Raises ValueError for one that is cut or not valid: its artifact is broken."""
    return _checked(from_json(data, allow_inf_nan=False))


def validate(document: Mapping[str, Any]) -> Sidecar:
    """Check a sidecar before it is published. Raises UsageError that names every wrong field."""
    try:
        return _checked(document)
    except ValueError as error:
        raise UsageError(f"not a valid sidecar: {error}") from None


def _checked(document: object) -> Sidecar:
    try:
        found = _READER.validate_python([document])[0]
    except ValidationError as error:
        fields = (f"{'.'.join(map(str, each['loc'][1:])) or 'sidecar'}: {each['msg']}" for each in error.errors())
        raise ValueError("; ".join(fields)) from None
    path = found["blobs"]["program"]["path"]
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", path):
        raise ValueError(f"blobs.program.path: {path!r} is not the name of a program")
    return found


def text(sidecar: Sidecar) -> bytes:
    """Return a sidecar as the JSON that is stored; indented, since people read it with `aws s3 cp … -`."""
    return json.dumps(sidecar, indent=1, ensure_ascii=False).encode() + b"\n"


def schema() -> JsonSchema:
    """Return the sidecar's JSON Schema (draft 2020-12)."""
    published = json.dumps(TypeAdapter(Sidecar).json_schema()).replace("TuningFacts", "Tuning")
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **json.loads(published),
        "title": "Artifact sidecar of the MIGraphX compile farm",
    }


def required(blobs: Blobs) -> list[FileReference]:
    """Return the blobs without which the artifact is broken."""
    named = [blobs["program"], blobs["log"], blobs["reproduction"], blobs["sample"], blobs["before"], blobs["after"]]
    return [blob for blob in named if blob]


def unverified_of(verification: Verification) -> str:
    """Say which outputs of a program were compared with nothing, and why; empty if all were compared."""
    names = list(verification.get("unverified", ()))
    if not names:
        return ""
    why = verification["unverified"][names[0]]
    if not verification.get("errors") and not verification.get("equal"):
        return f"not verified: {why}"
    more = f" and {len(names) - 1} more were" if len(names) > 1 else " was"
    return f"output `{names[0]}`{more} not verified: {why}"


def _work(sidecar: Sidecar) -> ComparableWork | None:
    """Return what other compiles estimate their durations by; None if the sidecar says too little."""
    spec = sidecar["spec"]
    if not sidecar["model_size"] or not {"model", "compiler", "device", "precision", "tuning"} <= spec.keys():
        return None
    return {"like": comparable(spec), "model": spec["model"]["digest"][:12], "size": sidecar["model_size"]}


def _runs_as(sidecar: Sidecar) -> str:
    """Return the digest of all that decides how a program runs."""
    parts = {name: sidecar["spec"].get(name) for name in ("device", "inputs", "batch", "options", "env")}
    made = {
        "program": sidecar["blobs"]["program"]["digest"],
        "toolchain": sidecar["toolchain"],
        "session": sidecar["tuning"]["session"],
    }
    return digest_of({**parts, **made})


def facts(sidecar: Sidecar) -> ArtifactFacts:
    """Return the small extract of a checked sidecar that the store, the index and reports keep; builds judge by it."""
    verification = sidecar["verification"] or _NONE
    unverified = unverified_of(verification)
    measured = sidecar["measurements"]
    last: Conditions = measured["conditions"][-1] if measured["conditions"] else {}
    looks = [*sidecar["tuning"]["conditions"], *measured["conditions"]]
    others = [processes for look in looks if (processes := look["processes"])]
    fallback = sidecar["placement"]["fallback"] if sidecar["placement"] else {}
    latency, baseline = measured["latency"], measured["baseline"]
    known = {
        # Views: what somebody has added to a sidecar becomes no fact, whatever its name is.
        **view_of(Sidecar, sidecar),
        **view_of(Measurements, measured),
        **view_of(Evidence, verification),
        "sidecar": sidecar_key(sidecar["namespace"], sidecar["key"]),
        "program": view_of(FileReference, sidecar["blobs"]["program"]),
        "device": sidecar["device"]["arch"],
        "driver": sidecar["device"]["driver"] or "",
        "verified": sidecar["verification"] is not None
        and bool(not unverified or verification["errors"] or verification["equal"]),
        "unverified": unverified,
        "latency": latency["median"] if latency else None,
        "p99": latency["p99"] if latency else None,
        "range": [latency["minimum"], latency["p90"]] if latency else [],
        "card": sidecar["device"]["model"] or sidecar["device"]["arch"],
        "cpu": last.get("cpu", ""),
        "clocks": last.get("clocks", {}),
        "baseline_latency": baseline["median"] if baseline else None,
        "runs_as": _runs_as(sidecar),
        "tuning": view_of(TuningSummary, sidecar["tuning"]) if sidecar["tuning"]["mode"] != "off" else None,
        "compile_seconds": sidecar["phases"].get(Phase.COMPILING),
        "processes": max(others, key=lambda each: (each["count"], each["memory"]), default=None),
        "fallback": {operator: [*names[:3]] for operator, names in fallback.items()},
        "work": _work(sidecar),
    }
    return view_of(ArtifactFacts, known)


class Serving(NamedTuple):
    """What a session is made with."""

    providers: list[tuple[str, dict[str, str]]]
    """In order, with their options. Without them a program in fp32 computes in TF32 on NVIDIA's cards."""
    environment: dict[str, str]
    """Of the whole process, before its first session."""
    level: str
    """Of the graph's optimisation: `basic`, `extended`, `all`."""
    threads: int | None
    spinning: bool | None


_LEVELS = ("basic", "extended", "all")
_OPTION = re.compile("[A-Za-z0-9]{1,32}")


def serving_of(sidecar: Sidecar) -> Serving:
    """Return how to run a program of ONNX Runtime's.

    Raises UsageError for an option that no manifest can have: scripts are made of it.
    """
    found: Mapping[str, Any] = sidecar["tuning"]["session"] or {}
    precision, options = sidecar["spec"].get("precision", ""), sidecar["spec"].get("options", {})
    device = device_of(sidecar["device"]["arch"], sidecar["toolchain"])
    level = str(found.get("level") or ("basic" if device == "tensorrt" else "all"))
    providers = providers_of(device, precision, options, found)
    for name, value in [("level", level), *(each for _, chosen in providers for each in chosen.items())]:
        if not (value in _LEVELS if name == "level" else _OPTION.fullmatch(value)):
            raise UsageError(f"{sidecar['identifier']} sets {name} to {value!r}, which no farm does")
    return Serving(
        providers,
        environment_of(device, precision),
        level,
        int(found["threads"]) if found.get("threads") else None,
        bool(found["spinning"]) if found.get("spinning") is not None else None,
    )
