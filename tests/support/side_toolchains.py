"""Toolchains other than the installed one: real ONNX Runtimes from the registry, and the installed one renamed.

Each is an interpreter with packages of its own, as `other_toolchains` names them; sealed children read nothing else.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

from tests.support.places import ROOT

WHEELS = ROOT / ".farm" / "side-toolchains"
"""Real ones are kept here from test run to test run."""

_NEEDED = ("numpy", "numpy.libs", "onnx", "google", "ml_dtypes", "onnx_ir", "typing_extensions.py")
_RENAMED = '''\
"""Loaded at every start: gives the installed ONNX Runtime another version, runs that last longer, refused operators."""
import importlib.machinery, os, sys, time

VERSION, DELAY, SHARE, REFUSED = {version!r}, {delay!r}, {share!r}, {refused!r}


class Finder(importlib.machinery.PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        spec = super().find_spec(name, path, target)
        if name == "onnxruntime" and spec is not None:
            execute = spec.loader.exec_module
            spec.loader.exec_module = lambda module: (execute(module), change(module))
        return spec


def change(module):
    module.__version__ = VERSION
    Session = module.InferenceSession

    class Slower(Session):
        def __init__(self, model, *arguments, **options):
            path = model if isinstance(model, (str, os.PathLike)) else ""
            data = open(path, "rb").read() if path else bytes(model)
            for name in REFUSED:
                if name.encode() in data:
                    raise RuntimeError("[ONNXRuntimeError] : 9 : NOT_IMPLEMENTED : " + name + " is not implemented")
            super().__init__(model, *arguments, **options)

        def run(self, *arguments, **options):
            return wait(lambda: super(Slower, self).run(*arguments, **options))

        def run_with_iobinding(self, *arguments, **options):
            return wait(lambda: super(Slower, self).run_with_iobinding(*arguments, **options))

    module.InferenceSession = Slower


def wait(run):
    began = time.perf_counter()
    found = run()
    end = time.perf_counter() + DELAY + SHARE * (time.perf_counter() - began)
    while time.perf_counter() < end:
        pass
    return found


sys.meta_path.insert(0, Finder)
'''


def renamed(
    folder: Path, version: str, *, delay: float = 0.0, share: float = 0.0, refused: tuple[str, ...] = ()
) -> Path:
    """Make the installed ONNX Runtime under another version in `folder`, and return its interpreter.

    Each run lasts `delay` seconds, and `share` of itself, longer; models with a text of `refused` are not loaded.
    """
    packages = _environment(folder, ("onnxruntime", *_NEEDED))
    text = _RENAMED.format(version=version, delay=delay, share=share, refused=refused)
    (packages / "renamed_onnxruntime.py").write_text(text)
    (packages / "renamed_onnxruntime.pth").write_text("import renamed_onnxruntime\n")
    return folder / "bin" / "python"


def onnxruntime(version: str) -> Path:
    """Return the interpreter of a real ONNX Runtime; the registry is asked once for each version.

    Raises LookupError with the reason if its wheel cannot be had.
    """
    folder = WHEELS / version
    python = folder / "bin" / "python"
    if not (folder / "complete").exists():
        shutil.rmtree(folder, ignore_errors=True)
        packages = _environment(folder, _NEEDED)
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--only-binary", ":all:"]
        done = subprocess.run(
            [*command, "--target", str(packages), f"onnxruntime=={version}"],
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        if done.returncode:
            raise LookupError(f"no wheel of onnxruntime {version}: {done.stderr.strip().splitlines()[-1:]}")
        (folder / "complete").touch()
    return python


def _environment(folder: Path, packages: tuple[str, ...]) -> Path:
    """Make an interpreter's folder with installed packages in it, and return where they are."""
    venv.create(folder, with_pip=False, symlinks=True)
    place = folder / "lib" / f"python3.{sys.version_info.minor}" / "site-packages"
    import numpy

    source = Path(numpy.__file__).parent.parent
    named = [path for name in packages for path in (source / name, *source.glob(f"{name.split('.')[0]}-*.dist-info"))]
    for path in dict.fromkeys(path for path in named if path.exists()):
        if path.is_dir():
            shutil.copytree(path, place / path.name, copy_function=_linked, ignore=shutil.ignore_patterns("tests"))
        else:
            _linked(str(path), str(place / path.name))
    return place


def _linked(source: str, place: str) -> None:
    try:
        os.link(source, place)
    except OSError:
        shutil.copy2(source, place)
