"""The file of its cache in which ONNX Runtime's MIGraphX provider looks for a model's program, by asking the provider.

The name depends on the provider's version, on the card's arch and on the model as ONNX Runtime's optimizers leave it,
so nobody else can say it. The provider is loaded with stand-ins for the two libraries of ROCm that it links; they are
built here, by a C compiler, with a function for each that the provider asks for. No GPU is used, nothing is compiled.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

from farm.runner.protocol import RequestFailed

if TYPE_CHECKING:
    from farm.extras.packs.fetch import CacheNamesAnswer, CacheNamesRequest
    from farm.runner.launcher import Messages

PROVIDER = "MIGraphXExecutionProvider"
_LIBRARY = "libonnxruntime_providers_migraphx.so"
_STANDINS = re.compile(r"lib(migraphx_c|amdhip64)\.so\.[0-9]+")
_FUNCTION = re.compile(r"(?:migraphx_|hip)[A-Za-z0-9_]+")
_NOT_HERE = "pip install onnxruntime-migraphx, the version that serves, or name its interpreter by --python"


def cache_names(request: CacheNamesRequest, messages: Messages) -> CacheNamesAnswer:
    """Return which file the provider writes for a model and an `arch`, and whether it then takes one there.

    Raises RequestFailed (`toolchain_mismatch`) if this interpreter has no such provider or there is no C compiler,
    `unsupported_operator` if the provider leaves nodes to the CPU.
    """
    messages.phase("compiling", None, "asking the provider")
    folder = Path(request["cache"])
    record, cache = folder / "record.txt", folder / "cache"
    cache.mkdir()
    os.environ |= {"STANDINS_RECORD": str(record), "STANDINS_ARCH": request["arch"]}
    for name in ("ORT_MIGRAPHX_MODEL_CACHE_PATH", "ORT_MIGRAPHX_CACHE_PATH"):
        os.environ.pop(name, None)
    for library in _build_standins(_provider_library(), folder):
        ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)  # The provider's own search ends here: the name is loaded.
    version = _open(request["model"], cache)
    first = _events(record)
    names = [Path(name).name for what, name in first if what == "save"]
    if not names:
        raise RequestFailed("compiler_error", f"the provider of ONNX Runtime {version} names no file for this model")
    for name in names:
        (cache / name).write_bytes(b"")  # `touch` asks for its time, which the seal grants without effect.
    _open(request["model"], cache)
    second = _events(record)[len(first) :]
    return {
        "version": version,
        "names": names,
        "found": [what for what, _ in second] == ["load"] * len(names)
        and sorted(Path(name).name for _, name in second) == sorted(names),
    }


def _provider_library() -> Path:
    found = importlib.util.find_spec("onnxruntime")
    library = Path(found.origin).parent / "capi" / _LIBRARY if found and found.origin else None
    if library is None or not library.is_file():
        raise RequestFailed("toolchain_mismatch", f"this interpreter has no ONNX Runtime with MIGraphX: {_NOT_HERE}")
    return library


def _build_standins(provider: Path, folder: Path) -> list[Path]:
    """Build a library under each name that the provider links, with every function that it asks for."""
    compiler = next((found for name in ("cc", "gcc", "clang") if (found := shutil.which(name))), None)
    if compiler is None or not shutil.which("nm") or not shutil.which("objdump"):
        raise RequestFailed("toolchain_mismatch", "no C compiler and binutils here: install gcc, or ask elsewhere")
    links = _said("objdump", "-p", str(provider))
    wanted = [name for line in links.splitlines() if "NEEDED" in line and _STANDINS.fullmatch(name := line.split()[-1])]
    asked = {
        match[0]
        for line in _said("nm", "--dynamic", "--undefined-only", str(provider)).splitlines()
        if (match := _FUNCTION.fullmatch(line.split()[-1].partition("@")[0]))
    }
    text = Path(__file__).with_name("standins.c").read_text()
    known = set(re.findall(r"\b((?:migraphx_|hip)[A-Za-z0-9_]+)\(", text)) | set(
        re.findall(r"\((migraphx_\w+)\)", text)
    )
    source = folder / "standins.c"
    source.write_text(text + "".join(f"int {name}(void) {{ return 0; }}\n" for name in sorted(asked - known)))
    made = []
    for name in wanted:
        library = folder / name
        _said(compiler, "-shared", "-fPIC", "-w", str(source), f"-Wl,-soname,{name}", "-o", str(library))
        made.append(library)
    if not made:
        raise RequestFailed("toolchain_mismatch", f"{provider.name} links no library of ROCm's that has a stand-in")
    return made


def _said(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        message = f"{Path(command[0]).name} ended with {done.returncode}"
        raise RequestFailed("toolchain_mismatch", message, done.stderr[-2000:])
    return done.stdout


def _open(model: str, cache: Path) -> str:
    """Let the provider take a model, all of it; return the version of ONNX Runtime."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
    try:
        session = onnxruntime.InferenceSession(
            model, options, providers=[(PROVIDER, {"migraphx_model_cache_dir": str(cache)})]
        )
        taken = session.get_providers()
    except Exception as error:  # Whatever the binding raises: its kinds are not public.
        taken, why = [], str(error)
    else:
        why = f"it took {', '.join(taken)}"
    if PROVIDER not in taken:
        message = f"ONNX Runtime {onnxruntime.__version__} does not run the whole model by MIGraphX"
        raise RequestFailed("unsupported_operator", message, why)
    return str(onnxruntime.__version__)


def _events(record: Path) -> list[tuple[str, str]]:
    if not record.exists():
        return []
    lines = (line.partition("\t") for line in record.read_text().splitlines())
    return [(what, name) for what, _, name in lines]
