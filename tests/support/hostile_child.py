"""A child that misbehaves on request, under the real guard. Started by `run_child(script=…)` in the tests."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import os
import shutil
import signal
import socket
import struct
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


def do_count_and_measure(request, messages):
    """Count as `do_count`, then measure alone and say so."""
    do_count(request, messages)
    with messages.alone():
        messages.phase("measuring", None, "measures")
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


def do_count_awake(request, messages):
    """Count as `do_count`, in two processes that wake each other up and whose first threads have ended."""
    import threading

    first = os.getpid()
    second = os.fork() or os.getpid()
    other = first if second == os.getpid() else second

    def wake_up():
        while True:
            os.kill(other, signal.SIGCONT)

    for _ in range(2):
        threading.Thread(target=wake_up).start()
    if second == os.getpid():
        ctypes.CDLL(None).pthread_exit(None)
    do_without_first_thread({**request, "then": "count"}, messages)


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


def do_version(request, messages):
    import importlib

    return {"answer": importlib.import_module(request["name"]).VERSION}


def do_told(request, messages):
    """Import a module after the cell's variables are set, as a compiler's child does."""
    import importlib

    os.environ.update(request["environment"])
    importlib.import_module(request["name"]).told("compile")
    return {"answer": 42}


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


def do_without_first_thread(request, messages):
    """Do what `then` names in a second thread, after the end of the first one: the kernel then says nothing of it."""
    import threading

    def go_on():
        own = Path(f"/proc/self/task/{os.getpid()}/stat")
        while own.read_text().rpartition(")")[2].split()[0] != "Z":
            time.sleep(0.01)
        globals()[f"do_{request['then']}"](request, messages)
        os._exit(0)

    threading.Thread(target=go_on).start()
    ctypes.CDLL(None).pthread_exit(None)


def do_with_own_files(request, messages):
    """Do what `then` names in a thread that shares its open files with no other, if the kernel lets it."""
    import threading

    def go_on():
        unshare = 2
        print("its own:", ctypes.CDLL(None).syscall(436, 1000, 1001, unshare) == 0, flush=True)
        globals()[f"do_{request['then']}"](request, messages)

    thread = threading.Thread(target=go_on)
    thread.start()
    thread.join()


def do_hog_elsewhere(request, messages):
    script = "held = []\nwhile True: held.append(bytearray(16 << 20))"
    subprocess.run([sys.executable, "-c", script], start_new_session=True, check=False)


def do_impossible(request, messages):
    bytearray(1 << 60)


def do_say_group(request, messages):
    """Answer with the control group that it was in from the start, and how long its thread, by its number, has run."""
    import threading

    group = Path("/proc/self/cgroup").read_text().rpartition("0::")[2].strip()
    return {"group": group, "ran": time.clock_gettime(time.pthread_getcpuclockid(threading.get_ident()))}


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


def do_stop_guard(request, messages):
    os.kill(os.getppid(), signal.SIGSTOP)
    signal.pause()


def do_kill_launcher(request, messages):
    """Kill whoever started its guard, and with `both` the guard, too."""
    guard = os.getppid()
    launcher = int(Path(f"/proc/{guard}/stat").read_text().rpartition(")")[2].split()[1])
    for pid in [launcher, guard] if request.get("both") else [launcher]:
        os.kill(pid, signal.SIGKILL)
    signal.pause()


def do_escape(request, messages):
    """Answer, and leave a process that its guard cannot know by parent, session or environment, or end the guard.

    It fights for the bytes of each pipe that it holds both ends of: one was its guard's, which then met an empty pipe.
    """
    guard = os.getppid()
    if os.fork() == 0:
        os.setsid()
        wipe_environment()
        if os.fork():
            os._exit(0)
        fight(guard)
        print(f"escaped as {os.getpid()}", flush=True)
        Path("escaped").touch()
        while True:
            signal.pause()
    while not Path("escaped").exists():
        time.sleep(0.01)
    return {"answer": 42}


def wipe_environment():
    """Take away what others could recognise this process by."""
    start, end = (int(field) for field in Path("/proc/self/stat").read_text().rpartition(")")[2].split()[47:49])
    ctypes.memset(start, 0, end - start)


def fight(guard):
    """Wake the guard by its own pipe, and take the byte away before it reads."""
    ends = {}
    for number in range(3, 64):
        if os.path.lexists(f"/proc/self/fd/{number}"):
            ends.setdefault(str(Path(f"/proc/self/fd/{number}").readlink()), []).append(number)
    pair = next((found for found in ends.values() if len(found) == 2), None)
    until = time.monotonic() + 10
    while pair and time.monotonic() < until and Path(f"/proc/{guard}").exists():
        for call in (lambda: os.write(pair[1], b"x"), lambda: os.read(pair[0], 1)) * 200:
            try:
                call()
            except BlockingIOError:
                continue


def do_chains(request, messages):
    """Answer, and leave chains of processes: each starts the next one and ends, faster than others can look."""
    for _ in range(request["count"]):
        if os.fork() == 0:
            os.setsid()
            while True:
                if os.fork():
                    os._exit(0)
    return {"answer": 42}


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
        "keep bytes in a pair of sockets": fill_a_pair,
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


def fill_a_pair():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        os.write(ours.fileno(), b"x")  # `send` is refused anyway.


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
    """Write twice as much as it may: into one file, many, one without a name, or many empty ones; or open some."""
    folder = Path(request["folder"])
    os.chdir(folder)
    if request["how"] == "out of sight":
        for _ in range(25):  # A path that is longer than the kernel takes, of few characters.
            Path("\u20ac" * 85).mkdir()
            os.chdir("\u20ac" * 85)
    held = []
    for number in range(1200 if request["how"] in ("empty", "open") else 200):
        if request["how"] == "one":
            held = held or [Path("one").open("wb", buffering=0)]  # noqa: SIM115
            held[0].write(bytes(1 << 20))
        elif request["how"] == "unnamed":
            held.append(Path("unnamed").open("wb", buffering=0))  # noqa: SIM115
            Path("unnamed").unlink()
            held[-1].write(bytes(1 << 20))
        elif request["how"] == "empty":
            Path(str(number)).touch()
        elif request["how"] == "open":  # Few each, so that the system's limit is not met.
            held.append(Path("/dev/null").open())  # noqa: SIM115
            if number % 20 == 0 and os.fork():
                signal.pause()
        else:
            Path(str(number)).write_bytes(bytes(1 << 20))
    signal.pause()


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


NUMBERS = {
    "x86_64": {"unshare": 272, "setns": 308, "clone": 56, "clone3": 435, "bpf": 321, "perf_event_open": 298,
               "modify_ldt": 154, "userfaultfd": 323, "memfd_secret": 447},
    "aarch64": {"unshare": 97, "setns": 268, "clone": 220, "clone3": 435, "bpf": 280, "perf_event_open": 241,
                "userfaultfd": 282, "memfd_secret": 447},
}  # fmt: skip
NEW_USER, NEW_MOUNTS, NEW_NETWORK, OF_OWN = 0x10000000, 0x00020000, 0x40000000, signal.SIGCHLD


def do_namespaces(request, messages):
    """Ask the kernel for namespaces and for large parts of it; say for each what it answers."""
    calls = {
        "unshare users": ("unshare", NEW_USER),
        "unshare mounts": ("unshare", NEW_MOUNTS),
        "unshare the network": ("unshare", NEW_NETWORK),
        "enter a namespace": ("setns", os.open("/proc/self/ns/user", os.O_RDONLY), 0),
        "clone with users": ("clone", NEW_USER | OF_OWN, 0, 0, 0, 0),
        "clone with a network": ("clone", NEW_USER | NEW_NETWORK | OF_OWN, 0, 0, 0, 0),
        "clone3": ("clone3", 0, 0),
        "bpf": ("bpf", 0, 0, 0),
        "perf_event_open": ("perf_event_open", bytes(128), 0, -1, -1, 0),
        "userfaultfd": ("userfaultfd", 0),
        "memfd_secret": ("memfd_secret", 0),
        **({"modify_ldt": ("modify_ldt", 0, 0, 0)} if os.uname().machine == "x86_64" else {}),
    }
    return {"said": {name: called_apart(*call) for name, call in calls.items()}}


def called_apart(name, *arguments):
    """Make a call in a process of its own, and return the name of its error."""
    libc = ctypes.CDLL(None, use_errno=True)
    pid = os.fork()
    if pid == 0:
        failed = libc.syscall(NUMBERS[os.uname().machine][name], *arguments) < 0
        os._exit(ctypes.get_errno() if failed else 0)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return errno.errorcode.get(code, "done")


def square(number):
    return number * number


def do_many(request, messages):
    """Work in threads and processes, started in each way that Python knows."""
    import multiprocessing
    from concurrent.futures import ThreadPoolExecutor

    found = {}
    with ThreadPoolExecutor(4) as threads:
        found["threads"] = sum(threads.map(square, range(10)))
    for how in ("fork", "spawn", "forkserver"):
        try:
            process = multiprocessing.get_context(how).Process(target=square, args=(3,))
            process.start()
            process.join()
            found[how] = process.exitcode
        except OSError as error:
            found[how] = errno.errorcode[error.errno]
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        process.kill()
        found["killed"] = process.wait()
    except PermissionError:
        found["killed"] = "refused"
    return found


def do_cut(request, messages):
    """Cut short what it may not write, in each way; then a file of its own."""
    own = Path(request["folder"]) / "own"
    own.write_bytes(b"longer")
    own.write_bytes(b"own")
    with own.open("r+b") as file:
        file.truncate(2)
    said = {
        f"{how} {name}": attempt(lambda path=request[name], flags=flags: os.open(path, flags))
        for name in ("other", "input")
        for how, flags in (("read", os.O_RDONLY | os.O_TRUNC), ("neither", 3 | os.O_TRUNC), ("write", os.O_TRUNC | 1))
    }
    said |= {
        f"truncate {name}": attempt(lambda path=request[name]: os.truncate(path, 0)) for name in ("other", "input")
    }
    return {"own": own.read_text(), "said": said}


def do_signal_guard(request, messages):
    """End its guard in each way that sends a signal."""
    guard, said = os.getppid(), {}
    libc = ctypes.CDLL(None, use_errno=True)
    reading, writing = os.pipe()

    def by_a_file(command):
        fcntl.fcntl(reading, command, guard if command == fcntl.F_SETOWN else struct.pack("ii", 1, guard))
        fcntl.fcntl(reading, 10, signal.SIGKILL)
        fcntl.fcntl(reading, fcntl.F_SETFL, os.O_ASYNC)
        os.write(writing, b"x")
        raise PermissionError("nothing came of it")

    def call(name, *arguments):
        number = {"tgkill": (234, 131), "tkill": (200, 130), "rt_sigqueueinfo": (129, 138)}[name]
        if libc.syscall(number[os.uname().machine == "aarch64"], *arguments) < 0:
            raise OSError(ctypes.get_errno(), name)

    ways = {
        "kill": lambda: os.kill(guard, signal.SIGKILL),
        "tgkill": lambda: call("tgkill", guard, guard, signal.SIGKILL),
        "tkill": lambda: call("tkill", guard, signal.SIGKILL),
        "rt_sigqueueinfo": lambda: call("rt_sigqueueinfo", guard, signal.SIGKILL, bytes(128)),
        "pidfd": lambda: signal.pidfd_send_signal(os.pidfd_open(guard), signal.SIGKILL),
        "own a file": lambda: by_a_file(fcntl.F_SETOWN),
        "own a file by its process": lambda: by_a_file(15),
    }
    for name, way in ways.items():
        said[name] = attempt(way)
    return {"said": said}


def as_by_an_older_kernel(version):
    """Let the seal believe that Landlock has this version of its interface."""
    import importlib

    child.add_package(child.PACKAGE, str(Path(child.__file__).parent))
    seal = importlib.import_module(f"{child.PACKAGE}.seal")
    seal._landlock_version = lambda: version


def where_clone3_is_refused():
    """Let the guard ask the kernel for a call that there is not, as behind Docker's filter."""
    import importlib

    child.add_package(child.PACKAGE, str(Path(child.__file__).parent))
    importlib.import_module(f"{child.PACKAGE}.launcher").SYS_CLONE3 = 9999


if __name__ == "__main__":
    # A template has no request.
    asked = json.loads(Path(sys.argv[1]).read_text()) if len(sys.argv) > 3 else {}
    if version := asked.get("landlock"):
        as_by_an_older_kernel(version)
    if asked.get("no_clone3"):
        where_clone3_is_refused()
    sys.exit(child.start(work))
