"""A stranger's manifest is data: nothing of it runs, and it names no file of the one who submits it."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from farm.client.freezing import download, freeze
from farm.errors import ManifestError, UsageError
from tests.support.api_farm import MANIFEST, freeze_manifest


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A stranger's folder next to a file that is nobody else's business."""
    folder = tmp_path / "theirs"
    folder.mkdir()
    (tmp_path / "secret.npz").write_bytes(b"mine")
    freeze_manifest(folder, MANIFEST)
    return folder


def problems(folder: Path, text: str) -> list[str]:
    (folder / "farm.yaml").write_text(text)
    with pytest.raises(ManifestError) as refused:
        freeze(folder / "farm.yaml", cache=folder / "cache", untrusted=True)
    assert all(problem.line for problem in refused.value.problems)
    return [problem.message for problem in refused.value.problems]


def test_an_honest_manifest_passes(folder: Path) -> None:
    frozen = freeze(folder / "farm.yaml", cache=folder / "cache", untrusted=True)
    assert frozen.submission["models"].keys() == {"net"}


def test_a_generator_does_not_run(folder: Path) -> None:
    (folder / "evil.py").write_text("raise SystemExit('ran')\n")
    assert problems(folder, MANIFEST + '    samples: {generator: "evil:run"}\n') == [
        "a stranger's manifest runs no code here: `generator`"
    ]
    shared = 'datasets: {d: {generator: "evil:run"}}\n'
    assert "`generator`" in problems(folder, MANIFEST + "    samples: d\n" + shared)[0]


@pytest.mark.parametrize("path", ["../secret.npz", "{outside}/secret.npz", "link.npz", "folder"])
def test_a_file_elsewhere_is_not_read(folder: Path, path: str) -> None:
    (folder / "link.npz").symlink_to(folder.parent / "secret.npz")
    (folder / "folder").mkdir()
    (folder / "folder" / "a.npz").symlink_to(folder.parent / "secret.npz")
    named = path.format(outside=folder.parent)
    assert problems(folder, MANIFEST + f"    samples: {{path: {named}}}\n") == [
        f"a stranger's manifest names no file outside its folder: {named}"
    ]


def test_models_elsewhere_packages_buckets_conversions_and_env_files_are_refused(folder: Path) -> None:
    (folder.parent / "net.onnx").write_bytes((folder / "net.onnx").read_bytes())
    assert "outside its folder" in problems(folder, MANIFEST.replace("path: net", "path: ../net"))[0]
    assert "`s3`" in problems(folder, MANIFEST.replace("path: net.onnx", "s3: s3://private/net.onnx"))[0]
    assert "`package`" in problems(folder, MANIFEST.replace("path: net.onnx", "package: numpy/net.onnx"))[0]
    assert "`package`" in problems(folder, MANIFEST + "    samples: {package: numpy/secret.npz}\n")[0]
    assert "not converted" in problems(folder, MANIFEST + "    format: torch\n")[0]
    env = "env: {HIPBLASLT_TUNING_OVERRIDE_FILE: {path: ../secret.npz}}\n"
    assert "outside its folder: ../secret.npz" in problems(folder, MANIFEST + env)[0]


@pytest.mark.parametrize("host", ["localhost", "169.254.169.254", "[::ffff:10.0.0.1]", "nobody.invalid"])
def test_it_has_nothing_fetched_from_inside_the_network(folder: Path, host: str) -> None:
    """What answers there trusts who is inside; its status and its SHA-256 would be in the log of the pipeline."""
    source = f"https: 'https://{host}/net.onnx', sha256: {'ab' * 32}"
    (problem,) = problems(folder, MANIFEST.replace("path: net.onnx", source))
    assert problem.endswith("which has no public address for a stranger's manifest")


def test_a_public_host_leads_to_none_inside(tmp_path: Path) -> None:
    asked: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request.url.host)
        return httpx.Response(302, headers={"Location": "https://10.0.0.1/net.onnx"})

    web = httpx.MockTransport(answer)
    with pytest.raises(UsageError, match=r"leads to 10\.0\.0\.1, which has no public address"):
        download("https://8.8.8.8/net.onnx", "ab" * 32, tmp_path / "net.onnx", web, public=True)
    with pytest.raises(UsageError, match="redirect"):
        download("https://8.8.8.8/net.onnx", "ab" * 32, tmp_path / "net.onnx", web)
    assert asked[:3] == ["8.8.8.8", "8.8.8.8", "10.0.0.1"]


def test_it_starts_nothing_later_and_ends_nothing_of_others(folder: Path) -> None:
    """All strangers submit into one namespace: a group that cancels would cancel what others wait for."""
    assert problems(folder, MANIFEST + 'triggers: [{schedule: "* * * * *"}]\n') == [
        "a stranger's manifest is built by nothing else than its submission: `triggers`"
    ]
    assert problems(folder, MANIFEST + "concurrency: {group: x, cancel-in-progress: true}\n") == [
        "a stranger's manifest cancels no other builds: `cancel-in-progress`"
    ]
