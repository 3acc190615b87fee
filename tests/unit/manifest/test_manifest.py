"""The manifest: hostile documents are refused fast and small, and everything wrong is said at once with its place."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from farm.errors import ExitCode, ManifestError, Problem, UsageError
from farm.manifest.entries import Manifest
from farm.manifest.parsing import load_manifest, manifest_of, parse_manifest, read_manifest
from farm.manifest.values import runs_after
from farm.manifest.yaml import MAX_BYTES, MAX_DEPTH, MAX_PROBLEMS, read_document
from farm.matrix.cells import expand
from farm.matrix.combinations import combine
from farm.units import parse_duration, parse_size
from tests.support.places import ROOT

SMALL = """\
version: 1
name: nightly
targets: [onnxruntime/cpu]
models:
  - name: net
    source: {path: net.onnx}
"""


def problems(text: str | bytes) -> list[Problem]:
    """Everything that is wrong in a manifest."""
    with pytest.raises(ManifestError) as caught:
        if isinstance(text, str):
            parse_manifest(text, "farm.yaml")
        else:
            read_document(text, "farm.yaml")
    return caught.value.problems


def only(text: str | bytes) -> Problem:
    found = problems(text)
    assert len(found) == 1, "\n".join(map(str, found))
    return found[0]


# --- hostile documents (fault test 22) ----------------------------------------------------------------------------

ALIAS_BOMB = (
    SMALL
    + "a: &a [x, x, x, x, x, x, x, x, x, x]\n"
    + "".join(
        f"{new}: &{new} [{', '.join([f'*{old}'] * 10)}]\n" for old, new in zip("abcdefgh", "bcdefghi", strict=True)
    )
)

HOSTILE: dict[str, tuple[bytes, int, str]] = {
    "alias bomb": (ALIAS_BOMB.encode(), 11, "aliases counted"),
    "ten megabytes": (SMALL.encode() + b"# " + b"x" * 10_000_000, 1, "10000"),
    "a matrix of 1e9 cells": (
        SMALL.encode()
        + b"    dims: {a: ["
        + b",".join(b"%d" % number for number in range(1, 1001))
        + b"], b: ["
        + b",".join(b"%d" % number for number in range(1, 1001))
        + b"], c: ["
        + b",".join(b"%d" % number for number in range(1, 1001))
        + b"]}\n",
        7,
        "1,000,000,000 cells",
    ),
    "duplicate key": (SMALL.encode() + b"name: other\n", 7, "`name` occurs twice"),
    "python tag": (SMALL.encode() + b"salt: !!python/object/apply:os.system [id]\n", 7, "tags are not allowed"),
    "not a number": (SMALL.encode() + b"priority: .nan\n", 7, "not a finite number"),
    "infinite": (SMALL.encode() + b"priority: 1e999\n", 7, "not a finite number"),
    "bad UTF-8": (SMALL.encode() + b"salt: \xff\xfe\n", 7, "not UTF-8"),
    "control character": (SMALL.encode() + b"salt: \x1b[31m\n", 7, "U+001B"),
    "deep lists": (SMALL.encode() + b"salt: " + b"[" * 100_000, 7, "nested deeper"),
    "deep mappings": (SMALL.encode() + b"salt: " + b"{a: " * 50_000, 7, "nested deeper"),
    "deep keys": (b"? " * 100_000, 1, "key must be plain text"),
    "very many values": (b"a:\n" + b"- a\n" * 60_000, 19999, "more than 20000 values"),
    "aliases of mappings": (
        b"a:\n- &m {" + b", ".join(b"k%d: v" % number for number in range(100)) + b"}\n" + b"- *m\n" * 200,
        101,
        "more than 20000 values",
    ),
    "recursive alias": (SMALL.encode() + b"salt: &a [*a]\n", 7, "no anchor"),
    "huge number": (SMALL.encode() + b"priority: " + b"9" * 100_000, 7, "whole number"),
    "second document": (SMALL.encode() + b"---\nversion: 1\n", 7, "second document"),
    "words of a quarter megabyte": (b"version: 1\nname: " + b"x " * 125_000, 2, "is not a name"),
}

MEASURE = """
import json, os, resource, sys
from pathlib import Path
from farm.errors import ManifestError
from farm.manifest.parsing import load_manifest
from farm.matrix.cells import check
from farm.matrix.combinations import combine

def measure(file):
    # A document that takes the reader for hours would show here; how fast it is belongs to no test.
    resource.setrlimit(resource.RLIMIT_CPU, (10, 10))
    try:
        problems = check(combine(load_manifest(file)), {}, {})
    except ManifestError as error:
        problems = error.problems
    Path(file + ".json").write_text(json.dumps({"MiB": imported + most(), "lines": [p.line for p in problems],
                                                "text": [str(p) for p in problems]}))

def most():
    # Not ru_maxrss: that begins with what the process had that started this one.
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status["VmHWM"].split()[0]) / 1024

# In a process for each, which has imported the farm already: what that took counts, some of it twice.
imported = most()
for file in sys.argv[1:]:
    if not os.fork():
        measure(file)
        os._exit(0)
    os.wait()
"""


def test_hostile_documents_are_refused_with_their_line_and_within_200_mib(tmp_path: Path) -> None:
    files = {name: tmp_path / f"{place}.yaml" for place, name in enumerate(HOSTILE)}
    for name, file in files.items():
        file.write_bytes(HOSTILE[name][0])
    subprocess.run([sys.executable, "-c", MEASURE, *map(str, files.values())], cwd=ROOT, check=True)
    for name, (_, line, words) in HOSTILE.items():
        found = json.loads(files[name].with_suffix(".yaml.json").read_text())
        assert any(words in text for text in found["text"]), (name, found["text"])
        assert line in found["lines"], name
        assert found["MiB"] <= 200, name


def test_no_cell_is_made_of_a_matrix_that_is_too_large() -> None:
    manifest = parse_manifest(HOSTILE["a matrix of 1e9 cells"][0].decode(), "farm.yaml")
    with pytest.raises(ManifestError, match=r"farm\.yaml:7.*more than 50,000"):
        expand(combine(manifest), {}, {}, [])


def test_escape_sequences_in_a_manifest_never_reach_the_terminal() -> None:
    assert "\x1b" not in str(only(SMALL.encode() + b"salt: \x1b[31m\n"))


@pytest.mark.parametrize(
    ("text", "place", "hint"),
    [
        ("a:\n  b: 'x\n", (3, 1), "the quote on line 2 is not closed"),
        ("a: 1\nb: [1, 2\n", (3, 1), "the `[` on line 2 is not closed"),
        ("a: {b: 1\n", (2, 1), "the `{` on line 1 is not closed"),
        ("a: [", (1, 5), "the `[` on line 1 is not closed"),
        ("{\n", (2, 1), "the `{` on line 1 is not closed"),
        ("a: [1]\nb: {c: 2,\n", (3, 1), "the `{` on line 2 is not closed"),
        ("a: {b: [2],\n", (2, 1), "the `{` on line 1 is not closed"),
        ("a: [1,\n# the [[old]] one {\n", (3, 1), "the `[` on line 1 is not closed"),
        ("a: &x [1,\n", (2, 1), "the `[` on line 1 is not closed"),
        ("a:\n- ]\n", (2, 3), ""),
        ("a:\n  b: 1\n c: 2\n", (3, 2), "indent all lines of a block equally"),
        ("a: b: c\n", (1, 5), "put quotes around"),
        ("a: @x\n", (1, 4), "put quotes around"),
        ("\ta: 1\n", (1, 1), "YAML allows no tabs"),
        ('a: "C:\\data"', (1, 8), "write `\\\\` for a backslash"),
        ("a: &\n", (1, 5), ""),
        ("a: |\n \n   \n b\n", (4, 2), ""),
        ('a: "\\U00110000"', (1, 1), ""),
        ('a: "\\UFFFFFFFF"', (1, 1), ""),
    ],
)
def test_what_is_not_yaml_is_told_at_its_place_with_what_may_be_wrong(
    text: str, place: tuple[int, int], hint: str
) -> None:
    problem = only(text)
    assert ((problem.line, problem.column), problem.message[:10]) == (place, "not YAML: ")
    assert hint in problem.message
    assert not hint or "while" not in problem.message, "plain words alone"
    assert hint or "not closed" not in problem.message


@pytest.mark.parametrize("end", ["", "b: [", "b: \x01"])
@pytest.mark.parametrize("repeated", [99, 100, 101])
def test_the_reading_ends_at_the_hundredth_problem(repeated: int, end: str) -> None:
    found = problems(("a: 1\n" * (repeated + 1) + end).encode())
    assert len(found) == (1 if end == "b: \x01" else min(MAX_PROBLEMS, repeated + bool(end)))


def test_a_document_of_the_largest_size_is_read() -> None:
    text = SMALL + "# "
    parse_manifest(text + "x" * (MAX_BYTES - len(text)), "farm.yaml")
    assert "more than" in only(text + "x" * MAX_BYTES).message


# --- YAML 1.2 -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("on", "on"), ("no", "no"), ("off", "off"), ("2027-01-31", "2027-01-31"), ("12:30:00", "12:30:00"),
        ("true", True), ("TRUE", True), ("~", None), ("", None), ("null", None), ("010", 10), ("0x10", 16), ("0o10", 8),
        ("-3", -3), ("1e-3", 1e-3), (".5", 0.5), ("7.2", 7.2), ("1_000", "1_000"), ("'1'", "1"), ('"true"', "true"),
        ("! 12", 12), ("4h", "4h"), ("True", True), ("false", False), ("False", False), ("FALSE", False),
    ],
)  # fmt: skip
def test_scalars_follow_the_core_schema(text: str, value: object) -> None:
    data = read_document(f"a: {text}\n", "x").data["a"]
    assert (data, type(data)) == (value, type(value))


def test_aliases_and_a_byte_order_mark_are_fine() -> None:
    document = read_document("\ufeffa: &one {b: 1}\nc: *one\n".encode(), "x")
    assert document.data == {"a": {"b": 1}, "c": {"b": 1}}
    assert document.place(("c", "b"), key=True) == (1, 10)
    assert only("a: *one\nb: *two\n").message == "no anchor &one before this alias"


def test_a_place_that_leaves_the_document_is_the_last_on_the_way() -> None:
    document = read_document("a: {b: 1}\nc: [d, e]\n", "x")
    places = [document.place(path) for path in (("a", "x", "b"), ("c", 1), ("c", 2, 0), ("c", "x"))]
    assert places == [(1, 4), (2, 8), (2, 4), (2, 4)]
    keys = [document.place(path, key=True) for path in (("a",), ("a", "b"), ("c", 1), ("c", 2))]
    assert keys == [(1, 1), (1, 5), (2, 8), (2, 1)]


# --- messages about a wrong manifest -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ("    samples: {pth: a.npz}\n", "`path`"),
        ("    reference: {modl: other}\n", "`model`"),
        ("concurrency: {groop: nightly}\n", "`group`"),
        ("datasets: {images: {pth: a.npz}}\n", "`path`"),
    ],
)
def test_a_misspelt_field_is_told_wherever_it_is(more: str, said: str) -> None:
    assert said in " ".join(problem.hint for problem in problems(SMALL + more))


def test_all_problems_come_at_once_in_the_order_of_the_file_each_with_its_place() -> None:
    text = SMALL + (
        "    precision: [fp16]\n"
        "    calibration: imagenet\n"
        "    precisions: [fp16, int9, fp16]\n"
        "datasets: {images: {path: a.npz}}\n"
        "override: []\n"
        "limits: {time: 4 hours}\n"
        "expected: [{model: net, kind: acuracy}]\n"
    )
    found = problems(text)
    assert [(p.line, p.column) for p in found] == [(7, 5), (8, 18), (9, 24), (9, 30), (11, 1), (12, 16), (13, 31)]
    lines = [f"{p.message} | {p.hint}" for p in found]
    assert "unknown field `models[0].precision`" in lines[0]
    assert "did you mean `precisions`?" in lines[0]
    assert "no dataset `imagenet`" in lines[1]
    assert "did you mean `images`?" in lines[1] or "known: images" in lines[1]
    assert "did you mean `int8`?" in lines[2]
    assert "`fp16` occurs twice" in lines[3]
    assert "did you mean `overrides`?" in lines[4]
    assert "90s" in lines[5]
    assert "did you mean `accuracy`?" in lines[6]


def test_a_problem_prints_its_place_the_line_a_caret_and_a_way_out() -> None:
    problem = only(SMALL.replace("onnxruntime/cpu", "onnxruntime/gpu"))
    assert str(problem).splitlines() == [
        "farm.yaml:3:11: targets[0]: onnxruntime has no device `gpu`",
        "    targets: [onnxruntime/gpu]",
        "              ^",
        "    did you mean `onnxruntime/cpu`?",
    ]
    assert str(only(SMALL + "salt: 1")).splitlines()[1:] == ["    salt: 1", "          ^"], "on the last line, too"


def test_a_size_is_said_once_and_a_batch_has_a_sample() -> None:
    shapes = "    batches: [1]\n    dims: {past: 3}\n    shapes: {decode: {past: 1, seq: 1, batch: 0}}\n"
    assert [problem.message for problem in problems(SMALL + shapes)] == [
        "shape `decode` gives `past` a size, and so does `dims`",
        "shape `decode` gives `batch` a size, and so does `batches`",
        "a batch has at least one sample",
    ]


def test_a_sweep_takes_the_place_of_batches() -> None:
    both = problems(SMALL + "    sweep: [1, 8]\n    batches: [4]\n")[0]
    assert both.message == "`batches` and `sweep` mean the same"
    assert (both.line, both.column) == (8, 5)
    other = only(SMALL + "    batches: [4]\n    dims: {seq: 1, batch: 1}\n")
    assert other.message == "`batches` and `dims.batch` mean the same"
    swept = parse_manifest(SMALL + "    sweep: [1, 8]\n").models[0]
    assert (swept.sizes, swept.sweep and swept.sweep.metric) == ({"batch": (1, 8)}, "throughput")
    assert "has no value" in only(SMALL + "    sweep:\n").message


@pytest.mark.parametrize(
    "entry", ["shapes: {a: {batch: []}}", "inputs: {x: {shap: [1]}}", "source: {path: [1]}", "dims: {batch: 0}"]
)
def test_a_wrong_field_of_a_model_is_found_on_its_line(entry: str) -> None:
    text = SMALL.replace("    source: {path: net.onnx}\n", "") if entry.startswith("source") else SMALL
    line = 6 if entry.startswith("source") else 7
    assert problems(text + f"    {entry}\n")[0].line == line


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("{path: a, package: b/c.onnx}", "exactly one of"),
        ("{}", "exactly one of"),
        ("{https: 'https://x/y.onnx'}", "needs `sha256`"),
        ("{https: 'http://x/y.onnx', sha256: " + "0" * 64 + "}", "does not look right"),
        ("{https: 'https://x:99999/y.onnx', sha256: " + "0" * 64 + "}", "Port out of range"),
        ("{https: 'https://[::1/y.onnx', sha256: " + "0" * 64 + "}", "Invalid IPv6 URL"),
        ("{https: 'https:///y.onnx', sha256: " + "0" * 64 + "}", "names no host"),
        ("{path: a, sha256: " + "0" * 64 + "}", "`sha256` belongs to"),
        ("{s3: 'bucket/key'}", "does not look right"),
        ("{hf: owner/name, file: net.onnx}", "`hf` needs `revision`"),
        ("{hf: owner/name}", "`hf` needs `revision` and `file`"),
        ("{path: a, file: net.onnx}", "`file` belongs to `hf`"),
        ("{package: ../../etc/passwd}", "does not look right"),
    ],
)
def test_a_source_is_one_place(change: str, message: str) -> None:
    assert message in only(SMALL.replace("{path: net.onnx}", change)).message


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("conversion: {opset: 18}", "`conversion` belongs to"),
        ("format: torch\n    conversion: {to: tf}", "only a SavedModel can be converted to `tf`"),
        ("format: tf\n    outputs: [a, a]", "the same output occurs twice"),
        ("outputs: [a]", "`outputs` belongs to `format: tf`"),
        ("reference: {model: a.onnx}", "`reference` needs `samples`"),
        ("format: tf\n    samples: {path: a.npz}\n    reference: {model: a.onnx}", "`reference` is for ONNX models"),
        ("samples: {path: a.npz, sha256: " + "0" * 64 + "}", "`sha256` belongs to `https`"),
        ("samples: {path: a.npz, seed: 1}", "`seed` belongs to `generate`"),
        ("inputs: {x: {range: [1, 0]}}", "the lower end 1 is above the upper end 0"),
        ("budgets: {throughput: 0}", "must be greater than zero, not 0"),
    ],
)
def test_entries_of_a_model_that_do_not_go_together_say_so(entry: str, message: str) -> None:
    assert message in problems(SMALL + f"    {entry}\n")[0].message


def test_what_has_to_be_converted_is_read_where_the_manifest_is() -> None:
    text = SMALL.replace("{path: net.onnx}", "{s3: 's3://models/net.pt'}")
    assert parse_manifest(text, "farm.yaml").models[0].source.s3 == "s3://models/net.pt"
    assert "what has to be converted is read here" in only(text + "    format: torch\n").message


@pytest.mark.parametrize("place", ["a: ", "? "])
def test_lists_may_be_as_deep_in_a_key_as_in_a_value(place: str) -> None:
    def is_too_deep(lists: int) -> bool:
        found = [problem.message for problem in problems(f"{place}{'[' * lists}{']' * lists}\n")]
        return found[-1] == f"nested deeper than {MAX_DEPTH}"

    assert (is_too_deep(MAX_DEPTH - 1), is_too_deep(MAX_DEPTH)) == (False, True), "the document is the first level"


def test_an_exclusion_of_nothing_is_refused() -> None:
    assert "write at least one of `model`" in only(SMALL + "exclude: [{}]\n").message


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("name: Nightly Build", "`nightly-build` would do"),
        (f"name: {'A' * 101}", f"`{'a' * 100}` would do"),
        ("targets: [mi300]", "did you mean `mi300x`?"),
        ("targets: [gfx94x]", "known:"),
        ("targets: [onnx/cpu]", "known: migraphx, onnxruntime"),
        ("targets: [mi300x, migraphx/mi300x]", "occurs twice"),
        ("max-parallel: 0", "from 1 to 100000"),
        ("fail_fast: true", "did you mean `fail-fast`?"),
        ("tuning: quik", "did you mean `quick`?"),
        ("verify: {tolerance: {int9: 0.1}}", "did you mean `int8`?"),
        ("verify: {tolerance: {int8: -1}}", "greater than zero"),
        ("options: {levle: tuned}", "did you mean `level`?"),
        ("options: {level: fast}", "must be one of standard, tuned"),
        ("options: {per_channel: 1}", "must be true or false"),
        ("exclude: [{reason: slow}]", "at least one of"),
        ("expected: [{model: net, kind: accuracy, until: 2027-02-30}]", "no day 2027-02-30"),
        ("salt:", "must be text"),
        ("models: []", "at least one entry"),
        ("datasets: {a: {path: x, generate: 3}}", "exactly one of"),
        ("datasets: {a: {dataset: b}}", "cannot name another"),
        ("limits: {memory: 32 gigs}", "32GiB"),
        ("version: 2", "write 1"),
    ],
)
def test_a_wrong_value_is_answered_with_what_would_do(line: str, message: str) -> None:
    field = line.partition(":")[0]
    kept = [each for each in SMALL.splitlines() if not each.startswith(f"{field}:")]
    if field == "models":
        kept = kept[: kept.index("  - name: net")]
    found = problems("\n".join([*kept, line]) + "\n")
    assert any(message in f"{problem.message} {problem.hint}" for problem in found), "\n".join(map(str, found))


@pytest.mark.parametrize(
    ("field", "column", "message"),
    [
        ("options: {levle: tuned}", 11, "no compiler has an option `levle`"),
        ("options: {exhaustive_tune: true}", 11, "`exhaustive_tune` is not an option here"),
        ("options: {level: 7}", 18, "option `level`"),
        ("env: {MIGRAPHX_DISABLE_MLIT: true}", 7, "`MIGRAPHX_DISABLE_MLIT` is not an environment variable"),
        ("env: {MIGRAPHX_DISABLE_MLIR: a}", 30, "`MIGRAPHX_DISABLE_MLIR` is true or false"),
        ("env: {HIPBLASLT_TUNING_OVERRIDE_FILE: a}", 39, "`HIPBLASLT_TUNING_OVERRIDE_FILE` names a file"),
    ],
)
def test_an_option_or_a_variable_is_wrong_in_its_name_or_in_its_value(field: str, column: int, message: str) -> None:
    problem = only(SMALL + f"{field}\n")
    assert message in problem.message
    assert (problem.line, problem.column) == (7, column)


def test_two_unknown_targets_are_not_the_same_one() -> None:
    messages = [problem.message for problem in problems(SMALL.replace("[onnxruntime/cpu]", "[onnx/cpu, onnx/gpu]"))]
    assert len(messages) == 2 and not any("twice" in message for message in messages)


def test_a_manifest_of_which_only_fields_are_unknown_is_read_without_them(tmp_path: Path) -> None:
    """So that its files are looked at, too."""
    file = tmp_path / "farm.yaml"
    unknown = SMALL.replace("{path: net.onnx}", "{path: net.onnx, more: 1}")
    file.write_text(unknown + "some: 1\n")
    manifest, found = read_manifest(file)
    assert manifest and (manifest.name, manifest.models[0].source.path) == ("nightly", "net.onnx")
    assert [problem.message for problem in found] == [
        "unknown field `models[0].source.more`",
        "unknown field `some`",
    ]
    file.write_text(unknown + "salt: 1\n")
    assert (read_manifest(file)[0], len(read_manifest(file)[1])) == (None, 2)


def test_a_name_that_is_used_twice_says_where_it_was_first() -> None:
    problem = only(SMALL + "  - name: net\n    source: {path: other.onnx}\n")
    assert "first on line 5" in problem.message
    assert problem.line == 7


def test_a_model_without_targets_is_reported_on_its_line() -> None:
    problem = only(SMALL.replace("targets: [onnxruntime/cpu]\n", ""))
    assert (problem.line, "no targets" in problem.message) == (4, True)


def test_what_is_wrong_in_a_manifest_that_a_program_made_is_shown_in_its_text() -> None:
    content = {**read_document(SMALL, "x").data, "salt": 1}
    with pytest.raises(ManifestError) as caught:
        manifest_of(content, Path())
    assert str(caught.value).splitlines() == [
        "manifest:15:10: salt: must be text, not 1",
        '     "salt": 1',
        "             ^",
    ]


def test_a_missing_file_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No such file") as caught:
        load_manifest(tmp_path / "farm.yaml")
    assert caught.value.exit_code is ExitCode.USAGE


# --- what a right manifest means ----------------------------------------------------------------------------------


def read(text: str) -> Manifest:
    return parse_manifest(text, "farm.yaml")


LISTS = """\
version: 1
name: all
targets: [onnxruntime/cpu]
toolchains: [onnxruntime1.30]
precisions: [fp32]
packs: [onnxruntime]
debug: {trace: [mlir]}
triggers: [{schedule: 17 3 * * *}]
models:
  - name: net
    source: {path: net.pb}
    format: tf
    outputs: [y]
    inputs: {x: {shape: [batch, 3]}}
    batches: [1]
    targets: [mi300x]
    precisions: [fp16]
    packs: []
exclude: [{model: net, precision: fp32}]
include: [{model: net, target: gfx1100, precision: fp16}]
overrides: [{select: {model: net}, salt: a}]
expected: [{model: net, kind: hang}]
"""


def test_a_list_is_taken_wherever_a_manifest_may_have_one_and_a_models_own_count() -> None:
    manifest = parse_manifest(LISTS, "farm.yaml")
    (model,) = manifest.models
    assert (manifest.targets, model.targets) == (("onnxruntime/cpu",), ("mi300x",))
    assert (manifest.precisions, model.precisions) == (("fp32",), ("fp16",))
    assert (manifest.packs, model.packs) == (("onnxruntime",), ())
    assert (model.outputs, model.inputs["x"].shape, manifest.debug.trace) == (("y",), ("batch", 3), ("mlir",))
    rest = (manifest.toolchains, manifest.triggers, manifest.exclude, manifest.include, manifest.overrides)
    assert [len(each) for each in (*rest, manifest.expected)] == [1] * 6


def test_short_spellings_mean_the_long_ones() -> None:
    text = SMALL + "    calibration: a\n    batches: [1, 8]\ndatasets: {a: {path: a.npz}}\nverify: off\ntuning: quick\n"
    manifest = read(text)
    model = manifest.models[0]
    assert model.calibration is not None
    assert (model.calibration.kind, model.calibration.dataset) == ("dataset", "a")
    assert model.sizes == {"batch": (1, 8)}
    assert (manifest.verify.mode, manifest.tuning.mode) == ("off", "quick")


def test_pairs_are_spelt_with_a_minus_once_read() -> None:
    assert read(SMALL + "precisions: [int8+fp16, fp8-bf16]\n").precisions == ("int8-fp16", "fp8-bf16")


def test_tolerances_are_by_precision_and_output() -> None:
    assert read(SMALL + "verify: {tolerance: 0.1}\n").verify.tolerance == {"*": {"*": 0.1}}
    text = SMALL + "verify: {tolerance: {int8: 0.2, fp16: {logits: 0.05, '*': 0.01}}}\n"
    assert read(text).verify.tolerance == {"int8": {"*": 0.2}, "fp16": {"logits": 0.05, "*": 0.01}}


def test_scalars_and_sums_are_shapes() -> None:
    model = read(SMALL + "    inputs: {a: {shape: []}, b: {shape: [batch, past + seq, 3]}, c: {}}\n").models[0]
    assert model.inputs["a"].has_shape
    assert model.inputs["b"].shape == ("batch", "past+seq", 3)
    assert not model.inputs["c"].has_shape


def test_everything_keeps_its_line() -> None:
    manifest = read(SMALL)
    assert manifest.written.place(("models", 0, "name"))[0] == 5
    assert manifest.written.place(("models", 0, "source", "path"))[0] == 6
    assert manifest.written.problem("x", ("targets", 0)).column == 11


@pytest.mark.parametrize(("text", "seconds"), [("90s", 90), ("4h", 14400), ("1.5d", 129600), ("30m", 1800)])
def test_durations(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize(("text", "size"), [("32GiB", 32 << 30), ("512MiB", 512 << 20), ("1.5kB", 1500), ("7B", 7)])
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "4", "4 h", "h", "-1s", "1e3s", "0s", "1w", 4, None, "1" * 30 + "s"])
def test_what_is_no_duration(text: object) -> None:
    with pytest.raises(ValueError, match="duration"):
        parse_duration(text)


def test_reading_a_manifest_needs_no_heavy_import() -> None:
    code = "import sys, farm.manifest, farm.matrix; print([m for m in ('onnx', 'numpy', 'httpx') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("trigger", "message"),
    [
        ('{schedule: "17 25 * * *"}', "`17 25 * * *` is not a schedule: bad hour"),
        ('{schedule: "0 0 30 2 *"}', "`0 0 30 2 *` is not a schedule: bad day-of-month"),
        (f'{{schedule: "0 0 {"9" * 90} * *"}}', "is not a schedule: bad day-of-month"),
        ('{schedule: "0 0 * * *", timezone: Europe/Berlim}', "unknown time zone `Europe/Berlim`"),
        ('{schedule: "0 0 * * *", timezone: a/b/c}', "unknown time zone `a/b/c`"),
        ('{schedule: "0 0 */31 * 1#2"}', "`0 0 */31 * 1#2` is never due"),
        ("{toolchain: mi300y}", "unknown target `mi300y`"),
    ],
)
def test_a_trigger_that_can_never_fire_is_refused_with_its_place(trigger: str, message: str) -> None:
    with pytest.raises(ManifestError, match=re.escape(message)) as caught:
        parse_manifest(SMALL + f"triggers:\n  - {trigger}\n")
    (problem,) = caught.value.problems
    assert problem.line == SMALL.count("\n") + 2


def test_schedules_follow_the_clock_of_their_time_zone() -> None:
    """Berlin skips 02:30 on 28 March 2027, and has it twice on 31 October."""

    def runs(day: str, schedule: str, count: int) -> list[str]:
        start = datetime.fromisoformat(f"{day}T00:00:00+00:00").timestamp()
        found = islice(runs_after(schedule, "Europe/Berlin", start), count)
        return [datetime.fromtimestamp(when, UTC).strftime("%d %H:%M") for when in found]

    assert runs("2027-03-27", "30 2 * * *", 3) == ["27 01:30", "28 01:00", "29 00:30"]
    assert runs("2027-10-30", "30 2 * * *", 3) == ["30 00:30", "31 00:30", "01 01:30"]
    assert runs("2027-01-01", "0 12 * * FRI", 2) == ["01 11:00", "08 11:00"]


@given(
    hours=st.floats(0, 24 * 366),
    timezone=st.sampled_from(["Europe/Berlin", "America/New_York", "Africa/Cairo", "Australia/Lord_Howe", "UTC"]),
    schedule=st.sampled_from(["59 2 * * *", "30 1 * * *", "*/20 * * * *", "15 0-3 * * 0"]),
)
@example(hours=7129 + 1 / 12, timezone="Europe/Berlin", schedule="59 2 * * *")  # In the hour that October repeats.
def test_a_schedule_is_never_due_in_the_past(hours: float, timezone: str, schedule: str) -> None:
    """Else a trigger fires at every look until that hour is over."""
    now = datetime(2026, 1, 1, tzinfo=UTC).timestamp() + hours * 3600
    due = [now, *islice(runs_after(schedule, timezone, now), 3)]
    assert due == sorted(set(due))


@pytest.mark.parametrize(("controls", "said"), [(1, "2:4"), (2, "binary file")])
def test_two_control_characters_make_a_file_binary(controls: int, said: str) -> None:
    """One is a mistake with a place."""
    content = b"# " + b"x" * 900 + b"\na: " + b"\x01" * controls
    with pytest.raises(ManifestError) as caught:
        read_document(content, "farm.yaml")
    assert said in str(caught.value)
