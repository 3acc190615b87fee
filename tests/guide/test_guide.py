"""Every command and snippet of the user's guide and of the README is run, or says above it why not.

A fenced block may have marks, HTML comments on the lines above it:

    set-up              run, or written, once; every page starts with what it leaves
    file: NAME          written to that file; a manifest is read with its models and data, a Python file is parsed
    needs: A, B         run where they are: `migraphx`, the extras `torch`, `tensorflow`, or a program
    not run: REASON     checked as far as that goes: syntax, options of `farm`, fields of manifests

Blocks of a page run in order in one folder, while one embedded farm is up. A `text` block is what the block
before it prints: each line has to come, in order; `…` stands for anything. A `yaml` block without a name is fields that
replace those of the page's last manifest, which is `farm.yaml` at first.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from farm.client.freezing import freeze
from farm.manifest.parsing import parse_manifest
from farm.settings import load_settings
from farm.targets.compilers import MIGRAPHX
from tests.support.command_line import whole_command_line
from tests.support.farm_command import command
from tests.support.places import ROOT

GUIDE = ROOT / "docs" / "guide"
BLOCK = re.compile(r"^(?P<marks>(?:<!--.*-->\n)*)```(?P<kind>\w*)\n(?P<text>(?s:.*?))^```$", re.M)
MARK = re.compile(r"<!-- (?P<name>[a-z -]+?)(?:: (?P<value>.+?))? -->")
KINDS = ("sh", "python", "yaml", "text")
SHARED = "farm.yaml"
"""The manifest that every page starts with."""
yaml = YAML(typ="safe", pure=True)


@dataclass(frozen=True)
class Block:
    """One fenced block of a page, with its marks."""

    page: Path
    line: int
    kind: str
    text: str
    marks: dict[str, str]

    @property
    def needs(self) -> list[str]:
        return [name.strip() for name in self.marks.get("needs", "").split(",") if name]


def blocks_of(page: Path) -> list[Block]:
    text, found = page.read_text(), []
    for match in BLOCK.finditer(text):
        marks = {mark["name"]: mark["value"] or "" for mark in MARK.finditer(match["marks"])}
        line = text.count("\n", 0, match.start("kind")) + 1
        found.append(Block(page, line, match["kind"], match["text"], marks))
    return found


CONTENTS = GUIDE / "README.md"
PAGES = [
    CONTENTS,
    *dict.fromkeys(GUIDE / name for name in re.findall(r"\(([\w-]+\.md)\)", CONTENTS.read_text())),
    ROOT / "README.md",
]
"""In the order of the table of contents: what one page builds is a hit for the next."""

BLOCKS = [block for page in PAGES for block in blocks_of(page)]


def case(block: Block) -> Any:
    marks = [pytest.mark.migraphx] if "migraphx" in block.needs else []
    name = "README.md" if block.page.parent == ROOT else f"guide/{block.page.name}"
    return pytest.param(block, id=f"{name}:{block.line}", marks=marks)


# --- What runs during the blocks -------------------------------------------------------------------------------------


class Shell:
    """Runs blocks: a farm that is up, a folder for each page, and `farm` and `python` on the path."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name, words in {"farm": "-m farm", "python": ""}.items():
            script = folder / "bin" / name
            script.parent.mkdir(exist_ok=True)
            script.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {words} "$@"\n')
            script.chmod(script.stat().st_mode | stat.S_IXUSR)
        (folder / "home").mkdir()
        environ = {
            "HOME": str(folder / "home"),
            "XDG_CONFIG_HOME": str(folder / "home" / "config"),
            "XDG_CACHE_HOME": str(folder / "home" / "cache"),
            "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
            "FARM_MEASURE_SECONDS": "0.1",
        }
        converters = {f"FARM_{extra.upper()}_PYTHON": path for extra, path in load_settings().converters.items()}
        self.farm = command(folder, **environ, **converters)
        found = importlib.util.find_spec("migraphx")
        if found and found.origin:
            module = Path(found.origin).resolve()
            self.farm.environ["FARM_MIGRAPHX_PATH"] = str(module.parent)
            self.farm.environ["PYTHONPATH"] += f":{module.parent}"
        self.up = self.farm.start("up")
        assert self.up.stdout is not None
        assert any("http://" in line for line in self.up.stdout), "the farm did not start"
        self.start = folder / "start"
        self.start.mkdir()
        (self.start / "configs").symlink_to(ROOT / "configs")
        for block in BLOCKS:
            if "set-up" in block.marks and "file" in block.marks:
                (self.start / block.marks["file"]).write_text(block.text)
            elif "set-up" in block.marks:
                self.run(block, self.start)
        self.last: dict[Path, str] = {}
        """By page what its last block printed."""
        self.manifest: dict[Path, Path] = {}
        """By page the last manifest."""

    def of(self, page: Path) -> Path:
        """Return the folder in which the blocks of a page run."""
        folder = self.folder / ("project" if page.parent == ROOT else page.stem)
        if not folder.exists():
            shutil.copytree(self.start, folder, symlinks=True)
        return folder

    def run(self, block: Block, folder: Path) -> str:
        """Run a shell or Python block and return what it printed; it has to end with 0."""
        python = next((load_settings().converters[name] for name in block.needs if name in ("torch", "tensorflow")), "")
        words = ["bash", "-euo", "pipefail", "-c"] if block.kind == "sh" else [python or sys.executable, "-c"]
        done = subprocess.run(
            [*words, block.text],
            cwd=folder,
            env=self.farm.environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=900,
            check=False,
        )
        assert done.returncode == 0, f"exit code {done.returncode}:\n{done.stdout}"
        return done.stdout


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shell]:
    shell = Shell(tmp_path_factory.mktemp("guide"))
    yield shell
    shell.up.send_signal(2)
    shell.up.communicate(timeout=120)


# --- The tests ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", [case(block) for block in BLOCKS if "not run" not in block.marks])
def test_block(block: Block, shell: Shell) -> None:
    """It does what the page shows it for."""
    for name in block.needs:
        look_for(name, shell)
    folder = shell.of(block.page)
    if name := block.marks.get("file", ""):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(block.text)
    if block.kind == "yaml":
        manifest = shell.manifest[block.page] = (
            folder / name if name else shell.manifest.get(block.page, folder / SHARED)
        )
        if not name:
            fields = yaml.load(manifest) | yaml.load(block.text)
            yaml.dump(fields, manifest)
        freeze(manifest, cache=shell.folder / "home", pythons=load_settings().converters)
    elif block.kind == "text":
        assert block.page in shell.last, "nothing was printed before it"
        shown = shell.last[block.page]
        for line in block.text.splitlines():
            pattern = r"\s+".join(re.escape(word).replace("…", ".*?") for word in line.split())
            found = re.search(pattern, shown)
            assert found, f"not printed: {line}\n{shell.last[block.page]}"
            shown = shown[found.end() :]
    elif name:
        check_syntax(block)
    elif "set-up" not in block.marks:
        shell.last[block.page] = shell.run(block, folder)


@pytest.mark.parametrize("block", [case(block) for block in BLOCKS if "not run" in block.marks])
def test_block_that_is_not_run(block: Block) -> None:
    """It says why, and what can be checked of it is right."""
    assert len(block.marks["not run"].split()) >= 3, "say what it needs"
    check_syntax(block)


def test_every_block_is_run_or_says_why_not() -> None:
    """No page is left out, and no block escapes the other tests by its kind, its marks or its place."""
    assert {page.name for page in GUIDE.iterdir()} == {page.name for page in PAGES if page.parent == GUIDE}
    for page in PAGES:
        fences = [line for line in page.read_text().splitlines() if line.lstrip().startswith("```")]
        assert len(fences) == 2 * len(blocks_of(page)), f"{page.name}: a block is indented or not closed"
    for block in BLOCKS:
        where = f"{block.page.name}:{block.line}"
        assert set(block.marks) <= {"set-up", "file", "needs", "not run"}, f"{where}: unknown mark"
        assert block.kind in KINDS, f"{where}: what is {block.kind or 'a block without a language'}?"


@pytest.mark.migraphx
def test_calls_that_the_page_says_do_not_exist(shell: Shell) -> None:
    """The table of `migraphx-api.md` is right about the MIGraphX that is installed."""
    import migraphx

    program = migraphx.parse_onnx(str(shell.start / "face.onnx"), map_input_dims={"input_2": [2, 24, 24, 3]})
    for name in ("optimize", "get_gpu_context", "quantize_int4"):
        assert not hasattr(migraphx, name)
    assert not hasattr(program, "save")
    assert not hasattr(program, "clone")
    assert isinstance(program.get_parameter_shapes(), dict)
    assert isinstance(program.get_output_shapes(), list)
    assert migraphx.quantize_fp16(program) is None
    with pytest.raises(RuntimeError):
        migraphx.get_target("gfx942")
    with pytest.raises(TypeError):
        program.compile(migraphx.get_target("ref"), fusion_rules="all")


def test_the_table_of_precisions_is_the_compilers() -> None:
    """What the guide says about each architecture and precision is what `farm plan` goes by."""
    rows = re.findall(r"^\| (.+?) \|$", (GUIDE / "precisions.md").read_text(), re.M)
    head, *cells = [[part.strip() for part in row.split("|")] for row in rows if "---" not in row]
    precisions = [name.split()[0] for name in head[2:]]
    assert precisions == ["fp16", "bf16", "int8", "fp8", "int4"]
    for devices, _, *words in cells:
        for device in devices.replace("MIGraphX ", "").replace("`", "").split(", "):
            for precision, word in zip(precisions, words, strict=True):
                there = precision in MIGRAPHX.device(device).precisions
                right = "emulated" if MIGRAPHX.emulates(device, precision) else "yes"
                assert word.split()[0] == (right if there else "no"), f"{device} {precision}"


def test_links_lead_somewhere() -> None:
    """Each link between documents leads somewhere, and the documents' own contents lists them all."""
    contents = ROOT / "docs" / "README.md"
    listed = re.findall(r"\(([\w-]+\.md)\)", contents.read_text())
    assert {page.name for page in contents.parent.glob("*.md")} - {contents.name} <= set(listed)
    for page in [*PAGES, *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text()):
            assert "://" in target or (page.parent / target).exists(), f"{page.name}: no {target}"


# --- Checks ---------------------------------------------------------------------------------------------------------


def look_for(name: str, shell: Shell) -> None:
    """Skip where it is not there."""
    if name in ("torch", "tensorflow"):
        python = load_settings().converters[name] or sys.executable
        there = subprocess.run([python, "-c", f"import {name}"], capture_output=True, check=False).returncode == 0
        if not there:
            pytest.skip(f"needs the extra `{name}`, here or where FARM_{name.upper()}_PYTHON says")
    elif name != "migraphx" and not shutil.which(name):
        pytest.skip(f"needs the program {name}")


def check_syntax(block: Block) -> None:
    """Check what can be checked without running it."""
    if block.kind == "sh":
        subprocess.run(["bash", "-n"], input=block.text, text=True, check=True)
        for line in block.text.replace("\\\n", " ").splitlines():
            for part in re.split(r"[;|&]+|\$\(", line.partition(" #")[0]):
                words = part.replace(")", "").split()
                if words[:1] == ["farm"]:
                    check_options(words[1:])
    elif block.kind == "python":
        compile(block.text, block.page.name, "exec")
    elif block.kind == "yaml" and "models" in yaml.load(block.text):
        parse_manifest(block.text)


def check_options(words: list[str]) -> None:
    """Check that `farm` has this command with these options."""
    here = whole_command_line()
    while words and words[0] in getattr(here, "commands", {}):
        here, words = here.commands[words[0]], words[1:]
    assert not hasattr(here, "commands") or not words or words[0].startswith("-"), f"no command {words[0]}"
    known = {option for parameter in here.params for option in (*parameter.opts, *parameter.secondary_opts)}
    for word in words:
        if word.startswith("-"):
            assert word.partition("=")[0] in known | {"--json", "--help"}, f"{here.name} has no {word}"
