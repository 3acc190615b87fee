"""How to use an artifact: what to type for each way of running it, with its own names filled in. Pure.

Each way is a file of `templates/ways`: a line with its title, a line about it, and what to type.
"""

from __future__ import annotations

import json
import shlex
from functools import cache
from pathlib import Path
from typing import NamedTuple

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from farm.artifacts.sidecar import serving_of
from farm.wire.program import Sidecar

_WAYS = {
    ".mxr": ["fetch", "curl", *(f"migraphx-{way}" for way in ("python", "cpp", "driver", "triton", "onnxruntime"))],
    "": ["fetch", "curl", *(f"onnxruntime-{way}" for way in ("python", "cpp", "triton"))],
}
"""The ways of a program, by the end of its file's name."""

_TRITON = {
    **{f"float{bits}": f"TYPE_FP{bits}" for bits in (16, 32, 64)},
    **{f"{sign}int{bits}": f"TYPE_{sign.upper()}INT{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)},
    "bfloat16": "TYPE_BF16",
    "bool": "TYPE_BOOL",
    "object": "TYPE_STRING",
}


class Way(NamedTuple):
    """One way to use it: a title, words about it, and what to type."""

    slug: str
    title: str
    words: str
    text: str


def ways(sidecar: Sidecar, url: str) -> list[Way]:
    """Return the ways that fit the artifact's kind of program; `url` is the farm's."""
    model, target, precision, *shape = sidecar["identifier"].split("/")
    program, how = sidecar["blobs"]["program"], serving_of(sidecar)
    target = target.replace("-", "/", 1)
    options = ["--target", target, "--precision", precision, *(["--shape", "/".join(shape)] if shape else [])]
    known = {
        "made": sidecar,
        "model": model,
        "name": shlex.join([model, *options]),
        "path": program["path"],
        "digest": program["digest"],
        "url": url.rstrip("/"),
        "arch": sidecar["device"]["arch"],
        "how": how,
        "chosen": how.providers[0][1],
    }
    found = []
    for name in next(names for end, names in _WAYS.items() if program["path"].endswith(end)):
        title, words, text = _texts().get_template(f"{name}.txt").render(known).split("\n", 2)
        found.append(Way(name.rpartition("-")[2], title, words, text.rstrip("\n")))
    return found


@cache
def _texts() -> Environment:
    folder = FileSystemLoader(Path(__file__).parent / "templates" / "ways")
    # Pages escape what they show of it.
    texts = Environment(loader=folder, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)  # noqa: S701
    texts.filters |= {
        "json": json.dumps,
        "python": repr,
        "shell": shlex.quote,
        "sizes": lambda shape: str(tuple(each if isinstance(each, int) else 1 for each in shape)),
        "dims": lambda shape: ", ".join(str(each) if isinstance(each, int) else "-1" for each in shape),
        "triton": lambda dtype: _TRITON.get(dtype, "TYPE_INVALID"),
    }
    return texts
