"""Foreign text goes into scripts, configurations and reports, and stays text there: strangers try to make it more."""

from __future__ import annotations

import ast
import copy
import json
import re
import shlex
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from functools import cache
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from farm.artifacts import planned_orders
from farm.artifacts.sidecar import of_cell, read, serving_of
from farm.artifacts.storage import Object
from farm.cli import connection
from farm.client.authoring import init_manifest
from farm.client.client import FarmClient
from farm.client.fetching import RESERVED, write_artifact
from farm.client.packs import Layout
from farm.compiling.asking import WrongAnswer, read_as
from farm.compiling.pipeline import StepSettings
from farm.errors import ArtifactGone, FarmError, Untrusted, UsageError
from farm.extras.packs.fetch import small_files, write_pack
from farm.extras.packs.layouts import require_fit
from farm.extras.reproduce import reproduction
from farm.local.servers import _quoted
from farm.models.frozen import FrozenModel
from farm.node.attempts import Attempts
from farm.pages.job_view import ways
from farm.runner.documents import SessionChoice
from farm.settings import load_settings
from farm.targets.compilers import compilers
from farm.targets.environment import MIGRAPHX_ENV
from farm.wire.program import Sidecar
from tests.support.tensors import tensor

BOLD = {chr(ord("a") + at): chr(0x1D41A + at) for at in range(26)}
"""Letters that have no upper case, and that Python reads as these in names."""
CODE = "ALL;" + "".join(BOLD[each] for each in "exec") + '("' + "".join(f"\\{ord(each):03o}" for each in "1/0") + '")'

DOCUMENT: dict[str, Any] = {
    "schema": 1, "key": "a" * 64, "namespace": "main", "identifier": "net/onnxruntime-cuda/fp32/b1",
    "spec": {"compiler": {"name": "onnxruntime"}, "precision": "fp32", "options": {"gpu_mem_limit": 5},
             "model": {"format": "onnx", "digest": "b" * 64}, "device": {}},
    "blobs": {"program": {"path": "net--onnxruntime-cuda--fp32--b1.onnx", "digest": "c" * 64, "size": 1}},
    "toolchain": "onnxruntime1.30", "device": {"arch": "sm_90"}, "created": "2026-01-01T00:00:00Z",
    "inputs": [{"name": "x", "dtype": "float32", "shape": [1, 3]}],
    "outputs": [{"name": "y", "dtype": "float32", "shape": [1]}],
    "tuning": {"mode": "quick", "session": {"level": "basic", "threads": 2, "spinning": True,
                                            "cudnn_conv_algo_search": "HEURISTIC", "prefer_nhwc": "1"}},
}  # fmt: skip
MIGRAPHX: dict[str, Any] = {
    **DOCUMENT, "identifier": "net/migraphx-gfx942/fp32/b1", "device": {"arch": "gfx942"}, "toolchain": "migraphx2.13",
    "spec": {"compiler": {"name": "migraphx"}, "precision": "fp32", "options": {}, "device": {},
             "model": {"format": "onnx", "digest": "b" * 64}},
    "blobs": {"program": {"path": "net--migraphx-gfx942--fp32--b1.mxr", "digest": "c" * 64, "size": 1}},
    "tuning": {"mode": "off"}, "offload_copy": True,
}  # fmt: skip
TEXTS = (
    ("identifier",), ("toolchain",), ("device", "arch"), ("namespace",), ("created",), ("blobs", "program", "path"),
    ("inputs", 0, "name"), ("inputs", 0, "dtype"), ("outputs", 0, "name"), ("spec", "precision"),
    ("spec", "compiler", "name"), ("spec", "options", "gpu_mem_limit"), ("spec", "options", "arena_extend_strategy"),
    ("spec", "options", "cudnn_conv_algo_search"), ("tuning", "session", "level"),
    ("tuning", "session", "cudnn_conv_algo_search"), ("tuning", "session", "prefer_nhwc"),
)  # fmt: skip
"""Places of a sidecar that hold a text, or could."""

HOSTILE = st.one_of(
    st.sampled_from(
        [CODE, '"""\nimport os\n"""', "'+exit()+'", "$(id)", "`id`", "x; id", "a\nb", '" } parameters { key: "', "{0}",
         "{{7*7}}", "x\\", "*/ x", "x\r\ny", "-rf", "pack.json", "../x", "../../x", "\u2028x", "\u202ex", "%0A", "x'y"]
    ),
    st.text(st.characters(codec="utf-8"), min_size=1, max_size=12),
    st.text(st.sampled_from("\"'\\\n\r`$;(){}[]#%<>&|*:,= xa0"), min_size=1, max_size=12),
)  # fmt: skip


def changed(place: tuple[str | int, ...], value: object, whole: dict[str, Any] = DOCUMENT) -> dict[str, Any]:
    document = copy.deepcopy(whole)
    found: Any = document
    for part in place[:-1]:
        found = found[part]
    found[place[-1]] = value
    return document


def sidecar(document: dict[str, Any]) -> Sidecar:
    return read(json.dumps(document).encode())


def test_a_setting_of_a_session_is_one_that_the_farm_knows() -> None:
    document = changed(("tuning", "session", "level"), CODE)
    with pytest.raises(ValueError, match="level"):
        sidecar(document)
    with pytest.raises(WrongAnswer):
        read_as(SessionChoice, document["tuning"]["session"])
    unchecked = copy.copy(sidecar(DOCUMENT))
    unchecked["tuning"] = document["tuning"]
    with pytest.raises(UsageError, match="level"):
        serving_of(unchecked)


def python_shape(text: str) -> str:
    """Return a program without its constants."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant):
            node.value = type(node.value).__name__
    return ast.dump(tree)


def protobuf_shape(text: str) -> str:
    """Return protobuf's text form without its strings, comments and words in capitals."""
    bare = re.sub(r'"(?:[^"\\\n]|\\.)*"', "S", text)
    return re.sub(r"[A-Z0-9_]+|#[^\n]*|\s+", " ", bare)


def shell_shape(text: str) -> list[str]:
    """Return the words and signs of a script: of each word only whether it is plain or quoted."""
    lexer = shlex.shlex(text.replace("\\\n", " "), posix=False, punctuation_chars=True)
    lexer.whitespace = " \t\r"
    lexer.wordchars += "@%+:,"  # What needs no quotes is a part of its word.
    return [re.sub(r"^(?:'[^']*'|\"'\"|[\w@%+=:,./-])+$", "word", token) for token in lexer]


def cpp_shape(text: str) -> str:
    """Return C++ without its strings, and words in capitals; a line break in a string is left as it is."""
    return re.sub(r"\b[A-Z0-9_]+\b", "C", re.sub(r'"(?:[^"\\\n]|\\.)*"', "S", text))


SHAPES = {".py": python_shape, ".pbtxt": protobuf_shape, ".sh": shell_shape}


def made_of(document: dict[str, Any]) -> Iterator[tuple[str, object]]:
    """Yield what is made of a sidecar for people to run: each file's name, and its shape."""
    found = sidecar(document)
    for layout in (Layout.ONNXRUNTIME, Layout.TRITON):
        try:
            require_fit(layout, found)
            files = small_files(layout, found)
        except FarmError:
            continue
        for name, data in files.items():
            yield name.rpartition("/")[2], SHAPES[name[name.rindex(".") :]](data.decode())
    for way in ways(found, "https://farm.example"):
        shape = {"python": python_shape, "triton": protobuf_shape, "cpp": cpp_shape}.get(way.slug, shell_shape)
        yield (
            f"{way.slug} of {'mxr' if found['blobs']['program']['path'].endswith('.mxr') else 'onnx'}",
            shape(way.text),
        )


HARMLESS: list[tuple[tuple[str | int, ...], object]] = [
    ((), None), *((("device", "arch"), arch) for arch in ("x86-64-v3", "gfx942")),
    *((("tuning", "session", "level"), level) for level in ("extended", "all")), (("tuning", "session"), None),
    (("spec", "options"), {}), (("spec", "options", "arena_extend_strategy"), "kSameAsRequested"),
    (("spec", "options", "gpu_mem_limit"), 0), (("spec", "precision"), "tf32"), (("inputs", 0, "dtype"), "object"),
    (("toolchain",), "onnxruntime1.30-tensorrt10"), (("identifier",), "net/onnxruntime-cuda/fp32"),
]  # fmt: skip
"""Other sidecars of which other files are made."""
KNOWN: dict[str, list[object]] = {}
for _place, _value in HARMLESS:
    for _name, _shape in made_of(changed(_place, _value) if _place else DOCUMENT):
        KNOWN.setdefault(_name, []).append(_shape)
for _place, _value in [
    *((("device", "arch"), arch) for arch in ("gfx942", "ref")),
    (("blobs", "program", "path"), "net.onnx"), (("spec", "compiler", "name"), "another"),
]:  # fmt: skip
    for _name, _shape in made_of(changed(_place, _value, MIGRAPHX)):
        KNOWN.setdefault(_name, []).append(_shape)


@pytest.mark.parametrize("place", TEXTS, ids=lambda place: ".".join(map(str, place)))
@settings(max_examples=60, deadline=None)
@given(text=HOSTILE)
def test_what_a_sidecar_says_becomes_no_code(place: tuple[str | int, ...], text: str) -> None:
    """Either the sidecar is refused, or what is made of it has a shape that it has for harmless ones."""
    for whole in (DOCUMENT, MIGRAPHX):
        with suppress(FarmError, ValueError, KeyError):
            found = dict(made_of(changed(place, text, whole)))
            assert [name for name, shape in found.items() if shape not in KNOWN.get(name, [])] == []


@settings(max_examples=60, deadline=None)
@given(text=st.one_of(HOSTILE, HOSTILE.map("net{}/onnxruntime-cuda/fp32/b1".format)))
def test_the_name_of_a_pack_becomes_no_code(text: str) -> None:
    """It is that of the cell in a ref, or in `pack.json`, which nobody signs and `farm verify` makes the files by."""
    found = of_cell(sidecar(DOCUMENT), text)
    for layout in (Layout.ONNXRUNTIME, Layout.TRITON):
        with suppress(FarmError):
            require_fit(layout, found)
            for path, data in small_files(layout, found).items():
                name = path.rpartition("/")[2]
                assert SHAPES[name[name.rindex(".") :]](data.decode()) in KNOWN[name]


@settings(max_examples=60, deadline=None)
@given(folder=HOSTILE.filter(lambda text: "\0" not in text))
def test_the_path_of_a_clone_becomes_no_setting_of_valkey(folder: str) -> None:
    """As Valkey reads what is in quotes, which is as Python does: `farm up` puts its folder into the configuration."""
    written = _quoted(folder)
    assert ast.literal_eval(f"b{written}").decode() == folder and len(written.split()) == 1


@pytest.mark.parametrize(
    "name", [*RESERVED, "net.onnx.artifact.json", "conftest.py", "Makefile", "../x.onnx", ".x.onnx"]
)
def test_no_program_has_the_name_of_a_file_that_the_farm_writes(tmp_path: Path, name: str) -> None:
    """By `pack.json` a stranger would say which files of the folder the next pack replaces."""
    found = sidecar(DOCUMENT)
    found["blobs"]["program"]["path"] = name
    cell: Any = {"identifier": PurePosixPath(name).stem, "program": found["blobs"]["program"], "key": found["key"]}
    with pytest.raises(ArtifactGone):
        write_artifact(lambda blob, place: place.write_bytes(b"{}") and None, cell, found, tmp_path, log=False)
    assert list(tmp_path.iterdir()) == []


@settings(max_examples=60, deadline=None)
@given(
    name=st.one_of(HOSTILE, *(HOSTILE.map(form.format) for form in ("{}.onnx", "net{}", "net.{}.onnx"))),
    identifier=st.one_of(st.just("net/onnxruntime-cpu/fp32/b1"), HOSTILE, HOSTILE.map("net/{}".format)),
)
def test_a_fetched_file_has_a_name_that_only_artifacts_have(name: str, identifier: str) -> None:
    found = sidecar(DOCUMENT)
    found["blobs"]["program"]["path"] = name
    cell: Any = {"identifier": identifier, "program": found["blobs"]["program"], "key": found["key"]}
    with TemporaryDirectory() as folder:
        place = Path(folder) / "out"
        try:
            write_artifact(lambda blob, path: path.write_bytes(b"{}") and None, cell, found, place, log=False)
        except FarmError:
            assert not place.exists() or list(place.iterdir()) == []
            return
        names = [path.name for path in Path(folder).rglob("*") if path != place]
        assert [
            each for each in names if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*\.onnx(\.artifact\.json)?", each)
        ] == []
        assert len(names) == len(list(place.iterdir())) == 2


def test_a_pack_removes_nothing_that_its_index_does_not_know_by_its_bytes(tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "work.py").write_text("years")
    files = [{"path": "src/work.py", "digest": "0" * 64, "size": 5}, {"path": "../x", "digest": "", "size": 1}]
    (tmp_path / "pack.json").write_text(json.dumps({"schema": 1, "files": files}))
    program = tmp_path.parent / "program.onnx"
    program.write_bytes(b"p")
    write_pack(Layout.ONNXRUNTIME, sidecar(DOCUMENT), program, tmp_path, lambda place: place)
    assert (tmp_path / "src" / "work.py").read_text() == "years"


@settings(max_examples=60, deadline=None)
@given(name=HOSTILE, dimension=HOSTILE, path=st.sampled_from(["a b.onnx", "x: {generator: os:system}.onnx", "'#.onnx"]))
def test_the_names_in_a_model_become_no_fields_of_a_manifest(name: str, dimension: str, path: str) -> None:
    """`farm init` writes them into YAML, of which `generator` runs Python."""
    inputs = [tensor(name, "float32", (dimension, None, 3))]
    model = FrozenModel(digest="a" * 64, format="onnx", files=[], inputs=inputs, outputs=[], size=1)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("farm.client.authoring.read_model", lambda _: model)
        text = init_manifest(Path("/m") / path, "/m")
    try:
        document = YAML(typ="safe", pure=True).load(text)
    except YAMLError:  # Characters that YAML has not at all.
        assume(False)
    assert document.keys() == {"version", "name", "targets", "precisions", "models"}
    (entry,) = document["models"]
    assert entry.keys() <= {"name", "source", "inputs", "dims", "batches"}
    assert entry["source"] == {"path": path} and list(entry["inputs"]) == [name]
    assert entry["inputs"][name].keys() == {"shape"}


FILE = {"path": "net.onnx", "digest": "d" * 64, "size": 1}
ORDERED: dict[str, Any] = {
    "key": "a" * 64, "farm": "0.2.0", "job": "j", "worker": "w", "reference": FILE, "previous": ["hang"],
    "ended": {"kind": "hang", "message": "m", "detail": "d"},
    "order": {"identifier": "net/onnxruntime-cpu/fp32/b1", "target": "onnxruntime/cpu", "pool": "p", "hit": False,
              "model": {"format": "onnx", "files": [FILE]}, "calibration": FILE, "samples": None, "env": {"A": FILE},
              "spec": {"env": {}, "precision": "fp32", "compiler": {"name": "onnxruntime"}}},
}  # fmt: skip


def texts_of(document: Any, *place: str | int) -> Iterator[tuple[str | int, ...]]:
    """Yield the places of all texts in a document."""
    if isinstance(document, str):
        yield place
    for name, value in document.items() if isinstance(document, dict) else ():
        yield from texts_of(value, *place, name)
    for at, value in enumerate(document if isinstance(document, list) else ()):
        yield from texts_of(value, *place, at)


def written(document: dict[str, Any], folder: Path) -> dict[str, str]:
    """Return what `farm reproduce` writes of a work order outside of `inputs`, as whoever reads each file reads it."""
    with patch.object(reproduction, "MODULES", ("spec.py",)):
        reproduction.write(document, folder / "out", StepSettings(), lambda file, path: path.write_bytes(b"x"))
    assert [path.name for path in folder.iterdir()] == ["out"]
    found = {}
    for path in (folder / "out").rglob("*"):
        if path.is_file() and (name := str(path.relative_to(folder / "out"))).partition("/")[0] != "inputs":
            found[name] = path.read_text()
    readme = MarkdownIt("gfm-like", {"linkify": False}).parse(found["README.md"])
    found["README.md"] = str([[token.type, *(each.type for each in token.children or ())] for token in readme])
    for name in ("spec.json", "reproduction.json", "machine.json"):
        found[name] = str(json.loads(found[name]).keys())
    return found


@cache
def harmless() -> dict[str, str]:
    with TemporaryDirectory() as folder:
        return written(ORDERED, Path(folder))


@settings(max_examples=60, deadline=None)
@given(place=st.sampled_from(list(texts_of(ORDERED))), text=HOSTILE)
def test_a_work_order_is_written_down_as_files_of_a_farm_alone(place: tuple[str | int, ...], text: str) -> None:
    """Either it is refused, or what people read, and what `run.sh` runs, is what it is for a harmless one."""
    document = changed(place, text, ORDERED)
    with TemporaryDirectory() as folder:
        try:
            found = written(document, Path(folder))
        except (FarmError, ValueError, OSError):
            return
    assert found == harmless()


@settings(max_examples=100, deadline=None)
@given(
    name=st.one_of(HOSTILE, HOSTILE.map("MIOPEN_DEBUG_{}".format), st.sampled_from(list(MIGRAPHX_ENV))),
    value=st.one_of(HOSTILE, st.sampled_from(["1", "0", "fast", "4"])),
)
def test_a_variable_of_a_cell_has_a_name_and_a_value_that_name_nothing_else(name: str, value: str) -> None:
    """Neither loads code into what starts a child, nor names a file."""
    if compilers()["migraphx"].env_problem(name, value):
        return
    assert re.fullmatch("(MIGRAPHX|MIOPEN|HIPBLASLT)[A-Z0-9_]+", name) and not re.search(r"[\s/=$`]", value)


class Kept:
    """Objects in memory."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}

    def put_object(self, key: str, data: bytes, **_: str) -> None:
        self.objects[key] = data

    def get_object(self, key: str) -> Object | None:
        return Object(key, self.objects[key], "1") if key in self.objects else None


@settings(max_examples=80, deadline=None)
@given(place=st.sampled_from(list(texts_of(ORDERED["order"]))), text=HOSTILE, where=HOSTILE)
def test_a_work_order_with_another_text_is_not_planned(place: tuple[str | int, ...], text: str, where: str) -> None:
    kept: Any = Kept()
    planned = ("main", "b-0123456789abcdef")
    with patch.object(planned_orders, "_lists", {}):
        planned_orders.keep(kept, *planned, [("a" * 64, ORDERED["order"])])
        planned_orders.require_planned(kept, *planned, "a" * 64, ORDERED["order"])
        order = changed(place, text, ORDERED["order"])
        for namespace, build, key, asked in (
            (*planned, "a" * 64, order),
            (where, planned[1], "a" * 64, ORDERED["order"]),
            (planned[0], where, "a" * 64, ORDERED["order"]),
            (*planned, where, ORDERED["order"]),
        ):
            if (namespace, build, key, asked) != (*planned, "a" * 64, ORDERED["order"]):
                with pytest.raises(Untrusted):
                    planned_orders.require_planned(kept, namespace, build, key, asked)


@settings(max_examples=100, deadline=None)
@given(text=HOSTILE)
def test_what_completion_offers_is_a_word_of_a_shell(text: str) -> None:
    """A label is anybody's text, and a shell puts what is offered on its command line as it is."""
    with patch.object(FarmClient, "from_settings", lambda *_, **__: nullcontext()):
        offered = connection._offer(lambda *_: [text, "prod", "branch=a/b"])(None, "")
    assert set(offered) >= {"prod", "branch=a/b"}
    assert [each for each in offered if shlex.quote(each) != each or each.startswith("-")] == []


@pytest.mark.parametrize("job", ["../../../tmp/x", "j-0123456789abcdef/../x", "j-0123456789abcdef\n", ""])
def test_a_message_that_names_no_job_is_dropped(job: str) -> None:
    """A worker that was taken over may send messages to the others; they make folders by the ids of jobs."""

    class Asked(Exception):
        """The store was asked."""

    class Store:
        def __getattr__(self, name: str) -> Any:
            raise Asked

    attempts = Attempts(Store(), None, load_settings(), [], worker="w", node="n")  # type: ignore[arg-type]
    attempts.run(job, 1)
    with pytest.raises(Asked):
        attempts.run("j-0123456789abcdef", 1)
