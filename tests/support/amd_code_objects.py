"""Make the code objects in `tests/support/amd`: genuine kernels for AMD GPUs, of a compiler that needs none.

    pip install iree-base-compiler==3.13.*
    python -m tests.support.amd_code_objects [IREE-COMPILE]

LLVM writes the ELF header, the feature bits and the metadata of each, as it does for MIGraphX.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from tests.support.places import TESTS

FOLDER = TESTS / "support" / "amd"
ARCHES = (
    "gfx90a", "gfx90a:sramecc+:xnack-", "gfx90a:sramecc-:xnack+",
    "gfx942", "gfx942:sramecc+:xnack-", "gfx942:sramecc+:xnack+", "gfx942:sramecc-:xnack-",
    "gfx950", "gfx1100", "gfx1201", "gfx1250",
)  # fmt: skip
KERNEL = """
func.func @add(%a: tensor<64xf32>, %b: tensor<64xf32>) -> tensor<64xf32> {
  %0 = arith.addf %a, %b : tensor<64xf32>
  return %0 : tensor<64xf32>
}
"""


def make(arch: str, compiler: str, target: Path) -> None:
    """Compile the kernel for an architecture with its feature bits (`gfx942:sramecc+:xnack-`) into a file."""
    name, *features = arch.split(":")
    signs = ",".join(feature[-1] + feature[:-1] for feature in features)
    with tempfile.TemporaryDirectory() as work:
        source = Path(work) / "add.mlir"
        source.write_text(KERNEL)
        command = [compiler, "--iree-hal-target-device=hip", f"--iree-rocm-target={name}"]
        command += [f"--iree-rocm-target-features={signs}"] if signs else []
        command += [f"--iree-hal-dump-executable-binaries-to={work}", str(source), "-o", f"{work}/add.vmfb"]
        subprocess.run(command, check=True)
        [made] = Path(work).glob("*.hsaco")
        target.write_bytes(made.read_bytes())


def main() -> None:
    """Make them all."""
    compiler = sys.argv[1] if len(sys.argv) > 1 else "iree-compile"
    FOLDER.mkdir(exist_ok=True)
    for arch in ARCHES:
        make(arch, compiler, FOLDER / f"{arch.replace(':', '.')}.co")


if __name__ == "__main__":
    main()
