"""Extensions: found by entry points, imported only by what uses them, and no harm where they are missing or broken."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from pkgutil import resolve_name

import pytest

from farm import entry_points, extension
from farm.cli import main
from farm.client.client import FarmClient


def package(folder: Path, name: str, entry_points: str, **modules: str) -> None:
    """Put a package of somebody else's into a folder, as an installer does."""
    for module, text in modules.items():
        (folder / f"{module}.py").write_text(text)
    info = folder / f"{name}-1.2.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.2\n")
    (info / "entry_points.txt").write_text(entry_points)


def farm(*arguments: str, path: Path | None = None, then: str = "pass") -> subprocess.CompletedProcess[str]:
    """Run a command line in a process of its own, with a folder in front of what is installed."""
    code = f"import sys; from farm.cli import main; code = main({list(arguments)!r}); {then}; sys.exit(code)"
    environment = {**os.environ, "PYTHONPATH": str(path or "")}
    return subprocess.run(
        [sys.executable, "-c", code], check=False, capture_output=True, text=True, env=environment, cwd=path
    )


LOADED = "print('loaded:', *sorted(name for name in sys.modules if name.startswith(('farm.extras', 'acme'))))"


@pytest.mark.parametrize("arguments", [("--version",), ("--help",), ("status",), ("status", "--help")])
def test_what_needs_no_extension_imports_none(arguments: tuple[str, ...], tmp_path: Path) -> None:
    package(
        tmp_path,
        "acme",
        "[farm.extensions]\nacme = acme:extension\n[farm.commands]\nacme = acme:acme\n",
        acme='def acme() -> None:\n    """Say what acme says. And more."""\n',
    )
    ran = farm(*arguments, path=tmp_path, then=LOADED)
    assert ran.stdout.splitlines()[-1] == "loaded:", ran.stdout + ran.stderr
    if arguments == ("--help",):
        assert re.search(r"^  acme +Say what acme says$", ran.stdout, re.MULTILINE)
        assert re.search(r"^  webhook +Tell other servers what happens", ran.stdout, re.MULTILINE)


def test_a_command_of_somebody_else_runs_and_others_are_not_imported_for_it(tmp_path: Path) -> None:
    package(
        tmp_path,
        "acme",
        "[farm.commands]\nacme = acme:acme\n",
        acme='def acme(times: int = 1) -> None:\n    """Say what acme says."""\n    print("hello " * times)\n',
    )
    ran = farm("acme", "--times", "2", path=tmp_path, then=LOADED)
    assert (ran.returncode, ran.stdout) == (0, "hello hello \nloaded: acme\n"), ran.stderr


def test_a_broken_extension_is_named_and_stops_only_what_needs_it(tmp_path: Path) -> None:
    package(
        tmp_path,
        "acme-farm",
        "[farm.extensions]\nacme = acme:extension\n[farm.commands]\nacme = acme:acme\n",
        acme="import a_library_that_is_missing\n",
    )
    ran = farm("acme", path=tmp_path)
    assert ran.returncode == 2
    assert "the extension acme of acme-farm cannot be imported: ModuleNotFoundError" in ran.stderr
    assert "pip uninstall acme-farm" in ran.stderr
    assert farm("schema", path=tmp_path).returncode == 0
    doctor = farm("doctor", "--json", path=tmp_path)
    checks = {each["name"]: each for each in json.loads(doctor.stdout)["checks"]}
    assert checks["extension webhooks"]["state"] == "ok"
    assert (checks["extension acme"]["state"], checks["extension acme"]["fix"]) == (
        "broken",
        "update the package, or remove it: pip uninstall acme-farm",
    )
    served = farm("serve", "--port", "0", path=tmp_path)
    assert served.returncode == 2, "the farm's owner reads it at the start, not after the first build"
    assert "the extension acme of acme-farm cannot be imported" in served.stderr


def test_an_extension_whose_module_is_gone_is_skipped(tmp_path: Path) -> None:
    package(tmp_path, "acme", "[farm.extensions]\nacme = acme:extension\n[farm.commands]\nacme = acme.inner:acme\n")
    ran = farm("--help", path=tmp_path)
    assert ran.returncode == 0
    assert "acme" not in ran.stdout
    assert "No such command 'acme'" in farm("acme", path=tmp_path).stderr


def test_the_farms_own_extensions_name_what_is_there() -> None:
    """Routes and pages are named by text, which no type checker reads."""
    extension.installed.cache_clear()
    for each in extension.installed():
        for name in (*each.routes, *each.pages):
            assert resolve_name(name).routes, name
        assert each.templates is None or list(each.templates.glob("*.html"))
    for group in (entry_points.COMMANDS, entry_points.APIS):
        for name in entry_points.modules(group):
            assert entry_points.find(group, name) is not None
            assert entry_points.about(group, name)


def test_a_client_has_the_topics_of_extensions_and_says_which_it_has_not() -> None:
    with FarmClient("http://127.0.0.1:1") as client:
        assert client.webhooks is client.webhooks
        with pytest.raises(AttributeError, match="no extension adds it"):
            _ = client.webhocks
        assert not hasattr(client, "_private")


def test_what_no_extension_has_is_said_before_any_work(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(entry_points, "find", lambda group, name: None)
    for command, said in {
        "submit farm.yaml --junit x.xml": "`junit` needs an extension",
        "watch --summary x.md": "`markdown` needs an extension",
        "lint farm.yaml --format sarif": "`sarif` needs an extension",
        "doctor --ort-cache .": "`ort-cache` needs an extension",
    }.items():
        assert main(command.split()) == 2
        assert said in capsys.readouterr().err


def test_what_is_installed_is_looked_through_once_for_all_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes 10 ms, and `farm plan` asks for two groups."""
    looked: list[str] = []
    look = importlib.metadata.entry_points
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda **of: looked.append("") or look(**of))
    entry_points._installed.cache_clear()
    assert entry_points.modules(entry_points.COMPILERS)
    assert entry_points.modules(entry_points.PIPELINES)
    assert looked == [""]
