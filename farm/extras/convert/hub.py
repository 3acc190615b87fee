"""Models of a Hugging Face hub, on the submitter's machine: pinned by commit, and once here by their digest."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path, PurePosixPath

from farm.client.transfers import note_use
from farm.errors import UsageError
from farm.files import hash_file, replacing
from farm.manifest.values import Source


def kept_from_hub(source: Source, cache: Path) -> Path | None:
    """Return where a file of the hub is in the cache; None if it is not there, or is not what came."""
    place = _folder(source, cache) / source.file
    note_use(cache, [place])
    return place if _is_as_it_came(_folder(source, cache), source.file) else None


def from_hub(source: Source, cache: Path, *, onnx: bool) -> Path:
    """Return the file that `source` names, from the cache or from the hub, with the external data of an ONNX model.

    The hub is huggingface.co, or what HF_ENDPOINT names; HF_TOKEN and `hf auth login` hold here too. What is in the
    cache is not asked for again. Raises UsageError.
    """
    folder = _folder(source, cache)
    place = _bring(source, source.file, folder)
    if source.sha256 and (found := hash_file(place)[0]) != source.sha256:
        hint = "if another file is meant, write its sha256"
        raise UsageError(f"{source.hf} {source.file} has the SHA-256 {found}, not {source.sha256}", hint=hint)
    if onnx:
        from farm.runner.onnx_models import BadModel, check_onnx

        try:
            others = check_onnx(place, alone=True).get("external_files", ())
        except BadModel as error:
            raise UsageError(f"{source.hf} {source.file}: {error.message}") from None
        for name in others:
            _bring(source, str(PurePosixPath(source.file).parent / name), folder)
    note_use(cache, [place])
    return place


def _folder(source: Source, cache: Path) -> Path:
    return cache / "hub" / f"{source.hf.replace('/', '--')}@{source.revision}"


def _bring(source: Source, name: str, folder: Path) -> Path:
    place = folder / name
    if _is_as_it_came(folder, name):
        return place
    try:
        from huggingface_hub import hf_hub_download
    except ImportError:
        raise UsageError("models of a hub need huggingface_hub", hint="pip install 'migraphx-farm[hub]'") from None
    try:
        hf_hub_download(
            source.hf,
            name,
            revision=source.revision,
            local_dir=folder,
            endpoint=os.environ.get("HF_ENDPOINT") or None,
            force_download=place.exists(),
        )
    except (OSError, ValueError) as error:  # All of the library's own errors are of these.
        said = str(error).strip().partition("\n")[0] or type(error).__name__
        hint = "are hf, revision and file right, and may you read it? HF_TOKEN names who asks"
        raise UsageError(f"{source.hf}@{source.revision[:12]} {name} cannot be had: {said}", hint=hint) from None
    pin = _pin(folder, name)
    pin.parent.mkdir(parents=True, exist_ok=True)
    with replacing(pin) as part:
        part.write_text(hash_file(place)[0])
    return place


def _is_as_it_came(folder: Path, name: str) -> bool:
    try:
        return _pin(folder, name).read_text() == hash_file(folder / name)[0]
    except OSError:
        return False


def _pin(folder: Path, name: str) -> Path:
    """Return where the digest of a file is kept: a commit alone does not tell whether the cache is whole."""
    return folder / ".cache" / "farm" / f"{hashlib.sha256(name.encode()).hexdigest()}.sha256"
