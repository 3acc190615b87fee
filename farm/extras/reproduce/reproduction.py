"""Reproduction: writes one attempt as a folder that anybody can run, without the farm, Redis or S3.

The folder has the attempt's inputs, spec and work order, and a copy of the modules of the farm that run it. They need
the standard library, numpy and the compiler. Inside it, `sh run.sh` runs the same children with the same checks, and
computes the cache key from `spec.json`.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from fnmatch import fnmatchcase
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TextIO

import typing_extensions

from farm import entry_points
from farm.compiling.asking import after_a_crash
from farm.compiling.attempt import Slot
from farm.compiling.pipeline import Children, InputFiles, Pipeline, StepEnded, Steps, StepSettings
from farm.errors import UsageError
from farm.files import hash_file
from farm.inert import inert, inert_json
from farm.jobs.state import AttemptLimits, Phase, WorkOrder
from farm.spec import FileReference, cache_key
from farm.targets.compilers import Compiler, child_modules, compilers

Document = dict[str, Any]
Bring = Callable[[FileReference, Path], object]
"""Writes the blob that a file reference (`{"path", "digest", "size"}`) names to a path."""

_GIVEN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:+-]{0,999}")

MODULES = (
    "__init__.py", "compiling", "entry_points.py", "errors.py", "extras/__init__.py", "extras/reproduce", "files.py",
    "inert.py", "jobs", "runner", "spec.py",
    "targets/__init__.py", "targets/compilers.py", "targets/environment.py", "wire/__init__.py", "wire/program.py",
)  # fmt: skip
"""What a folder gets of the farm: these import one another, the standard library and `typing_extensions`, one file."""


# --- writing a folder -------------------------------------------------------------------------------------------


def write(document: Mapping[str, Any], folder: Path, machine: object, bring: Bring) -> None:
    """Write the folder that reruns an attempt; `machine`, the farm's settings, has the defaults for reruns.

    Raises OSError, UsageError for a folder that has other content, ValueError for a file that would lie outside it or a
    name that no farm gives, and what `bring` raises.
    """
    if folder.is_dir() and any(folder.iterdir()):
        raise UsageError(f"{folder} is not empty", hint="choose another folder")
    order = document["order"]
    for named in (order["identifier"], document["key"], document["farm"]):
        if not _GIVEN.fullmatch(str(named)):  # It is in a file for people, who copy from it.
            raise ValueError(f"the work order has a name {named!r}, which no farm gives")
    for _, file, place in _inputs(document, folder / "inputs"):
        place.parent.mkdir(parents=True, exist_ok=True)
        bring(file, place)
    _put(folder / "spec.json", order["spec"])
    rest = {name: value for name, value in order.items() if name != "spec"}
    _put(folder / "reproduction.json", {**document, "order": rest})
    # Its lock files stay out: the attempt's node may be another machine.
    kept = {name: value for name, value in asdict(StepSettings.of(machine)).items() if name != "lock_dir"}
    _put(folder / "machine.json", kept)
    source = Path(__file__).parents[2]
    for name in MODULES:
        target = folder / "farm" / name
        if (source / name).is_dir():
            shutil.copytree(source / name, target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source / name, target)
    shutil.copyfile(typing_extensions.__file__, folder / "typing_extensions.py")
    _put_extensions(str(order["target"]), folder)
    texts = Path(__file__).with_name("texts")
    shutil.copyfile(texts / "run.sh", folder / "run.sh")
    (folder / "run.sh").chmod(0o755)
    about = (texts / "README.md").read_text()
    about = about.format(identifier=order["identifier"], key=document["key"], farm=document["farm"])
    (folder / "README.md").write_text(about)


def _put_extensions(target: str, folder: Path) -> None:
    """Copy what extensions have for a target: their data and modules, with the packages around them empty."""
    compiler, _, device = target.partition("/")
    lines = []
    for entry, found in entry_points.load(entry_points.COMPILERS):
        devices = {found.name: found.devices} if isinstance(found, Compiler) else found
        kinds = [kind for kind in devices.get(compiler, ()) if fnmatchcase(device, kind.pattern)]
        if not kinds:
            continue
        lines.append(f"{entry.name} = {entry.value}")
        _copy_module(entry.module, folder)
        for kind in kinds:
            package = kind.module.rpartition(".")[0]
            for path in Path(child_modules()[f"{compiler}/{kind.pattern}"][1]).glob("*.py"):
                _copy_module(f"{package}.{path.stem}", folder)
    if lines:
        # The copies are found as installed packages are.
        info = folder / "extensions-1.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: extensions\nVersion: 1\n")
        (info / "entry_points.txt").write_text("\n".join([f"[{entry_points.COMPILERS}]", *lines, ""]))


def _copy_module(name: str, folder: Path) -> None:
    """Copy a module to its place in the folder; packages around it get an empty file."""
    spec = find_spec(name.removesuffix(".__init__"))
    target = folder.joinpath(*name.split(".")).with_suffix(".py")
    target.parent.mkdir(parents=True, exist_ok=True)
    for around in target.relative_to(folder).parents:
        if around.name:
            (folder / around / "__init__.py").touch()
    if spec and spec.origin:
        shutil.copyfile(spec.origin, target)


def _inputs(document: Mapping[str, Any], inputs: Path) -> Iterator[tuple[str, FileReference, Path]]:
    """Yield the files that an attempt takes with their places under `inputs`, and what each is.

    That is `model` (its own file first), `calibration`, `samples`, `reference`, or the variable that names it.
    """
    order = document["order"]
    files = [("model", file, inputs / "model") for file in order["model"]["files"]]
    files += [(name, file, inputs / "env") for name, file in order.get("env", {}).items()]
    for use, file, within in files:
        place = within / file["path"]
        if not place.resolve().is_relative_to(within.resolve()):
            raise ValueError(f"{file['path']!r} leaves its folder")
        yield use, file, place
    data = {**{name: order.get(name) for name in ("calibration", "samples")}, "reference": document.get("reference")}
    for use, file in data.items():
        if file:
            yield use, file, inputs / f"{use}.npz"


def _put(path: Path, document: Any) -> None:
    path.write_text(json.dumps(document, indent=1) + "\n")


# --- running it -------------------------------------------------------------------------------------------------


class WrongInput(Exception):
    """An input is not the one that the attempt had."""


class WrongPython(Exception):
    """The interpreter has not what the attempt needs."""


def rerun(folder: Path, machine: StepSettings, *, gpu: str = "", unlimited: bool = False) -> Document:
    """Run the attempt again, in `folder`/work, and return how it ended.

    The answer has `key` (of `spec.json`), `expected_key`, `toolchain` (of the compiler here), `ended` (`{"kind",
    "message", "detail"}`, None for a success), `program` and `record` (its sidecar's fields).

    Raises WrongInput, WrongPython, OSError.
    """
    if missing := [name for name in ("numpy", "onnx") if find_spec(name) is None]:
        raise WrongPython(f"{sys.executable} has no {' and no '.join(missing)}: pip install {' '.join(missing)}")
    document = json.loads((folder / "reproduction.json").read_text())
    spec = json.loads((folder / "spec.json").read_text())
    order: WorkOrder = document["order"] | {"spec": spec}
    work = folder / "work"
    shutil.rmtree(work, ignore_errors=True)
    places: dict[str, Path] = {}
    for use, place in _placed(document, folder / "inputs", work / "inputs"):
        places.setdefault(use, place)
    limits = document.get("limits") or AttemptLimits(time=0.0, memory=0)
    compiler, _, device = str(order["target"]).partition("/")
    maker = compilers()[compiler].device(device).maker
    children = Children(
        work,
        machine,
        AttemptLimits(time=0.0, memory=0) if unlimited else limits,
        _say_phase,
        threading.Event(),
        Slot(gpu or "0", maker=maker) if maker else Slot(gpu),
        after_a_crash(document.get("previous", ())),
    )
    steps = Steps(order, children)
    steps.env_files = {name: str(places[name]) for name in order.get("env", {})}
    found = {
        "key": cache_key(spec),
        "expected_key": document["key"],
        "toolchain": "",
        "expected_toolchain": spec["toolchain"],
        "ended": None,
        "program": None,
        "record": None,
    }
    try:
        here = children.ask({"action": "probe", "compiler": compiler, "device": device})
        if not here["available"]:
            raise WrongPython(f"{here['reason']}; the attempt had {spec['toolchain']}")
        found["toolchain"] = here["toolchain"]
        data = (places.get(name) for name in ("calibration", "samples", "reference"))
        record = Pipeline(steps, InputFiles(places["model"], *data)).run()
        found |= {"program": str(steps.program), "record": record}
    except StepEnded as ended:
        failure = ended.failure
        found["ended"] = failure._asdict() if failure else {"kind": "cancelled", "message": "", "detail": ""}
    _put(work / "result.json", found)
    return found


def _placed(document: Mapping[str, Any], inputs: Path, copies: Path) -> Iterator[tuple[str, Path]]:
    """Copy the inputs, so that a compiler cannot change them; yield the use and the path of each."""
    for (use, file, place), (_, _, copy) in zip(_inputs(document, inputs), _inputs(document, copies), strict=True):
        if use == "reference" and not place.exists():
            continue
        digest, _ = hash_file(place)
        if digest != file["digest"]:
            raise WrongInput(f"{place} has SHA-256 {digest}, the attempt's had {file['digest']}")
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(place, copy)
        yield use, copy


def _say_phase(phase: Phase, progress: float | None, detail: str) -> None:
    if progress is None:
        print_inert(f"{phase}{f': {detail}' if detail else ''}", file=sys.stderr)


def print_inert(text: str, file: TextIO | None = None) -> None:
    """Print text that compilers and models had a hand in."""
    print(inert(text), file=file, flush=True)


def report(document: Mapping[str, Any], found: Mapping[str, Any]) -> list[str]:
    """Return the result of a rerun next to the farm's own, as lines for people."""
    same = "the job's" if found["key"] == found["expected_key"] else f"not the job's, which is {found['expected_key']}"
    lines = [f"key        {found['key']}, {same}"]
    here = found["toolchain"] or "none"
    known = "the job's" if here == found["expected_toolchain"] else f"the job's was {found['expected_toolchain']}"
    lines.append(f"toolchain  {here}, {known}")
    if before := document.get("ended"):
        lines.append(f"the farm   {before['kind']}: {before['message']}")
    if found["ended"]:
        lines.append(f"here       {found['ended']['kind']}: {found['ended']['message']}")
        return lines
    record = found["record"]
    errors = (record["verification"] or {}).get("errors", {})
    lines.append(f"here       compiled, loaded and measured: {found['program']}")
    lines += [f"error      {name}: {error:.2e}" for name, error in errors.items()]
    unverified = (record["verification"] or {}).get("unverified", {})
    lines += [f"unverified {name}: {why}" for name, why in unverified.items()]
    if latency := record["measurements"].get("latency"):
        lines.append(f"latency    {latency['median'] * 1e3:.3g} ms{' shared' * record['measurements']['shared']}")
    lines.append("gates      not judged here: a build compares these numbers with its tolerance, limits and budgets")
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    """Rerun the attempt of the folder that this copy of the module lies in; return the exit code."""
    folder = Path(__file__).resolve().parents[3]
    document = json.loads((folder / "reproduction.json").read_text())
    machine = StepSettings(**json.loads((folder / "machine.json").read_text()))
    parser = argparse.ArgumentParser(prog="run.sh", description="Rerun one attempt, without the farm.")
    parser.add_argument("--gpu", default="", help="index or UUID of the GPU (0)")
    parser.add_argument("--threads", type=int, default=machine.threads_per_slot, help="(%(default)s)")
    parser.add_argument("--migraphx-path", default=machine.migraphx_path, help="its module's folder (%(default)s)")
    parser.add_argument("--migraphx-python", default=machine.migraphx_python, help="interpreter for it (%(default)s)")
    parser.add_argument("--unlimited", action="store_true", help="without the attempt's limits of time and memory")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    given = parser.parse_args(arguments)
    machine = replace(
        machine,
        threads_per_slot=given.threads,
        migraphx_path=given.migraphx_path,
        migraphx_python=given.migraphx_python,
    )
    try:
        found = rerun(folder, machine, gpu=given.gpu, unlimited=given.unlimited)
    except (WrongInput, WrongPython, OSError) as error:
        print_inert(f"error: {error}", file=sys.stderr)
        if isinstance(error, WrongPython):
            print_inert("  or name another interpreter: PYTHON=/path/to/python sh run.sh", file=sys.stderr)
        return 2
    if given.json:
        print(inert_json(json.dumps(found, indent=1)))  # noqa: T201
    else:
        print_inert("\n".join(report(document, found)))
    return 1 if found["ended"] else 0


if __name__ == "__main__":
    sys.exit(main())
