"""Programs are read without MIGraphX: what they hold, what they cost, and what damage does.

One GPU program is MIGraphX's own; the others are made up in its form, around genuine code objects.
"""

from __future__ import annotations

import io
import random
import re
import struct
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farm.client.inspection import disagreements, faults, inspect_program
from farm.runner.migraphx_compiler import _refuse_broken, load
from farm.runner.mxr import (
    MIN_BYTES,
    Binary,
    MalformedProgram,
    ProgramTooLarge,
    _Msgpack,
    foreign_arches,
    gpu_arches,
    read,
)
from farm.runner.protocol import RequestFailed
from tests.support.amd_code_objects import ARCHES
from tests.support.gpu_programs import (
    CODE_OBJECTS,
    bundle,
    code_object,
    flagged,
    pack,
    program,
    sidecar_of,
    write_mxr,
)
from tests.support.places import ROOT


@pytest.mark.parametrize("suffix", [".mxr", ".json"])
def test_what_a_gpu_program_holds(tmp_path: Path, suffix: str) -> None:
    """Both containers tell the same."""
    found = read(write_mxr(tmp_path / f"net{suffix}"))
    assert found["format"] == {".mxr": "msgpack", ".json": "json"}[suffix]
    assert (found["file_version"], found["migraphx_version"], found["targets"]) == (7, "2.15.0", ["gpu"])
    port = {"dtype": "float32", "shape": [1, 3], "strides": [3, 1]}
    assert (found["inputs"], found["outputs"]) == ([{"name": "x", **port}], [port])
    assert (found["output_parameters"], found["offload_copy"], found["compiled"]) == (["main:#output_0"], False, True)
    assert found["code_objects"] == [
        {"arches": ["gfx942:sramecc+:xnack-"], "count": 1, "size": 4592, "wave_sizes": [64]}
    ]
    assert found["solutions"] == [
        {"operator": "gpu::convolution", "solution": 85, "count": 1},
        {"operator": "gpu::hip_gemm", "solution": 7, "count": 1},
    ]
    assert found["weights"] == {"float32": 12}
    assert found["modules"]["main"]["operators"]["@param"] == 2
    assert (found["left_over"], found["unknown"], found["trailing"]) == (0, [], 0)


def test_offloaded_copies_are_seen(tmp_path: Path) -> None:
    found = read(write_mxr(tmp_path / "net.mxr", program(offload_copy=True)))
    assert (found["offload_copy"], found["output_parameters"]) == (True, [])


@pytest.mark.parametrize(
    ("code", "arches"),
    [
        *((code_object(arch), [arch]) for arch in ARCHES),
        (flagged(0x5F), ["gfx9-4-generic"]),
        (flagged(0xFE), ["unknown-0xfe"]),
        (bundle("host-x86_64-unknown-linux--", "hipv4-amdgcn-amd-amdhsa--gfx90a:xnack-"), ["gfx90a:xnack-"]),
        (b"CCOB" + bytes(60), ["compressed"]),
        (b"no code object", []),
        (code_object("gfx1100")[:30], []),
        (bundle("hipv4-amdgcn-amd-amdhsa--gfx942")[:40], []),
        (b"__CLANG_OFFLOAD_BUNDLE__" + struct.pack("<QQQQ", 2**63, 0, 0, 2**63), []),
    ],
)  # fmt: skip
def test_architecture_of_a_code_object(code: bytes, arches: list[str]) -> None:
    assert gpu_arches(code) == arches


@pytest.mark.parametrize("arch", ARCHES)
def test_a_code_objects_own_notes_say_the_same_of_its_architecture(arch: str) -> None:
    """LLVM writes the target into the metadata too, in words."""
    [said] = re.findall(rb"-amd-amdhsa-(?:unknown)?-(gfx[a-z0-9:+-]*)", code_object(arch))
    assert gpu_arches(code_object(arch)) == [said.decode()]


@pytest.mark.parametrize(
    ("device", "runs"),
    [
        ("gfx942", True),
        ("gfx942:sramecc+:xnack-", True),
        ("gfx942:sramecc+:xnack+", False),
        ("gfx90a:sramecc+:xnack-", False),
        ("gfx942:any", True),
    ],
)
def test_which_devices_run_a_program(tmp_path: Path, device: str, runs: bool) -> None:
    assert (not foreign_arches(read(write_mxr(tmp_path / "net.mxr"))["code_objects"], device)) is runs


def refuse_broken(path: str, arch: str) -> None:
    """Refuse what a compile left for a key of this arch; a request names the device without its features."""
    expected = {"toolchain": "", "recipe": 1, "libraries": {}, "cpu_family": None, "arch": arch}
    _refuse_broken({"program": path, "device": arch.partition(":")[0], "expected": expected})


@pytest.mark.parametrize(
    ("kernel", "arch", "refused"),
    [
        ("gfx942:sramecc+:xnack-", "gfx942:sramecc+:xnack-", False),
        ("gfx942:sramecc+:xnack+", "gfx942:sramecc+:xnack-", True),
        ("gfx942:sramecc-:xnack-", "gfx942:sramecc+:xnack-", True),
        ("gfx942", "gfx942:sramecc+:xnack-", False),
        ("gfx942:sramecc+:xnack+", "gfx942:any", False),
        ("gfx90a:sramecc+:xnack-", "gfx942:sramecc+:xnack-", True),
        ("gfx90a:sramecc-:xnack+", "gfx90a:sramecc-:xnack+", False),
        ("gfx90a:sramecc-:xnack+", "gfx90a:sramecc-:xnack-", True),
        ("gfx950", "gfx942:sramecc+:xnack-", True),
        ("gfx950", "gfx950:sramecc+:xnack-", False),
        ("gfx1100", "gfx1100", False),
        ("gfx1201", "gfx1100", True),
    ],
)
def test_kernels_are_held_against_the_whole_arch_as_the_loader_does(
    tmp_path: Path, kernel: str, arch: str, refused: bool
) -> None:
    """A worker with `xnack+` fills no key of `xnack-`; kernels for either way fit both."""
    path = str(write_mxr(tmp_path / "net.mxr", program(code_object(kernel))))
    if refused:
        with pytest.raises(RequestFailed, match=f"not for {re.escape(arch)}") as failed:
            refuse_broken(path, arch)
        assert failed.value.kind == "toolchain_mismatch"
    else:
        refuse_broken(path, arch)


@pytest.mark.parametrize(
    ("flags", "device", "runs"),
    [
        (0x5F, "gfx942:sramecc+:xnack-", True),
        (0x5F, "gfx90a", False),
        (0x54, "gfx1151", True),
        (0x54, "gfx1201", False),
        (0xFE, "gfx942", True),
    ],
)
def test_generic_kernels_run_on_their_family_only(tmp_path: Path, flags: int, device: str, runs: bool) -> None:
    found = read(write_mxr(tmp_path / "net.mxr", program(flagged(flags))))
    assert (not foreign_arches(found["code_objects"], device)) is runs


def test_wavefronts_of_a_size_that_a_card_does_not_have_are_refused(tmp_path: Path) -> None:
    """The metadata say it even of an architecture that the reader does not know."""
    code = bytearray(code_object("gfx1100"))
    struct.pack_into("<I", code, 48, 0xFE)
    path = str(write_mxr(tmp_path / "net.mxr", program(bytes(code))))
    refuse_broken(path, "gfx1100")
    with pytest.raises(RequestFailed, match="kernels for wave32, not for gfx90a"):
        refuse_broken(path, "gfx90a:sramecc+:xnack-")


def test_a_child_loads_no_program_for_another_card(tmp_path: Path) -> None:
    """Before the compiler is asked, whose error would not say why."""
    with pytest.raises(RequestFailed, match="kernels for gfx1100, not for gfx90a"):
        load({"program": str(GENUINE), "device": "gfx90a"})


def test_a_program_without_code_objects_has_none_to_check(tmp_path: Path) -> None:
    path = write_mxr(tmp_path / "net.mxr", change(modules={"main": {"nodes": []}}))
    assert read(path)["code_objects"] == []
    refuse_broken(str(path), "gfx942:sramecc+:xnack-")


def test_a_finished_program_that_cannot_run_is_refused(tmp_path: Path) -> None:
    """MIGraphX saves these without an error."""
    refuse_broken(str(write_mxr(tmp_path / "net.mxr")), "gfx942")
    with pytest.raises(RequestFailed, match=r"kernels for gfx942:sramecc\+:xnack-, not for gfx90a"):
        refuse_broken(str(tmp_path / "net.mxr"), "gfx90a")
    broken = write_mxr(tmp_path / "broken.mxr", program(left_over=True))
    with pytest.raises(RequestFailed, match="gpu::precompile_op is left over"):
        refuse_broken(str(broken), "gfx942")
    assert "1 undecided gpu::precompile_op" in faults(inspect_program(broken))[0]


def test_agreement_with_the_sidecar(tmp_path: Path) -> None:
    path = write_mxr(tmp_path / "net.mxr")
    assert disagreements(sidecar_of(path), read(path), path) == []


def change(**fields: Any) -> dict[str, Any]:
    return {**program(), **fields}


def test_each_disagreement_is_named(tmp_path: Path) -> None:
    path = write_mxr(tmp_path / "net.mxr")
    sidecar = sidecar_of(path)
    path.write_bytes(pack(change(targets=[{"name": "ref"}], migraphx_version="2.16.0")) + b"more")
    sidecar["outputs"].append({"name": "z", "dtype": "float32", "shape": [1]})
    sidecar["device"] = {"arch": "gfx90a"}
    found = disagreements(sidecar, read(path), path)
    assert [line.partition(":")[0] for line in found] == [
        "size", "digest", "outputs", "target", "architecture", "version",
    ]  # fmt: skip
    path.write_bytes(pack(change(targets=[], contexts=[])))
    assert any("the file is not compiled" in line for line in disagreements(sidecar, read(path), path))


def test_large_weights_are_never_in_memory(tmp_path: Path) -> None:
    """A program of 3 GB (with holes on disk, read like any other) is read in a few megabytes."""
    path = tmp_path / "net.mxr"
    head, _, tail = pack(program()).partition(b"\xc6" + struct.pack(">I", 6) + bytes(6))
    chunk = 3 << 30
    with path.open("wb") as file:
        file.write(head + b"\xc6" + struct.pack(">I", chunk))
        file.seek(chunk, 1)
        file.write(tail)
    code = (
        "import pathlib, sys; from farm.runner.mxr import read; found = read(sys.argv[1]);"
        "status = pathlib.Path('/proc/self/status').read_text();"  # rusage would count the parent that forked, too
        "print(found['weights']['float32'], status.partition('VmHWM:')[2].split()[0])"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)], cwd=ROOT, capture_output=True, text=True, check=True)
    weights, peak = map(int, done.stdout.split())
    assert weights == chunk + 6
    assert peak < 100 * 1024


def mutations(good: bytes, seed: int, count: int) -> list[bytes]:
    """Cut, overwritten, doubled and shuffled copies of a good file."""
    chance = random.Random(seed)
    made = []
    for _ in range(count):
        data = bytearray(good)
        for _ in range(chance.randint(1, 4)):
            place = chance.randrange(len(data))
            match chance.randrange(5):
                case 0:
                    del data[place:]
                    data = data or bytearray(b"\x81")
                case 1:
                    data[place] = chance.randrange(256)
                case 2:
                    data[place : place + 4] = chance.randbytes(4)
                case 3:
                    data[place:place] = data[place : place + 64]
                case 4:
                    data[place : place + 5] = b"\xdd\xff\xff\xff\xff"
        made.append(bytes(data))
    return made


@pytest.mark.parametrize("suffix", [".mxr", ".json"])
def test_mutated_files_end_in_an_answer_or_in_one_error(tmp_path: Path, suffix: str) -> None:
    good = write_mxr(tmp_path / f"good{suffix}", program(code_object("gfx1100")[:80])).read_bytes()
    path = tmp_path / f"net{suffix}"
    refused = 0
    for data in mutations(good, 7, 400):
        path.write_bytes(data)
        try:
            assert read(path)["size"] == len(data)
        except MalformedProgram as error:
            refused += 1
            assert "\n" not in str(error)
    assert refused > 200


def text(value: str) -> bytes:
    return pack(value)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "empty"),
        (b"\x00" * 100, "neither"),
        (b"\x81" + text("version") + b"\x08", "no field 'modules'"),
        (pack(change(version="eight")), "'version' of the program is not a whole number"),
        (pack(change(targets="gpu")), "'targets' of the program is not a list"),
        (pack(change(modules=[])), "a map should begin"),
        (pack(change(modules={})), "no main module"),
        (pack(change(modules={"main": {"nodes": [1]}})), "node 0 of module 'main' is not a map"),
        (pack(change(modules={"main": {"nodes": [{"name": 1}]}})), "'name' of node 0"),
        (pack(change(modules={"main": {"nodes": [{"name": "@return", "inputs": ["@9"]}]}})), "returns '@9'"),
        (b"\x81" + text("contexts") + b"\x91" * 100_000, "deep"),
        (b"\x81" + text("contexts") + b"\xdd\xff\xff\xff\xff" + b"\xc0" * 1_000_000, "more than 500000 values"),
        (b"\x81" + text("contexts") + b"\xdb\xff\xff\xff\xff", "text at byte"),
        (b"\x81" + text("contexts") + b"\xc6\xff\xff\xff\xff" + bytes(100), "cut"),
        (b"\x81" + text("contexts") + b"\xc1", "0xc1"),
        (b"\x81\x01\x01", "the key at byte"),
        (b"\xdf\xff\xff\xff\xff" + (text("a") + b"\xc0") * 2, "twice"),
        (pack(program())[:-1] + b"\xff\xff", "not UTF-8"),
        (b"{", "cut or damaged"),
        (b'{"version": 8, "modules": {"main": {"nodes": [', "cut"),
        (b'{"contexts": ' + b"[" * 100_000, "deep"),
        (b'{"contexts": ' + b"[" * 40 + b"]" * 40 + b"}", "deep"),
        (b'{"contexts": [' + b"-1," * 600_000 + b"1]}", "no field 'version'"),
        (b'{"contexts": "' + b"a" * 5_000_000, "cut or damaged"),
        (b'{"version": 8, "modules": []}', "in the place of a map"),
        (b'{"version": 8, "modules": {"main": {"nodes": 1}}}', "in the place of a list"),
        (b'{"contexts": {"bytes":[1,2,999]}}', "numbers from 0 to 255"),
        (b'{"contexts": nothing}', "damaged"),
        (b'{"contexts" 1}', "damaged"),
        (b'{"version": 8} more', "damaged"),
        (b'{"contexts": "\\ud8zz"}', "damaged"),
    ],
)
def test_hostile_files_are_refused_with_the_place(tmp_path: Path, data: bytes, words: str) -> None:
    path = tmp_path / "net.mxr"
    path.write_bytes(data)
    with pytest.raises(MalformedProgram, match=words):
        read(path)


def test_weights_and_kernels_in_json_are_counted(tmp_path: Path) -> None:
    document = program(code_object("gfx1100"))
    document["modules"]["main"]["nodes"][1]["operator"]["literal"]["data"] = bytes(range(256)) * 100
    found = read(write_mxr(tmp_path / "net.json", document))
    assert found["weights"] == {"float32": 25_600}
    size = len(code_object("gfx1100"))
    assert found["code_objects"] == [{"arches": ["gfx1100"], "count": 1, "size": size, "wave_sizes": [32]}]


def test_a_large_json_program_is_not_looked_into(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which is nothing against it: it may be saved."""
    path = write_mxr(tmp_path / "net.json")
    monkeypatch.setattr("farm.runner.mxr.MAX_JSON", path.stat().st_size)
    assert read(path)["compiled"]
    monkeypatch.setattr("farm.runner.mxr.MAX_JSON", path.stat().st_size - 1)
    with pytest.raises(ProgramTooLarge, match="it is JSON of"):
        read(path)
    refuse_broken(str(path), "gfx90a")


GENUINE = CODE_OBJECTS / "cnn_gfx1100.mxr"


def test_a_program_that_migraphx_compiled_for_a_gpu_lists_its_kernel() -> None:
    found = read(GENUINE)
    assert found["code_objects"] == [{"arches": ["gfx1100"], "count": 1, "size": 5400, "wave_sizes": [32]}]
    assert found["modules"]["main"]["operators"]["gpu::code_object"] == 1
    assert [solution["operator"] for solution in found["solutions"]] == ["gpu::convolution", "gpu::hip_gemm"]


def test_made_up_programs_have_the_form_of_what_migraphx_wrote() -> None:
    """Each node that both have: a fixture decides nothing that the genuine file does not say."""

    def form(value: Any) -> Any:
        if isinstance(value, list):
            return [form(each) for each in value[:1]]
        return {key: form(each) for key, each in value.items()} if isinstance(value, dict) else type(value)

    def forms(data: bytes) -> dict[str, Any]:
        nodes = _Msgpack(io.BytesIO(data), len(data)).value()["modules"]["main"]["nodes"]
        return {node["name"]: form(node) for node in nodes}

    genuine = forms(GENUINE.read_bytes())
    for document in (program(), program(offload_copy=True)):
        made = forms(pack(document))
        both = genuine.keys() & made.keys()
        assert both >= {"gpu::code_object", "gpu::convolution", "gpu::hip_gemm", "hip::hip_copy_literal", "@return"}
        assert {name: made[name] for name in both} == {name: genuine[name] for name in both}


def test_a_program_that_migraphx_compiled_for_another_card_is_refused() -> None:
    refuse_broken(str(GENUINE), "gfx1100")
    with pytest.raises(RequestFailed, match="kernels for gfx1100, not for gfx1101"):
        refuse_broken(str(GENUINE), "gfx1101")


def test_a_large_kernel_is_read_to_its_last_byte(tmp_path: Path) -> None:
    """Its bytes count for nothing, wherever a block of the reader ends, and are never in memory as a whole."""
    start, code, end = re.split(rb"(\xdc\x15\x18\x7fELF.*?)(?=\xabsymbol_name)", GENUINE.read_bytes(), flags=re.DOTALL)
    more = list(range(120, 215)) * 256_000
    behind = b"".join(map(pack, more[:95])) * 256_000
    path = tmp_path / "net.mxr"
    path.write_bytes(start + b"\xdd" + struct.pack(">I", 5400 + len(more)) + code[3:] + behind + end)
    tracemalloc.start()
    found = read(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < len(more) / 2
    assert found["code_objects"] == [{"arches": ["gfx1100"], "count": 1, "size": 5400 + len(more), "wave_sizes": [32]}]
    assert found["modules"] == read(GENUINE)["modules"]
    assert found["trailing"] == 0


@given(st.lists(st.sampled_from([0, 1, 127, 128, 0xCC, 0xCD, 255]), min_size=MIN_BYTES, max_size=300), st.booleans())
def test_arrays_of_numbers_are_read_as_msgpack_says(numbers: list[int], other: bool) -> None:
    """With one number that is not a byte, or is written longer than it need be, it is a list of numbers."""
    data = b"\xdd" + struct.pack(">I", len(numbers) + other) + b"".join(map(pack, numbers)) + b"\xcc\x05" * other
    file = io.BytesIO(data + b"\xcc\xcc")
    found = _Msgpack(file, len(data) + 2).value()
    assert found == ([*numbers, 5] if other else Binary(len(numbers), bytes(numbers)))
    assert file.read() == b"\xcc\xcc"


def test_what_comes_behind_a_program_is_counted(tmp_path: Path) -> None:
    path = write_mxr(tmp_path / "net.mxr")
    path.write_bytes(path.read_bytes() + bytes(1000))
    assert read(path)["trailing"] == 1000
    path = write_mxr(tmp_path / "net.json")
    path.write_bytes(path.read_bytes() + b"\n")
    assert read(path)["trailing"] == 0
