"""A hostile MIGraphX: on import, and as it opens a file, it tries to reach what is not its own, and says how that went.

Then it plays the stand-in.

`targets.json` next to it says where things are. Each probe prints a line `PROBE {"name", "said"}`.
"""

# ruff: noqa (plain calls, as an attacker writes them, and the stand-in last)

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

T = json.loads((Path(__file__).parent / "targets.json").read_text())
ATTEMPT = Path.cwd().parent
LIBC = ctypes.CDLL(None, use_errno=True)


def write(path, content=b"poison"):
    Path(path).write_bytes(content)


def connect(port):
    socket.create_connection(("127.0.0.1", port), timeout=5).close()


def system(result):
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def unshared_mount():
    new_user, new_mounts = 0x10000000, 0x00020000
    system(LIBC.unshare(new_user | new_mounts))
    system(LIBC.mount(b"none", str(ATTEMPT).encode(), b"tmpfs", 0, None))


def secrets_in_environment():
    names = [name for name in os.environ if name.startswith(("FARM_", "AWS_", "CELERY"))]
    if not names and not any(secret in str(dict(os.environ)) for secret in T["secrets"]):
        raise PermissionError("nothing there")


IMPORTING = True


def open_files_of_the_worker():
    for entry in Path(f"/proc/{T['worker']}/fd").iterdir():
        entry.open("rb").close()


def inherited_files():
    """Standard streams, and the pipe to the worker; a socket or a file would be somebody else's."""
    links = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")]
    named = [os.readlink(link) for link in links if os.path.lexists(link)]
    # Its log is open for writing, at its end. As it is imported, the template's socket is open.
    found = [name for name in named if name.startswith(("socket:", *T["private"])) and not name.endswith("/log.txt")]
    if len(found) <= IMPORTING:
        raise PermissionError("none but its own")


def by_another_program():
    subprocess.run([sys.executable, "-c", f"open({T['other_model']!r}).read()"], check=True, capture_output=True)


PROBES = {
    "read another job's model": lambda: Path(T["other_model"]).read_bytes(),
    "read another job's log": lambda: Path(T["other_log"]).read_bytes(),
    "list other jobs": lambda: os.listdir(Path(T["other_model"]).parents[2]),
    "write into another slot's folder": lambda: write(Path(T["other_model"]).with_name("program.mxr")),
    "do so through another program": by_another_program,
    "do so through a link": lambda: (os.symlink(T["other_model"], "link"), Path("link").read_bytes()),
    "do so through a hard link": lambda: os.link(T["other_model"], "hard"),
    "read the node's cache": lambda: Path(T["cached"]).read_bytes(),
    "poison the node's cache": lambda: write(T["cached"]),
    "add to the node's cache": lambda: write(Path(T["cached"]).with_name("new")),
    "read the tuning databases": lambda: os.listdir(T["tuning"]),
    "poison the tuning databases": lambda: write(Path(T["tuning"]) / "poison"),
    "read the farm's settings": lambda: Path(T["config"]).read_bytes(),
    "read a user's keys": lambda: os.listdir(T["home"]),
    "find secrets in the environment": secrets_in_environment,
    "find files that are open": inherited_files,
    "change its own inputs": lambda: write(ATTEMPT / "model" / "net.onnx"),
    "put another in its input's place": lambda: (ATTEMPT / "model").rename(ATTEMPT / "model2"),
    "change the right outputs": lambda: write(ATTEMPT / "reference" / "reference.npz"),
    "rewrite its own log": lambda: write(ATTEMPT / "log.txt"),
    "change the runner": lambda: open(T["runner"], "ab").close(),
    "change the compiler": lambda: write(Path(__file__)),
    "read the worker's environment": lambda: Path(f"/proc/{T['worker']}/environ").read_bytes(),
    "read the worker's memory": lambda: open(f"/proc/{T['worker']}/mem", "rb").close(),
    "read the worker's open files": open_files_of_the_worker,
    "trace the worker": lambda: system(LIBC.ptrace(16, T["worker"], 0, 0)),
    "signal the worker": lambda: os.kill(T["worker"], signal.SIGCONT),
    "signal its guard": lambda: os.kill(os.getppid(), signal.SIGCONT),
    "signal another job's compiler": lambda: os.kill(T["other_compiler"], signal.SIGCONT),
    "mount in a namespace of its own": unshared_mount,
    "connect to Redis": lambda: connect(T["redis"]),
    "connect to object storage": lambda: connect(T["s3"]),
    "write artifacts past S3": lambda: urllib.request.urlopen(f"http://127.0.0.1:{T['filer']}/", timeout=5).read(),
    "connect to the network": lambda: socket.create_connection(("192.0.2.1", 443), timeout=2),
    "send a datagram": lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM),
    "connect to a local socket": lambda: socket.socket(socket.AF_UNIX),
}

import standin_migraphx
from standin_migraphx import *
from standin_migraphx import __version__


def attack():
    for name, probe in PROBES.items():
        try:
            probe()
            said = "reached"
        except Exception as error:
            said = f"refused: {type(error).__name__}: {error}"
        print("PROBE", json.dumps({"name": name, "said": said}), flush=True)


def parse_onnx(*arguments, **options):
    attack()
    return standin_migraphx.parse_onnx(*arguments, **options)


def load(*arguments, **options):
    attack()
    return standin_migraphx.load(*arguments, **options)


if sys.platform == "linux":
    attack()
IMPORTING = False
