"""One attempt in this process, from a claimed job to its artifact or its end; the compiler is ONNX Runtime."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from farm.app import Farm
from farm.artifacts.storage import reference_key
from farm.client.fetching import place_kernels
from farm.compiling.asking import reference_recipe
from farm.compiling.attempt import ANYWHERE, Attempt, Slot
from farm.compiling.child_process import run_child
from farm.compiling.failures import ChildEnd
from farm.compiling.pipeline import Steps
from farm.errors import UsageError
from farm.files import remove_tree
from farm.jobs.state import AttemptEnd, FailureKind, Outcome
from farm.runner import actions, samples
from farm.runner.launcher import Messages
from farm.runner.protocol import CannotRun, RequestFailed
from farm.spec import digest_of
from farm.tuning.database import databases
from farm.tuning.tuner import Tuner
from tests.support.api_farm import MANIFEST, POOL, freeze_manifest
from tests.support.places import TESTS
from tests.support.warm import AlwaysWarm
from tests.support.working import at_work_in


def run(
    farm: Farm,
    folder: Path,
    slot: Slot = ANYWHERE,
    *,
    tuning: str = "off",
    previous: tuple[str, ...] = (),
    options: str = "",
    toolchain: str = POOL.toolchain,
    **tuned: int,
) -> Outcome:
    """Submit one cell of a model with a batch, and run an attempt after those that failed in the `previous` ways.

    `tuned` is added to its spec's `tuning`; `toolchain` is the one that its key names.
    """
    text = MANIFEST + "    precisions: [fp32]\n    inputs: {x: {shape: [batch, 4]}}\n    batches: [2]\n"
    text += f"    tuning: {{mode: {tuning}}}\n" + (f"    options: {options}\n" if options else "")
    frozen = freeze_manifest(folder, text, batch="N")
    for path in frozen.files.values():
        farm.artifacts.put_blob_file(path)
    farm.builds.submit("main", frozen.submission, by="test")
    ((job_id, number),) = farm.store.jobs.hand_out(POOL.name, 1)
    claim = farm.store.jobs.claim(job_id, number, nonce="n", worker="w1", node="n1")
    claim.order["spec"]["tuning"] |= tuned
    claim.order["spec"]["toolchain"] = toolchain
    named = (claim.token, claim.order, claim.limits, claim.namespace, claim.key)
    attempt = Attempt(job_id, number, *named, slot=slot, previous=previous)
    return farm.executor.execute(attempt, on_phase=lambda *_: None, cancelled=threading.Event())


def test_the_sidecar_says_on_which_axis_samples_stack_and_what_the_device_is(farm: Farm, tmp_path: Path) -> None:
    card = {"model": "AMD Instinct MI300X", "partition": "SPX", "memory": 192 << 30, "driver": None}
    outcome = run(farm, tmp_path, Slot(device=card))
    assert outcome.end is AttemptEnd.SUCCEEDED, outcome.message
    found = farm.artifacts.get_object(outcome.facts["sidecar"])
    assert found
    sidecar: dict[str, Any] = json.loads(found.data)
    assert [(port["name"], port["shape"], port["batch_axis"]) for port in sidecar["inputs"]] == [("x", [2, 4], 0)]
    assert sidecar["device"] == {"arch": "cpu", "compute_units": None, **card}


@pytest.mark.parametrize(("tuned", "mode"), [({}, "quick"), ({"miopen_find_enforce": 1}, "quick-enforce1")])
def test_an_enforcement_tunes_into_a_database_of_its_own(
    farm: Farm, tmp_path: Path, tuned: dict[str, int], mode: str
) -> None:
    """ONNX Runtime stands for MIGraphX, whose enforcement it does not know."""
    outcome = run(farm, tmp_path, tuning="quick", **tuned)
    assert outcome.end is AttemptEnd.SUCCEEDED, outcome.message
    (database,) = databases(farm.artifacts, ["main"])
    assert (database.pool, database.mode) == (POOL.name, mode)
    assert database.read().snapshot.log.total().sessions == 1


@pytest.mark.parametrize("tuning", ["off", "quick"])
def test_a_toolchain_that_was_upgraded_in_place_publishes_nothing_under_the_old_key(
    farm: Farm, tmp_path: Path, tuning: str
) -> None:
    outcome = run(farm, tmp_path, tuning=tuning, toolchain="onnxruntime1.0.0-00000000")
    assert outcome.kind is FailureKind.TOOLCHAIN_MISMATCH, outcome.message
    assert f"toolchain {POOL.toolchain}, not onnxruntime1.0.0-00000000" in outcome.message
    assert not list(farm.artifacts.list_objects("ns/main/artifacts/"))


@pytest.mark.parametrize(("options", "threads"), [("", 1), ("{threads: 3}", 3)])
def test_a_tuned_program_has_the_threads_of_its_spec_whatever_the_slot_has(
    farm: Farm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: str, threads: int
) -> None:
    """Else the same key would be another program on each worker."""
    given: dict[str, set[int]] = {}

    def noted(request: Mapping[str, Any], **options: Any) -> ChildEnd:
        given.setdefault(request["action"], set()).add(request["threads"])
        return run_child(request, **options)

    monkeypatch.setattr("farm.compiling.pipeline.run_child", noted)
    monkeypatch.setattr(type(farm.settings), "threads_per_slot", 2)
    outcome = run(farm, tmp_path, tuning="quick", options=options)
    assert outcome.end is AttemptEnd.SUCCEEDED, outcome.message
    compiling = {action: given[action] for action in ("compile", "evaluate", "bench")}
    assert compiling == {"compile": {threads}, "evaluate": {threads}, "bench": {threads}}
    assert given["reference"] == {2}


@pytest.mark.parametrize(
    ("previous", "threads", "cold"), [(("hang",), None, ("team-*",)), (("compiler_crash", "storage"), "1", ("ma*",))]
)
def test_after_a_crash_every_child_compiles_without_threads(
    farm: Farm,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    previous: tuple[str, ...],
    threads: str | None,
    cold: tuple[str, ...],
) -> None:
    """Then what MIGraphX aborts on in a compile thread is an error that says why. Its namespace says if it is warm."""
    given: list[str | None] = []
    warm = AlwaysWarm()

    def noted(request: Mapping[str, Any], **options: Any) -> ChildEnd:
        given.append(options["environment"].get("MIGRAPHX_GPU_COMPILE_PARALLEL"))
        return run_child(request, **options)

    monkeypatch.setattr("farm.compiling.pipeline.run_child", noted)
    monkeypatch.setattr(farm.executor, "templates", warm)
    monkeypatch.setattr(farm.executor, "settings", farm.settings.model_copy(update={"cold_children": cold}))
    assert run(farm, tmp_path, previous=previous).end is AttemptEnd.SUCCEEDED
    assert set(given) == {threads}
    assert len(warm.warm) == (0 if threads else len(given))
    warm.close()


def test_a_child_that_answers_with_names_of_its_own_fills_neither_store_nor_storage(
    farm: Farm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The child that measures has been taken over by the program that it loaded."""
    compared = {"errors": {}, "rms": {}, "equal": {}, "nonfinite": [], "spread": {"y": 1.0}, "weak": False}
    verification = {**compared, "samples": 8, "runs": 1, "origin": {}, "unverified": {}}
    says = {"verification": verification, "measurements": {"load": 0.1, "latency": {"median": 0.1}}}

    def taken_over(request: Mapping[str, Any], **options: Any) -> ChildEnd:
        if request["action"] != "evaluate":
            return run_child(request, **options)
        hostile = {"do": "say", "says": says, "fill": ["verification", "errors"], "count": 500}
        return run_child({**request, **hostile}, script=TESTS / "support" / "hostile_child.py", **options)

    monkeypatch.setattr("farm.compiling.pipeline.run_child", taken_over)
    outcome = run(farm, tmp_path)
    assert outcome.kind is FailureKind.COMPILER_ERROR, outcome
    assert "an output that the model does not have" in outcome.message
    assert len(str(outcome)) < 10_000
    assert not list(farm.artifacts.list_objects("ns/main/artifacts/"))


def test_kernel_binaries_are_published_with_the_program_and_come_back(
    farm: Farm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ONNX Runtime stands for MIGraphX, and leaves what MIOpen would; both first runs are reported."""

    def kernels(tuner: Tuner) -> list[Path]:
        folder = tuner.proof / "kernels"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "gfx942130.ukdb").write_bytes(b"kernels")
        return [folder / "gfx942130.ukdb"]

    prove = Tuner.prove
    monkeypatch.setattr(Tuner, "kernels", kernels)
    # Whichever program is faster: only the tuned one has kernels of its own.
    monkeypatch.setattr(Tuner, "prove", lambda *given: prove(*given) or True)
    outcome = run(farm, tmp_path, tuning="quick")
    assert outcome.end is AttemptEnd.SUCCEEDED, outcome.message
    found = farm.artifacts.get_object(outcome.facts["sidecar"])
    assert found
    sidecar = json.loads(found.data)
    assert min(sidecar["measurements"][f"first_run_{how}"] for how in ("cold", "warm")) > 0

    placed = tmp_path / "out"
    place_kernels(
        lambda blob, place: farm.artifacts.get_blob(blob["digest"], place), sidecar["blobs"]["kernel_cache"], placed
    )
    assert [(path.name, path.read_bytes()) for path in placed.iterdir()] == [("gfx942130.ukdb", b"kernels")]


@pytest.mark.parametrize("killed", [False, True])
def test_an_attempt_of_another_worker_process_makes_a_measurement_on_a_gpu_shared(
    farm: Farm, tmp_path: Path, killed: bool
) -> None:
    """Each kind of slot of a node has a process of its own; what a killed one left behind does not count.

    Programs of CPUs are measured while the others pause: `tests/runner/test_measured_alone.py`.
    """
    assert farm.executor
    other = at_work_in(farm.settings.data_dir / "work")
    try:
        if killed:
            other.kill()
            os.waitid(os.P_PID, other.pid, os.WEXITED | os.WNOWAIT)
        outcome = run(farm, tmp_path, Slot(gpu="0"))
        found = farm.artifacts.get_object(outcome.facts["sidecar"])
        assert found
        assert json.loads(found.data)["measurements"]["shared"] is not killed
    finally:
        other.kill()
        other.wait()


class OnDevice:
    """A program of offload_copy false on a GPU, which is not here: runs need no copies once its inputs are there."""

    outputs = ("y",)

    def prepare(self, feeds: Any) -> Any:
        return feeds

    def run(self, prepared: Any) -> list[Any]:
        return [prepared["x"]]

    def run_on_device(self, prepared: Any) -> Callable[[], None]:
        return lambda: None


def test_runs_without_host_copies_are_distinguished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    x = np.ones((1, 4), np.float32)
    meta = {"points": [{"batch": 1, "runs": 2, "samples": 2}], "minimum": 2, "origin": {"y": "expected"}}
    samples.save_runs(str(tmp_path / "runs.npz"), [{"x": x}, {"x": 2 * x}], [{"y": x}, {"y": 2 * x}], meta)
    monkeypatch.setattr(actions, "compiler_module", lambda request: SimpleNamespace(load=lambda request: OnDevice()))
    request = {"action": "evaluate", "device": "gfx942", "reference": str(tmp_path / "runs.npz")}
    messages = Messages(os.open(os.devnull, os.O_WRONLY))
    answer = actions.run_action({**request, "tolerance": 0.1, "equal": 1.0, "measure_seconds": 0.01}, messages)
    measured = answer["measurements"]
    assert measured["latency"]
    assert measured["device_latency"]
    assert measured["device_latency"]["repeats"] > 1


class Unfed(OnDevice):
    """A program that cannot be given its inputs, or does not take them."""

    def __init__(self, failure: RequestFailed) -> None:
        self.failure = failure

    def prepare(self, feeds: Any) -> Any:
        raise self.failure


@pytest.mark.parametrize(
    ("failure", "refused", "published"),
    [
        (CannotRun("unsupported_operator", "no inputs of bfloat16"), "", True),
        (RequestFailed("", "MIGraphX failed while running: axis 7"), "no reference can run the model", True),
        (RequestFailed("", "MIGraphX failed while running: axis 7"), "", False),
    ],
)
def test_what_cannot_be_run_through_no_fault_of_its_own_is_not_verified(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: RequestFailed, refused: str, published: bool
) -> None:
    """Inputs that the module does not take say nothing of the program, nor do samples that no reference takes."""
    x = np.ones((1, 4), np.float32)
    meta = {"points": [{"batch": 1, "runs": 1, "samples": 1}], "minimum": 1, "origin": {}, "refused": refused}
    samples.save_runs(str(tmp_path / "runs.npz"), [{"x": x}], [{}] if refused else [{"y": x}], meta)
    monkeypatch.setattr(actions, "compiler_module", lambda request: SimpleNamespace(load=lambda _: Unfed(failure)))
    request = {"action": "evaluate", "device": "gfx942", "reference": str(tmp_path / "runs.npz")}
    messages = Messages(os.open(os.devnull, os.O_WRONLY))

    def evaluated() -> dict[str, Any]:
        return actions.run_action({**request, "tolerance": 0.1, "equal": 1.0, "measure_seconds": 0.01}, messages)

    if published:
        answer = evaluated()
        assert answer["verification"]["unverified"] == {"y": failure.message}
        assert answer["measurements"].keys() == {"load"}
    else:
        with pytest.raises(RequestFailed):
            evaluated()


def test_a_mistake_of_the_farm_leaves_its_log(farm: Farm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(namespace: str, sidecar: Any, **_: object) -> Any:
        raise UsageError("not a valid sidecar: outputs: Field required")

    monkeypatch.setattr(farm.artifacts, "publish", refuse)
    outcome = run(farm, tmp_path)
    assert (outcome.end, outcome.kind) == (AttemptEnd.FAILED, FailureKind.INTERNAL)
    assert "not a valid sidecar" in outcome.message
    log = farm.artifacts.read_blob(outcome.log, 1 << 20).decode()
    assert "net/onnxruntime-cpu/fp32/b2 attempt 1" in log
    assert "Traceback" in log


@pytest.mark.parametrize(
    ("what", "how"),
    [("sample", "link"), ("kernels", "link")]
    + [("program", how) for how in ("link", "folder link", "second name", "pipe", "large")],
)
def test_what_a_child_put_in_an_outputs_place_is_never_uploaded(
    farm: Farm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str, how: str
) -> None:
    """As if a process of it had outlived the sweep: the worker's own files are one link away."""
    secret = tmp_path / "environ"
    secret.write_bytes(b"FARM_S3_SECRET_KEY=the worker's")
    record = Steps.record

    def swapped(steps: Steps, *given: Any, **named: Any) -> dict[str, Any]:
        kernels = steps.children.folder / "proof" / "kernels" / "gfx942130.ukdb"
        place = {"program": steps.program, "sample": steps.sample, "kernels": kernels}[what]
        place.parent.mkdir(parents=True, exist_ok=True)
        place.unlink(missing_ok=True)
        if how == "folder link":
            remove_tree(place.parent)
            (tmp_path / "beside").mkdir()
            (tmp_path / "beside" / place.name).write_bytes(secret.read_bytes())
            place.parent.symlink_to(tmp_path / "beside")
        elif how == "link":
            place.symlink_to(secret)
        elif how == "second name":
            place.hardlink_to(secret)
        elif how == "pipe":
            os.mkfifo(place)
        else:
            with place.open("wb") as file:
                file.truncate(farm.settings.disk_limit + 1)
        monkeypatch.setattr(Tuner, "kernels", lambda _: [kernels])
        return record(steps, *given, **named)

    farm.settings = farm.settings.model_copy(update={"disk_limit": 32 << 20})
    monkeypatch.setattr(Steps, "record", swapped)
    before = set(farm.artifacts.list_objects("blobs/"))
    outcome = run(farm, tmp_path, tuning="quick" if what == "kernels" else "off")
    assert (outcome.end, outcome.kind) == (AttemptEnd.FAILED, FailureKind.COMPILER_ERROR), outcome.message
    assert "it left what is not a plain file" in outcome.message
    made = [key.rpartition("/")[2] for key in set(farm.artifacts.list_objects("blobs/")) - before]
    assert not [digest for digest in made if b"the worker's" in farm.artifacts.read_blob(digest, 1 << 26)]
    assert not list(farm.artifacts.list_objects("ns/main/artifacts/"))


def test_a_reference_that_is_no_plain_file_is_kept_for_nobody(
    farm: Farm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other attempts, also of other namespaces, take from the node's cache what has the right name."""
    secret = tmp_path / "environ"
    secret.write_bytes(b"the worker's")
    ask = Steps._ask_reference

    def swapped(steps: Steps, model: Path, samples: Path | None, path: Path, *given: Any, **named: Any) -> None:
        ask(steps, model, samples, path, *given, **named)
        path.rename(path.with_name("real.npz"))
        path.symlink_to(secret)

    monkeypatch.setattr(Steps, "_ask_reference", swapped)
    run(farm, tmp_path)
    held = [path.read_bytes() for path in farm.settings.data_dir.glob("cache/*/*")]
    assert held
    assert secret.read_bytes() not in held
    assert not list(farm.artifacts.list_objects("ns/main/references/"))


def test_a_damaged_record_of_a_reference_is_made_again(
    farm: Farm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else no cell of the model could be compiled, until somebody deletes it."""
    reference, keys = Steps.reference, list[str]()

    def damaged(steps: Steps, *given: Any, **named: Any) -> Path:
        keys.append(reference_key("main", digest_of(reference_recipe(steps.order, "onnxruntime"))))
        farm.artifacts.put_object(keys[0], b"{")
        return reference(steps, *given, **named)

    monkeypatch.setattr(Steps, "reference", damaged)
    outcome = run(farm, tmp_path)
    assert outcome.end is AttemptEnd.SUCCEEDED, outcome.message
    found = farm.artifacts.get_object(keys[0])
    assert found
    assert json.loads(found.data)["digest"]
