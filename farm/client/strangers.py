"""What the manifest of a stranger may not have: it is submitted as data, by somebody who has a token and files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from farm.client.freezing import Place, env_files
from farm.errors import Problem
from farm.manifest.entries import Manifest
from farm.manifest.sources import Data


def refused(manifest: Manifest, folder: Path) -> list[Problem]:
    """Return what keeps a stranger's manifest from being submitted: code, conversions, buckets, hubs, files elsewhere.

    A generator is a function that would run here. A conversion loads the model in the libraries that made it. A bucket
    is the operator's. A path (or a link) out of `folder` could name any file of the submitter. Triggers, and groups
    that cancel, reach beyond the manifest's own build: all strangers submit into one namespace.
    """
    root = folder.resolve()
    found: list[Problem] = []
    for place, data in _all_data(manifest):
        if data.generator:
            found.append(manifest.written.problem("a stranger's manifest runs no code here: `generator`", *place))
        elif data.path and not _is_inside(folder / data.path, root):
            found.append(_elsewhere(manifest, data.path, place))
    for index, model in enumerate(manifest.models):
        source: Place = ("models", index, "source")
        if model.converted:
            message = f"a stranger's model is not converted here: `format: {model.format}`"
            found.append(manifest.written.problem(message, "models", index, hint="export it to ONNX"))
        if model.source.s3:
            message = "a stranger's manifest reads no bucket of the farm: `s3`"
            found.append(manifest.written.problem(message, *source, hint="use `path`, or `https` with `sha256`"))
        if model.source.hf:
            message = "a stranger's manifest reads no model of a hub with your rights: `hf`"
            found.append(manifest.written.problem(message, *source, hint="use `path`, or `https` with `sha256`"))
        if model.source.path and not _is_inside(folder / model.source.path, root):
            found.append(_elsewhere(manifest, model.source.path, source))
    if manifest.triggers:
        message = "a stranger's manifest is built by nothing else than its submission: `triggers`"
        found.append(manifest.written.problem(message, "triggers"))
    if manifest.concurrency and manifest.concurrency.cancel_in_progress:
        message = "a stranger's manifest cancels no other builds: `cancel-in-progress`"
        found.append(
            manifest.written.problem(message, "concurrency", hint="let the pipeline cancel its own older runs")
        )
    for place, env in env_files(manifest):
        if not _is_inside(folder / env.path, root):
            found.append(_elsewhere(manifest, env.path, place))
    return found


def _all_data(manifest: Manifest) -> Iterator[tuple[Place, Data]]:
    for name, data in manifest.datasets.items():
        yield ("datasets", name), data
    for index, model in enumerate(manifest.models):
        for use, described in (("calibration", model.calibration), ("samples", model.samples)):
            if described:
                yield ("models", index, use), described
    for index, override in enumerate(manifest.overrides):
        if override.calibration:
            yield ("overrides", index, "calibration"), override.calibration


def _is_inside(path: Path, root: Path) -> bool:
    """Whether a file, or everything in a folder, lies in `root`, also behind links."""
    if not path.resolve().is_relative_to(root):
        return False
    return not path.is_dir() or all(entry.resolve().is_relative_to(root) for entry in path.rglob("*"))


def _elsewhere(manifest: Manifest, path: str, place: Place) -> Problem:
    return manifest.written.problem(f"a stranger's manifest names no file outside its folder: {path}", *place)
