"""Models that only an extension brings: a client without it says so where the model is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from farm import entry_points
from farm.errors import ManifestError
from farm.manifest.parsing import load_manifest
from farm.matrix.combinations import combine
from tests.support.freezing import freeze

MANIFEST = """
version: 1
name: foreign
targets: [onnxruntime/cpu]
models:
  - {name: hub, source: {hf: org/net, revision: 0123456789012345678901234567890123456789, file: net.onnx}}
  - {name: torch, format: torch, source: {path: net.pt2}}
"""


def test_a_client_without_the_extension_says_which_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "net.pt2").write_bytes(b"")
    (tmp_path / "farm.yaml").write_text(MANIFEST)
    monkeypatch.setattr(entry_points, "find", lambda *_: None)
    with pytest.raises(ManifestError) as refused:
        freeze(combine(load_manifest(tmp_path / "farm.yaml")), tmp_path, cache=tmp_path / "cache")
    assert [(each.line, each.message) for each in refused.value.problems] == [
        (6, "`hf` needs an extension that is not installed"),
        (7, "`torch` needs an extension that is not installed"),
    ]
