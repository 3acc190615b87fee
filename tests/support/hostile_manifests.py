"""Hostile manifests: what a document can do to who reads it. Made up, each with its name and the line at fault.

Run as a program it reads all of them, as `farm lint` does, and prints what that took.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

HEAD = "version: 1\nname: hostile\ntargets: [onnxruntime/cpu]\n"
MODELS = "models: [{name: net, source: {path: net.onnx}}]\n"
SOUND = HEAD + MODELS
HONEST = f"{HEAD}models: [{', '.join(f'{{name: n{number}, source: {{path: net.onnx}}}}' for number in range(1000))}]\n"
"""What nobody means ill by, and what it costs is the measure for the others."""

TAGS = ("!!python/object/apply:os.system ['true']", "!!python/name:os.system", "!!binary aGk=", "!own x", "!!set {a}")
NAMES = (
    "../net", "/etc/passwd", "a b", "net;true", "$(true)", "`true`", "NET", "é", "-", ".", "..", "a\\u0000b", "\\e[31m",
)  # fmt: skip
"""What must not name a model."""

OPENED_BY_THE_CLIENT = {
    "source outside a package", "package by a path", "a device", "a folder of processes", "no file", "nul in a path",
    "a path of 4 kB",
}  # fmt: skip
"""What only the submitting side opens: the farm gets the digest of what was read there, and never looks at the path."""


def with_model(text: str) -> str:
    """A manifest of one model, whose line 5 begins with `text`."""
    return f"{HEAD}models:\n  - {{name: net, source: {{path: net.onnx}}, {text}}}\n"


def with_source(text: str) -> str:
    """A manifest of one model with that source, on line 5."""
    return f"{HEAD}models:\n  - {{name: net, source: {{{text}}}}}\n"


def hostile() -> Iterator[tuple[str, bytes, int]]:
    """Yield name, bytes and the line at fault (0: any)."""
    for name, text, line in _texts():
        yield name, text.encode(errors="surrogateescape"), line
    yield "10 MB", (SOUND + "# " + "x" * 10_000_000).encode(), 1
    yield "10 MB of lists", b"[" * 10_000_000, 1
    yield "not UTF-8", SOUND.encode() + b"labels: {a: \xff\xfe}\n", 5
    yield "UTF-16", SOUND.encode("utf-16"), 1
    yield "cut in a character", SOUND.encode() + "# é".encode()[:-1], 5
    yield "NUL", SOUND.encode() + b"labels: {a: \x00}\n", 5
    yield "a program", b"\x7fELF" + bytes(4096), 1
    yield "empty", b"", 1


def _texts() -> Iterator[tuple[str, str, int]]:
    laughs = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n"
    laughs += "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 12))
    yield "alias bomb", laughs, 0
    yield "alias bomb in a manifest", f"{SOUND}labels: &a {{b: x}}\n" + laughs, 0
    yield "alias of itself", f"{HEAD}models: &a [*a]\n", 4
    yield "alias of nothing", f"{HEAD}models: *a\n", 4
    yield "merge keys", f"{HEAD}models: [{{<<: {{name: net}}, source: {{path: net.onnx}}}}]\n", 4
    yield "duplicate key", f"{SOUND}name: other\n", 5
    yield "duplicate key inside", f"{HEAD}models: [{{name: net, name: other, source: {{path: net.onnx}}}}]\n", 4
    for tag in TAGS:
        yield f"tag {tag.split()[0]}", f"{SOUND}labels: {tag}\n", 5
    for number in (".nan", "-.inf", "1e999", "9" * 400 + "e9"):
        yield f"number {number[:8]}", with_model(f"verify: {{tolerance: {number}}}"), 5
    yield "whole number of a thousand digits", with_model(f"limits: {{time: {'9' * 1000}}}"), 5
    yield "deep lists", f"{SOUND}labels: {'[' * 60_000}\n", 5
    yield "deep maps", f"{SOUND}labels: {'{a: ' * 30_000}\n", 5
    yield "deep blocks", SOUND + "".join(f"{' ' * depth}a:\n" for depth in range(600)), 0
    yield "many keys", SOUND + "".join(f"k{number}: 1\n" for number in range(20_000)), 0
    yield "one key of 200 kB", f"{SOUND}{'k' * 200_000}: 1\n", 5
    yield "one line of 250 kB", f"{SOUND}labels: {{a: {'x' * 250_000}}}\n", 0
    yield "long name", SOUND.replace("hostile", "h" * 100_000), 2
    yield "long name of a model", SOUND.replace("name: net", "name: " + "n" * 10_000), 4
    yield "spaces", SOUND + " " * 200_000 + "x", 0
    yield "quotes without end", f'{SOUND}labels: {{a: "{"x" * 100_000}\n', 0
    yield "tabs", f"{SOUND}\tlabels: 1\n", 5
    yield "two documents", f"{SOUND}---\n{SOUND}", 5
    yield "a list", "- 1\n", 1
    yield "a word", "hello\n", 1
    yield "unknown field", f"{SOUND}on: push\n", 5
    yield "control characters", f"{SOUND}labels: {{a: \x1b[31m}}\n", 5
    axis = ", ".join(map(str, range(1, 1001)))
    yield (
        "a thousand million cells",
        with_model(f"inputs: {{x: {{shape: [a, b, c]}}}}, dims: {{a: [{axis}], b: [{axis}], c: [{axis}]}}"),
        0,
    )
    for name in NAMES:
        yield (
            f"model {name}",
            HEAD + f'models: [{{name: "{name}", source: {{path: net.onnx}}}}]\n'.replace("\\$", "$"),
            4,
        )
    yield "a name that is a path", SOUND.replace("name: hostile", "name: ../../main"), 2
    yield "a target that is a path", SOUND.replace("onnxruntime/cpu", "../../cpu"), 3
    yield "source outside a package", with_source("package: onnx/../../../../etc/passwd"), 5
    yield "package by a path", with_source("package: ../../etc/passwd"), 5
    yield "a web page", with_source("https: 'http://169.254.169.254/', sha256: " + "ab" * 32), 5
    yield "a file's address", with_source(f"https: 'file:///etc/passwd', sha256: {'ab' * 32}"), 5
    yield "no digest", with_source("https: 'https://example.org/net.onnx'"), 5
    yield "a bucket that is a path", with_source("s3: 's3://../../net.onnx'"), 5
    yield "a bucket of nobody", with_source("s3: 'file:///etc/passwd'"), 5
    yield "a device", with_source("path: /dev/zero"), 5
    yield "a folder of processes", with_source("path: /proc/self/mem"), 5
    yield "no file", with_source("path: ../../../../no/such/file"), 5
    yield "nul in a path", with_source('path: "net\\0.onnx"'), 5
    yield "a path of 4 kB", with_source(f"path: {'a/' * 2048}net.onnx"), 5
    yield "everything", with_source("glob: '/**/*'"), 5
    yield "everything above", with_source("glob: '../../../**'"), 5
    yield "a variable that loads code", f"{SOUND}env: {{LD_PRELOAD: /tmp/x.so}}\n", 5
    yield "a variable that finds code", f"{SOUND}env: {{PYTHONPATH: /tmp}}\n", 5
    yield "a generator of the system", with_model("calibration: {generator: 'os:system'}, precisions: [int8]"), 5
    yield "negative batch", with_model("batches: [-1]"), 5
    yield "endless batch", with_model("batches: [99999999999999999999]"), 5
    yield "a range of everything", with_model("dims: {batch: {min: 1, max: 1e12}}"), 5


def main(folder: Path) -> None:
    """Read every manifest in `folder`, a file each; print the slowest, in CPU seconds, the memory, and all problems.

    `honest` is what `HONEST` takes, before and after them: the slower time.
    """
    from farm.client.authoring import lint

    def seconds(path: Path) -> float:
        start = time.process_time()
        lint(path)
        return time.process_time() - start

    honest, found, slowest = folder / "honest.yaml", {}, (0.0, "")
    honest.write_text(HONEST)
    lint(honest)  # what is imported at first use is not a cost of a manifest
    before = seconds(honest)
    for index, (name, content, _) in enumerate(hostile()):
        path = folder / f"{index}.yaml"
        path.write_bytes(content)
        start = time.process_time()
        problems = lint(path)
        slowest = max(slowest, (time.process_time() - start, name))
        found[name] = [(problem.line, problem.message) for problem in problems]
    # Not ru_maxrss, which begins with that of the process that started this one.
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    memory = int(status["VmHWM"].split()[0]) * 1024
    after = seconds(honest)
    print(json.dumps({"slowest": slowest, "honest": max(before, after), "memory": memory, "problems": found}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
