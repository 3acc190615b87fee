"""A STAND-IN for the Python package onnxruntime with its MIGraphX provider, in an environment of its own.

The provider is a real library that links `libmigraphx_c.so.3` and `libamdhip64.so.7` and calls them in the provider's
order; the file's name it makes of the arch and the model's file name. With it everything but the provider is shown.
FARM_TEST_ORT_MIGRAPHX names an interpreter that has the real one: then tests ask that too.
"""

import shutil
import subprocess
import sys
import venv
from pathlib import Path

LIBRARY = r"""
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
int hipGetDeviceCount(int *); int hipGetDevicePropertiesR0600(char *, int); int hipEventCreateWithFlags(void **);
int migraphx_parse_onnx_buffer(void **); int migraphx_program_compile(void *); int migraphx_target_create(void **);
int migraphx_load(void **, const char *); int migraphx_save(void *, const char *);

int open_model(const char *model, const char *cache, int parts) {
  void *program, *target; char gpu[1472], file[4096]; int count = 0; struct stat found;
  if (hipGetDeviceCount(&count) || count != 1 || hipGetDevicePropertiesR0600(gpu, 0)) return 1;
  hipEventCreateWithFlags(&target);
  for (int part = 0; part < parts; part++) {
    snprintf(file, sizeof file, "%s/20f00-%s-%s-%d.mxr", cache, strrchr(model, '/') + 1, gpu + 1160, part);
    for (char *at = file + strlen(cache); *at; at++) if (*at == ':' || *at == '+') *at = '_';
    if (!stat(file, &found)) { migraphx_load(&program, file); continue; }
    migraphx_parse_onnx_buffer(&program); migraphx_target_create(&target);
    migraphx_program_compile(program); migraphx_save(program, file);
  }
  return 0;
}
"""

MODULE = """
import ctypes
from pathlib import Path

__version__ = "1.27.1"
PARTS, WHOLE = {parts}, {whole}


class SessionOptions:
    def add_session_config_entry(self, name, value):
        self.whole = name == "session.disable_cpu_ep_fallback" and value == "1"


class InferenceSession:
    def __init__(self, model, options, providers):
        assert options.whole
        (name, given), = providers
        if not WHOLE:
            raise RuntimeError("3 nodes have no kernel but the CPU's")
        library = ctypes.CDLL(str(Path(__file__).parent / "capi" / "libonnxruntime_providers_migraphx.so"))
        assert not library.open_model(model.encode(), given["migraphx_model_cache_dir"].encode(), PARTS)

    def get_providers(self):
        return ["MIGraphXExecutionProvider"]
"""


def interpreter_with_provider(folder: Path, *, parts: int = 1, whole: bool = True) -> str:
    """Make an environment whose `onnxruntime` has such a provider; return its interpreter."""
    venv.create(folder, symlinks=True, with_pip=False)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    package = folder / "lib" / version / "site-packages" / "onnxruntime"
    (package / "capi").mkdir(parents=True)
    (package / "__init__.py").write_text(MODULE.format(parts=parts, whole=whole))
    (package / "provider.c").write_text(LIBRARY)
    links = []
    for name in ("libmigraphx_c.so.3", "libamdhip64.so.7"):  # Empty: only their names are linked.
        subprocess.run(
            ["cc", "-shared", "-x", "c", "/dev/null", f"-Wl,-soname,{name}", "-o", str(folder / name)], check=True
        )
        links.append(str(folder / name))
    library = package / "capi" / "libonnxruntime_providers_migraphx.so"
    made = [
        "cc",
        "-shared",
        "-fPIC",
        "-w",
        str(package / "provider.c"),
        "-Wl,--no-as-needed",
        *links,
        "-o",
        str(library),
    ]
    subprocess.run(made, check=True)
    return str(folder / "bin" / "python")


def has_compiler() -> bool:
    """Whether the stand-ins can be built here."""
    return all(shutil.which(name) for name in ("cc", "nm", "objdump"))
