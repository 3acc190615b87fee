"""How long the farm reads a program with many kernels, and in how much memory, against hashing the same file.

    python tests/benchmarks/large_programs.py [--kernels 25] [--size 20]

The program is the genuine one for a gfx1100, with its kernel so often and so much longer (MB). Bytes of kernels are
random, so half of them take two in the file. Exits with 1 if 500 MB need more than 20 s of CPU, or 64 MB more memory
than the largest kernel.
"""

from __future__ import annotations

import argparse
import os
import re
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.benchmarks.figures import figure

ROOT = Path(__file__).parents[2]
GENUINE = ROOT / "tests" / "support" / "amd" / "cnn_gfx1100.mxr"
READ = """
import hashlib, pathlib, sys, time
from farm.runner.mxr import read
def peak():
    return int(pathlib.Path('/proc/self/status').read_text().partition('VmHWM:')[2].split()[0])
before = peak()
start = time.process_time()
found = read(sys.argv[1])
middle = time.process_time()
grown = peak() - before
with open(sys.argv[1], 'rb') as file:
    hashlib.file_digest(file, 'sha256')
(kernels,) = found['code_objects']
print(kernels['count'], kernels['size'], middle - start, time.process_time() - middle, grown)
"""


def main() -> None:
    """Make the program, read it in a process of its own, and print what that took."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernels", type=int, default=25)
    parser.add_argument("--size", type=int, default=20, help="MB of each")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "net.mxr"
        write(path, options.kernels, options.size * 10**6)
        command = [sys.executable, "-c", READ, str(path)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        size = path.stat().st_size
    count, kernels, reading, hashing, grown = map(float, done.stdout.split())
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, {count:.0f} kernels, {kernels / 1e6:.0f} MB in all")
    figure("reading a large program, CPU", reading, "s", 20 * kernels / 500e6)
    figure(f"the same against hashing its {size / 1e6:.0f} MB", reading / hashing, "x")
    figure("memory for it", grown / 1024, "MiB", (64e6 + options.size * 1e6) / (1 << 20))
    sys.exit(reading > 20 * kernels / 500e6 or grown * 1024 > 64e6 + options.size * 1e6)


def write(path: Path, kernels: int, size: int) -> None:
    """Write the genuine program with its kernel so often, so many bytes longer."""
    data = GENUINE.read_bytes()
    # The node with the kernel, up to the next node: each begins with its output.
    nodes = re.split(rb"(?=\x86\xa6output)", data)
    place = next(index for index, node in enumerate(nodes) if b"code_object" in node)
    head, code, tail = re.split(rb"(\xdc\x15\x18\x7fELF.*?)(?=\xabsymbol_name)", nodes[place], flags=re.DOTALL)
    with path.open("wb") as file:
        before = b"".join(nodes[:place])
        # A list of fifteen nodes or fewer has a header of one byte.
        header = before.index(b"\xa5nodes") + 6
        count = before[header] & 0x0F
        file.write(before[:header] + b"\xdd" + struct.pack(">I", count + kernels - 1) + before[header + 1 :])
        block = re.sub(rb"[\x80-\xff]", lambda found: b"\xcc" + found[0], os.urandom(10**6))
        for _ in range(kernels):
            file.write(head + b"\xdd" + struct.pack(">I", 5400 + size) + code[3:])
            file.writelines([block] * (size // 10**6))
            file.write(tail)
        file.write(b"".join(nodes[place + 1 :]))


if __name__ == "__main__":
    main()
