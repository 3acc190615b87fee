"""A child that misbehaves on request, under the real guard. Started by `run_child(script=…)` in the tests."""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "farm" / "runner"))

import child


def work(request: dict, messages) -> dict:
    """Do what the request names; `pids` is a file to leave process ids in."""
    messages.phase("compiling")
    if "pids" in request:
        start_descendants(Path(request["pids"]))
    return globals()[f"do_{request['do']}"](request, messages) or {}


def start_descendants(file: Path) -> None:
    """Start a child, a grandchild in a session of its own, and an orphan; wait until all have said so."""
    sleep = "import signal; signal.pause()"
    daemon = (
        "import os, signal\n"
        f"place = {str(file)!r}\n"
        "os.setsid()\n"
        "if os.fork(): os._exit(0)\n"
        "os.setsid()\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "open(place + '.daemon', 'w').write(str(os.getpid()))\n"
        "signal.pause()\n"
    )
    plain = subprocess.Popen([sys.executable, "-c", sleep])
    apart = subprocess.Popen([sys.executable, "-c", sleep], start_new_session=True)
    subprocess.run([sys.executable, "-c", daemon], check=True)
    left = Path(f"{file}.daemon")
    while not left.exists() or not left.read_text():
        time.sleep(0.01)
    pids = [os.getpid(), os.getppid(), plain.pid, apart.pid, int(left.read_text())]
    file.with_suffix(".part").write_text(" ".join(map(str, pids)))
    file.with_suffix(".part").rename(file)


def do_answer(request, messages):
    return {"answer": 42}


def do_measure(request, messages):
    """Measure alone until `until` exists; `at` exists meanwhile, with the process id."""
    at = Path(request["at"])
    with messages.alone():
        at.with_suffix(".part").write_text(str(os.getpid()))
        at.with_suffix(".part").rename(at)
        while not Path(request["until"]).exists():
            time.sleep(0.01)
        at.unlink()
    return {"answer": 42}


def do_count(request, messages):
    """Work until `until` exists, and count in a file; hold a lock of the file if `locks` is set."""
    with Path(request["at"]).open("wb", buffering=0) as file:
        if request.get("locks"):
            fcntl.flock(file, fcntl.LOCK_EX)
        while not Path(request["until"]).exists():
            file.write(b".")
            time.sleep(0.01)
    return {"answer": 42}


def do_stray(request, messages):
    """Answer as if all were well, and leave what would lead the worker astray."""
    folder = Path(request["folder"])
    (folder / "program.mxr").write_bytes(b"a program")
    (folder / "before.txt").symlink_to("/proc/self/environ")
    (folder / "everything").symlink_to("/")
    os.mkfifo(folder / "after.txt")
    os.chdir(folder)
    for _ in range(1500):
        Path("deep").mkdir()
        os.chdir("deep")
    return {"program": str(folder / "program.mxr")}


def do_deep_scratch(request, messages):
    """Leave more folders below each other than a clean-up that calls itself can take."""
    for _ in range(1500):
        Path("deep").mkdir()
        os.chdir("deep")
    return {}


def do_linger(request, messages):
    messages.send({"result": {"answer": 42}})
    signal.pause()


def do_environment(request, messages):
    return {
        "environment": dict(os.environ),
        "folder": str(Path.cwd()),
        "descriptors": sorted(int(entry.name) for entry in Path("/proc/self/fd").iterdir()),
        "modules": sorted(sys.modules),
        "farm": [*sys.modules["farm"].__path__],
        "path": sys.path,
    }


def do_segv(request, messages):
    ctypes.string_at(0)


def do_abort(request, messages):
    print("terminate called after throwing an instance of 'migraphx::version_2_16_0::exception'", flush=True)
    os.abort()


def do_kill(request, messages):
    os.kill(os.getpid(), signal.SIGKILL)


def do_exit(request, messages):
    os._exit(42)


def do_silence(request, messages):
    os._exit(0)


def do_gpu_fault(request, messages):
    print("\x1b[31mMemory access fault by GPU node-1 (Agent handle: 0x55) on address 0x7f.\x1b[0m", flush=True)
    os.abort()


def do_hog(request, messages):
    held = []
    while True:
        held.append(bytearray(16 << 20))


def do_hog_elsewhere(request, messages):
    script = "held = []\nwhile True: held.append(bytearray(16 << 20))"
    subprocess.run([sys.executable, "-c", script], start_new_session=True, check=False)


def do_impossible(request, messages):
    bytearray(1 << 60)


def do_hang(request, messages):
    signal.pause()


def do_spin(request, messages):
    end = time.monotonic() + request["seconds"]
    while time.monotonic() < end:
        pass
    return {"answer": 42}


def do_flood(request, messages):
    while True:
        os.write(1, b"x" * 65536)


def do_stretch_log(request, messages):
    """Make the log as long as a file may be, in no time, and answer."""
    os.truncate(1, os.fstat(1).st_size + request["bytes"])
    return {"answer": 42}


def do_babble(request, messages):
    """What is not a message, on the pipe to the worker: no JSON, one line without an end, or what others may say."""
    phase = {"phase": "compiling", "progress": None, "detail": ""}
    line = {
        "text": b"hello\n",
        "deep": b"[" * 100_000 + b"\n",
        "nested": b'{"result": {"a": ' + b"[" * 900 + b"]" * 900 + b"}}\n",
        "endless": b"x" * (1 << 20),
        "phase": json.dumps({**phase, "phase": "dancing"}).encode() + b"\n",
        "progress": json.dumps({**phase, "progress": "half"}).encode() + b"\n",
        "no number": json.dumps({**phase, "progress": float("nan")}).encode() + b"\n",
        "novel": json.dumps({**phase, "detail": "x" * 100_000}).encode() + b"\n",
        "error": b'{"error": {"kind": ["bad_model"], "message": 5}}\n',
        "guard": b'{"ended": {}}\n',
    }[request["what"]]
    while request["what"] == "endless":
        os.write(messages.descriptor, line)
    while line:
        line = line[os.write(messages.descriptor, line) :]
    time.sleep(60)


def do_say(request, messages):
    """Answer with what the test says, and where it wants with many names more in one of its fields."""
    answer = request["says"]
    place = answer
    for step in request.get("fill", ()):
        place = place[step]
    if "fill" in request:
        place |= {f"output {index} {'x' * 1000}": 0.0 for index in range(request["count"])}
    return answer


def do_change_phases(request, messages):
    for index in range(request["count"]):
        messages.phase(("compiling", "tuning")[index % 2])
    return {"answer": 42}


def do_chatter(request, messages):
    """Say the same again and again, so that its worker does nothing but listen."""
    line = b'{"phase": "compiling", "progress": null, "detail": ""}\n' * 1000
    for _ in range(request["count"] // 1000):
        os.write(messages.descriptor, line)
    return {"answer": 42}


def do_talk(request, messages):
    for index in range(5):
        messages.phase("tuning", index / 5, f"op {index}")
    return {"long": "x" * 300_000}


def do_mumble(request, messages):
    """Name a file whose name is not UTF-8, as Python spells it, and leave one."""
    messages.phase("tuning", None, "reads \udcff")
    (Path(request["folder"]) / "\udcff").symlink_to("/")
    raise sys.modules["farm.runner.protocol"].RequestFailed("unverifiable", "cannot read \udcff", "\ud800")


def do_close_everything(request, messages):
    os.closerange(0, 4096)
    signal.pause()


def do_kill_guard(request, messages):
    os.kill(os.getppid(), signal.SIGKILL)
    signal.pause()


def do_raise(request, messages):
    raise RuntimeError(request["message"])


def do_reach(request, messages):
    """Try to reach what a sealed child must not; say about each probe whether it was refused."""
    worker, guard = request["worker"], os.getppid()
    probes = {
        "read another job's model": lambda: Path(request["other"]).read_bytes(),
        "list other jobs": lambda: list(Path(request["other"]).parent.iterdir()),
        "write to the node's cache": lambda: Path(request["other"]).write_bytes(b"poison"),
        "make a file beside it": lambda: Path(request["other"]).with_name("new").write_bytes(b"poison"),
        "change its own input": lambda: Path(request["input"]).write_bytes(b"poison"),
        "put another in its input's place": lambda: Path(request["input"]).unlink(),
        "change the runner's code": lambda: Path(child.__file__).open("a").close(),
        "read the worker's environment": lambda: Path(f"/proc/{worker}/environ").read_bytes(),
        "read the worker's memory": lambda: Path(f"/proc/{worker}/mem").open("rb").close(),
        "trace the worker": lambda: ptrace(worker),
        "signal the worker": lambda: os.kill(worker, signal.SIGCONT),
        "signal its guard": lambda: os.kill(guard, signal.SIGCONT),
        "limit the worker": lambda: limit_to_the_same(worker),
        "open another job's model to everybody": lambda: open_to_everybody(request["other"]),
        "change the times of another job's model": lambda: change_times(request["other"]),
        "list who may read it": lambda: os.setxattr(request["other"], "user.farm", b"x"),
        "connect to a server": lambda: socket.create_connection(("127.0.0.1", request["port"]), timeout=5).close(),
        "send a datagram": lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM).close(),
        "connect to a local socket": lambda: socket.socket(socket.AF_UNIX).connect(request["local"]),
        "send to a local socket": lambda: socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM).sendto(b"x", "nowhere"),
        "listen on a local socket": listen,
        "do so through another program": lambda: subprocess.run(
            [sys.executable, "-c", f"import socket; socket.create_connection(('127.0.0.1', {request['port']}))"],
            check=True,
            capture_output=True,
        ),
    }
    return {"probes": {name: attempt(probe) for name, probe in probes.items()}}


def listen():
    """As CUDA does, in the kernel's own space of names."""
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(f"\0farm-test-{os.getpid()}")
        server.listen(1)


def attempt(probe):
    try:
        probe()
    except (OSError, subprocess.CalledProcessError) as error:
        return f"refused: {error}"
    return "reached"


def limit_to_the_same(pid):
    import resource

    resource.prlimit(pid, resource.RLIMIT_CORE, resource.getrlimit(resource.RLIMIT_CORE))


def open_to_everybody(path):
    os.chmod(path, 0o646)  # noqa: PTH101
    if Path(path).stat().st_mode & 0o777 != 0o646:
        raise PermissionError("nothing was changed")


def change_times(path):
    before = Path(path).stat().st_mtime_ns
    os.utime(path, ns=(1, before - 10**9))
    if Path(path).stat().st_mtime_ns == before:
        raise PermissionError("nothing was changed")


def ptrace(pid):
    libc = ctypes.CDLL(None, use_errno=True)
    attach = 16
    if libc.ptrace(attach, pid, 0, 0) < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def do_make_files(request, messages):
    """Make files in the ways of Python's library."""
    folder = Path(request["folder"])
    (folder / "touched").touch()
    (folder / "touched").touch()
    shutil.copy2(folder / "touched", folder / "copied")
    return {"made": sorted(entry.name for entry in folder.iterdir())}


def do_read(request, messages):
    listed = sorted(entry.name for entry in Path(request["folder"]).iterdir())
    return {"read": Path(request["path"]).read_text(), "listed": listed}


def do_work(request, messages):
    """What a compiler does: reads its input, writes its output and temporary files, starts programs."""
    import tempfile

    with tempfile.NamedTemporaryFile() as file:
        file.write(Path(request["input"]).read_bytes())
    Path(request["output"]).write_bytes(b"made")
    Path(request["output"]).with_name("second").mkdir()
    done = subprocess.run([sys.executable, "-c", "print(6 * 7)"], check=True, capture_output=True, text=True)
    return {"answer": int(done.stdout)}


def do_fill(request, messages):
    """Write until somebody stops it: into one file, many, one without a name, or many empty ones."""
    folder = Path(request["folder"])
    os.chdir(folder)
    if request["how"] == "out of sight":
        for _ in range(25):  # A path that is longer than the kernel takes, of few characters.
            Path("\u20ac" * 85).mkdir()
            os.chdir("\u20ac" * 85)
    held = []
    for number in range(1 << 30):
        if request["how"] == "one":
            held = held or [Path("one").open("wb", buffering=0)]  # noqa: SIM115
            held[0].write(bytes(1 << 20))
        elif request["how"] == "unnamed":
            held.append(Path("unnamed").open("wb", buffering=0))  # noqa: SIM115
            Path("unnamed").unlink()
            held[-1].write(bytes(1 << 20))
        elif request["how"] == "empty":
            Path(str(number)).touch()
        else:
            Path(str(number)).write_bytes(bytes(1 << 20))


def do_gulp(request, messages):
    """Write as much as it likes at once, and answer before anybody looks."""
    (Path(request["folder"]) / "program").write_bytes(bytes(request["bytes"]))
    return {"answer": 42}


def do_forks(request, messages):
    """Start more and more processes, or threads, until nobody lets it."""
    import threading

    while True:
        try:
            if request["how"] == "threads":
                threading.Thread(target=signal.pause, daemon=True).start()
            elif os.fork() == 0:
                signal.pause()
        except (OSError, RuntimeError):
            signal.pause()


def do_hide(request, messages):
    """Let nobody look at it, also not who guards it."""
    hidden = ctypes.CDLL(None, use_errno=True).prctl(4, 0, 0, 0, 0) == 0
    return {"hidden": hidden}


def do_ipc(request, messages):
    """Ask the kernel for what outlives a process and is not a file: System V IPC, message queues, keys."""
    numbers = {
        "x86_64": {"shmget": 29, "semget": 64, "msgget": 68, "mq_open": 240, "add_key": 248},
        "aarch64": {"shmget": 194, "semget": 190, "msgget": 186, "mq_open": 180, "add_key": 217},
    }[os.uname().machine]
    arguments = {
        "shmget": (request["key"], 4096, 0o1600),
        "semget": (request["key"], 1, 0o1600),
        "msgget": (request["key"], 0o1600),
        "mq_open": (b"farm-test", os.O_CREAT | os.O_RDWR, 0o600, None),
        "add_key": (b"user", b"farm-test", b"x", 1, -4),
    }
    libc = ctypes.CDLL(None, use_errno=True)
    said = {}
    for name, number in numbers.items():
        ctypes.set_errno(0)
        got = libc.syscall(number, *arguments[name])
        said[name] = "refused" if got < 0 and ctypes.get_errno() == 13 else f"{got}, errno {ctypes.get_errno()}"
    return said


if __name__ == "__main__":
    sys.exit(child.start(work))
