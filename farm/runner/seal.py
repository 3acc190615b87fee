"""The seal of the child: keeps a hostile model or compiler from everything that it does not need.

Mechanisms of the kernel that need no privilege, no other program and no namespace, and so also work inside containers.
Landlock (Linux 5.13, `Documentation/userspace-api/landlock.rst`) leaves it the interpreter, the system's libraries, its
inputs to read and its own folders to write; with version 6 of its interface also no other process to signal.
A seccomp filter (`Documentation/userspace-api/seccomp_filter.rst`) leaves it no socket and no IPC object of the kernel
(System V, message queues, keys), no namespace, no limits of other processes, and no mode, owner or time of a file:
Landlock does not look at these. Before version 6 the filter keeps signals, too; before version 3 what cuts a file
short. A root's capabilities are dropped. None
of it can be taken back, and it holds for all that the child starts.

Written by hand on ctypes, because the child's interpreter has only the standard library, numpy and the compiler.
"""

from __future__ import annotations

import ctypes
import errno
import glob
import os
import platform
import stat
import struct
import sys
from collections.abc import Iterable, Iterator
from typing import Any

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # the same numbers on every architecture
_VERSION = 1  # flag of _CREATE_RULESET: ask for the version of the interface
_PATH_BENEATH = 1
_PR_SET_DUMPABLE, _PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _MODE_FILTER = 4, 38, 22, 2
_CAPABILITY_VERSION = 0x20080522

# Rights on files, by their bits in <linux/landlock.h>.
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
_REFER, _TRUNCATE, _IOCTL_DEV = 1 << 13, 1 << 14, 1 << 15
_TRUNCATE_IN = 3
_ADDED_IN = {2: _REFER, _TRUNCATE_IN: _TRUNCATE, 5: _IOCTL_DEV}
_FIRST_RIGHTS = (1 << 13) - 1
_READ = _READ_FILE | _READ_DIR
_MAKE_DEVICES = 1 << 6 | 1 << 11
_OF_FILES = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL_DEV
"""Rights that apply to a file; a rule on a file must not name others."""
_SCOPES_IN = 6
_SCOPES = 1 << 0 | 1 << 1  # abstract sockets, signals

_ARCHITECTURES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}
"""By architecture: its AUDIT_ARCH_…, and which number of a call is its own."""
_NO_CALL = 0xFFFF  # as the number of a call that an architecture lacks
_REFUSED = {
    "io_uring_setup": (425, 425),  # Its rings open sockets, too.
    # By these a socket reaches others.
    "connect": (42, 203), "sendto": (44, 206), "sendmsg": (46, 211), "sendmmsg": (307, 269),
    # Their objects outlive their processes, and cannot be traced to an attempt.
    "shmget": (29, 194), "semget": (64, 190), "msgget": (68, 186), "mq_open": (240, 180),
    "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219),
    # Access lists open a file to others.
    "setxattr": (188, 5), "lsetxattr": (189, 6), "fsetxattr": (190, 7), "setxattrat": (463, 463),
    # A namespace gives all capabilities inside, and with them most of what the kernel does for a root alone.
    "unshare": (272, 97), "setns": (308, 268),
    # Large parts of the kernel that no compiler needs, and memory that nobody else sees.
    "bpf": (321, 280), "perf_event_open": (298, 241), "modify_ldt": (154, _NO_CALL), "userfaultfd": (323, 282),
    "memfd_secret": (447, 447),
}  # fmt: skip
_WITHOUT_EFFECT = {
    # Compilers fail if they cannot do this to their own files.
    "chmod": (90, 52), "fchmod": (91, 53), "fchmodat": (268, 54), "fchmodat2": (452, 452), "chown": (92, 55),
    "lchown": (94, 55), "fchown": (93, 55), "fchownat": (260, 54),
    "utime": (132, 88), "utimes": (235, 88), "futimesat": (261, 88), "utimensat": (280, 88),
}  # fmt: skip
"""Answered with success; aarch64 has some of them alone."""
_WITHOUT_CALL = {"clone3": (435, 435)}
"""Answered as by a kernel that lacks the call: libraries then use `clone`, whose flags a filter can look at."""
_LOOKED_AT = {
    "socket": (41, 198), "socketpair": (53, 199), "prctl": (157, 167), "prlimit64": (302, 261), "clone": (56, 220),
    "kill": (62, 129), "tgkill": (234, 131), "fcntl": (72, 25), "ioctl": (16, 29), "close_range": (436, 436),
    "open": (2, _NO_CALL), "openat": (257, 56),
}  # fmt: skip
"""An argument decides."""
_OTHER_SIGNALS = {
    "tkill": (200, 130), "rt_sigqueueinfo": (129, 138), "rt_tgsigqueueinfo": (297, 240),
    "pidfd_send_signal": (424, 424),
}  # fmt: skip
"""Refused too where Landlock does not keep signals from other processes."""
_BY_PATH = {"truncate": (76, 45)}  # Refused too where Landlock does not see that a file is cut short.
_BY_STRUCTURE = {"openat2": (437, 437)}  # Not there, then: a filter cannot look at its flags.
_X32_BIT = 0x40000000
_AF_UNIX = 1
_SELF = 0  # as the process id that a call is about
_NAMESPACES = 0x7E020000  # CLONE_NEW… of mounts, control groups, host names, IPC, users, processes, networks
_SHARE_FILES, _THREAD = 0x400, 0x10000  # flags of `clone`
_UNSHARE = 2  # flag of `close_range`
_CUTS = 0x200 | 3  # O_TRUNC and O_ACCMODE: of open's flags, what decides
_CUTS_UNSEEN = 0x200, 0x200 | 3  # A file opened so is cut short without a right to write: for reading, or for neither.
_SET_OWNER = (8, 15), (0x8901, 0x8902)  # What `fcntl` and `ioctl` are asked so that a file sends signals to a process.

_SYSTEM = (
    "/usr", "/lib", "/lib32", "/lib64", "/bin", "/sbin", "/proc", "/sys", "/etc/ld.so.cache", "/etc/ld.so.conf",
    "/etc/ld.so.conf.d", "/etc/alternatives", "/etc/localtime", "/etc/passwd", "/etc/group", "/etc/nsswitch.conf",
    "/etc/OpenCL", "/etc/amd", "/opt/rocm*",
)  # fmt: skip
"""What compilers and interpreters read of a system; nowhere here does a service keep a secret."""
_DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
# Both makers' runtimes keep shared memory in /dev/shm. CUDA does not start if it cannot name its own threads.
_GPU_DEVICES = {
    "amd": ("/dev/kfd", "/dev/dri", "/dev/shm"),  # noqa: S108
    "nvidia": ("/dev/nvidia*", "/dev/shm", "/proc/self/task"),  # noqa: S108
}

FILES, NETWORK, PROCESSES = "files", "network", "processes"


def unsealable() -> list[str]:
    """Return what this kernel cannot keep from a child, out of files, network and processes."""
    version, filters = _landlock_version(), platform.machine() in _ARCHITECTURES
    kept = {FILES: version >= 1, NETWORK: filters, PROCESSES: filters or version >= _SCOPES_IN}
    return [name for name, is_kept in kept.items() if not is_kept]


def seal(read: Iterable[str], write: Iterable[str], *, maker: str) -> None:
    """Take away from this process, and from all that it will start, what it does not need.

    `read` and `write` are the real paths of files or folders, in addition to those of system and interpreter. A path
    that does not exist is passed over. A path with a link in it is refused: an earlier child may have made the link.
    The devices of a GPU's `maker` stay (empty: none). CUDA also gets a local socket, since it listens on one; nothing
    can be sent or reached by that. What the kernel cannot do (`unsealable`) is not done.

    Raises OSError for a path with a link, and if the kernel refuses what it says it can do. Threads that already run
    are not sealed.
    """
    _call("prctl", _PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    # A worker that is root (in a container) keeps no more than its user: CAP_PERFMON reads every environment.
    _call("capset", struct.pack("Ii", _CAPABILITY_VERSION, 0), bytes(24))
    if FILES not in (missing := unsealable()):
        patterns = (*_DEVICES, *_GPU_DEVICES.get(maker, ()))
        _allow_files(read, write, [path for pattern in patterns for path in glob.glob(pattern)])  # noqa: PTH207
    if NETWORK not in missing:
        _forbid_calls(local_sockets=maker == "nvidia", version=_landlock_version())
        os.utime = _no_utime


def _no_utime(path: Any, *_: Any, dir_fd: int | None = None, follow_symlinks: bool = True, **__: Any) -> None:
    """Change no times, as the kernel does now, but raise FileNotFoundError: `Path.touch` makes a file only then."""
    os.stat(path, dir_fd=dir_fd, follow_symlinks=follow_symlinks)


def _interpreter() -> Iterator[str]:
    """Yield the folders of the system, of this interpreter, and of the libraries on its search paths."""
    for pattern in _SYSTEM:
        yield from glob.glob(pattern)  # noqa: PTH207 (light modules only: this runs before any import)
    # Not the whole import path: a development install names the folder of the sources, and data may lie below it.
    yield from (sys.prefix, sys.base_prefix, os.path.dirname(__file__))  # noqa: PTH120
    for name in ("LD_LIBRARY_PATH", "ROCM_PATH", "ROCM_HOME", "HIP_PATH", "SSL_CERT_FILE"):
        yield from filter(None, os.environ.get(name, "").split(os.pathsep))


def _allow_files(read: Iterable[str], write: Iterable[str], devices: Iterable[str]) -> None:
    version = _landlock_version()
    rights = _FIRST_RIGHTS | sum(bit for since, bit in _ADDED_IN.items() if since <= version)
    attributes = struct.pack("QQQ", rights, 0, _SCOPES if version >= _SCOPES_IN else 0)
    # An older kernel knows a shorter structure, and accepts a longer one if the rest is zero.
    ruleset = _call("syscall", _CREATE_RULESET, attributes, len(attributes), 0)
    try:
        for path in _interpreter():
            _allow(ruleset, os.path.realpath(path), _READ | _EXECUTE)
        for path in read:
            _allow(ruleset, path, _READ | _EXECUTE)
        for path in (*write, *map(os.path.realpath, devices)):
            _allow(ruleset, path, rights & ~(_EXECUTE | _MAKE_DEVICES))
        _call("syscall", _RESTRICT_SELF, ruleset, 0)
    finally:
        os.close(ruleset)


def _allow(ruleset: int, path: str, rights: int) -> None:
    try:
        place = _real(path)
    except (FileNotFoundError, PermissionError):
        return
    try:
        if not stat.S_ISDIR(os.fstat(place).st_mode):
            rights &= _OF_FILES
        _call("syscall", _ADD_RULE, ruleset, _PATH_BENEATH, struct.pack("=Qi", rights, place), 0)
    finally:
        os.close(place)


def _real(path: str) -> int:
    """Open a path in which no part is a link. Raises OSError (ELOOP) for one."""
    if not os.path.isabs(path):  # noqa: PTH117 (light modules only)
        raise OSError(errno.EINVAL, "not a whole path", path)
    place = os.open("/", os.O_PATH | os.O_CLOEXEC)
    for part in filter(None, path.split("/")):
        try:
            inner = os.open(part, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=place)
        finally:
            os.close(place)
        if stat.S_ISLNK(os.fstat(inner).st_mode):
            os.close(inner)
            raise OSError(errno.ELOOP, "a link leads out of what was granted", path)
        place = inner
    return place


def _forbid_calls(*, local_sockets: bool, version: int) -> None:
    """Install the filter. By its `version`, Landlock keeps signals to other processes, and files from being cut short.

    Else the filter does. Then this process may signal only itself, and the processes that it starts may signal nobody:
    a filter cannot tell which process they mean, and each could end its guard. Only a file that is open for writing is
    cut short.
    """
    architecture, own = _ARCHITECTURES[platform.machine()]
    # (code, jump if true, jump if false, value); codes and the layout of the data are in <linux/bpf_common.h> and
    # <linux/seccomp.h>. Calls of another architecture (32-bit programs) are refused whole.
    load, equal, at_least, any_bit, keep, answer = 0x20, 0x15, 0x35, 0x45, 0x54, 0x06
    error, allow = 0x00050000, 0x7FFF0000
    refuse = error | errno.EACCES
    program = [
        (load, 0, 0, 4),
        (equal, 1, 0, architecture),
        (answer, 0, 0, refuse),
        (load, 0, 0, 0),
        (at_least, 0, 1, _X32_BIT),
        (answer, 0, 0, refuse),
    ]
    answers = [(_REFUSED, refuse), (_WITHOUT_EFFECT, error), (_WITHOUT_CALL, error | errno.ENOSYS)]
    # The call, the index of its argument, how that is compared with which value, and the answers if so and if not (0:
    # the next look decides).
    looks = [
        ("socket", 0, equal, _AF_UNIX, allow if local_sockets else refuse, refuse),
        # A pair holds megabytes that belong to no process.
        ("socketpair", 0, equal, _AF_UNIX, allow if local_sockets else refuse, refuse),
        ("prctl", 0, equal, _PR_SET_DUMPABLE, refuse, allow),  # The guard must be able to look at the child.
        ("prlimit64", 0, equal, _SELF, allow, refuse),  # Only its own limits: lower ones could end another process.
        ("clone", 0, any_bit, _NAMESPACES, refuse, 0),
        # No thread has open files of its own: the guard looks at those of one.
        ("clone", 0, any_bit, _SHARE_FILES, allow, 0),
        ("clone", 0, any_bit, _THREAD, refuse, allow),
        ("close_range", 2, any_bit, _UNSHARE, refuse, allow),
    ]
    if version < _TRUNCATE_IN:
        answers += [(_BY_PATH, refuse), (_BY_STRUCTURE, error | errno.ENOSYS)]
        opens = (("open", 1), ("openat", 2))
        looks += [(name, flags, equal, way, refuse, 0) for name, flags in opens for way in _CUTS_UNSEEN]
    if version < _SCOPES_IN:
        answers.append((_OTHER_SIGNALS, refuse))
        looks += [(name, 0, equal, os.getpid(), allow, refuse) for name in ("kill", "tgkill")]
        asked = zip(("fcntl", "ioctl"), _SET_OWNER, strict=True)
        looks += [(name, 1, equal, what, refuse, 0) for name, whats in asked for what in whats]
    for calls, said in answers:
        for number in dict.fromkeys(numbers[own] for numbers in calls.values()):
            program += [(equal, 0, 1, number), (answer, 0, 0, said)]
    for name, argument, compare, value, right, wrong in looks:
        last = [(answer, 0, 0, wrong)] if wrong else [(load, 0, 0, 0)]
        decides = _CUTS if value in _CUTS_UNSEEN else 0xFFFFFFFF
        program += [(equal, 0, 5, _LOOKED_AT[name][own]), (load, 0, 0, 16 + 8 * argument), (keep, 0, 0, decides)]
        program += [(compare, 0, 1, value), (answer, 0, 0, right), *last]
    program.append((answer, 0, 0, allow))
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in program))
    whole = struct.pack("HxxxxxxP", len(program), ctypes.addressof(code))
    _call("prctl", _PR_SET_SECCOMP, _MODE_FILTER, ctypes.c_char_p(whole), 0, 0)


def _landlock_version() -> int:
    """Return the version of the kernel's Landlock interface; 0 if it has none, or Landlock is switched off."""
    try:
        return _call("syscall", _CREATE_RULESET, None, 0, _VERSION)
    except OSError:
        return 0


def _call(name: str, *arguments: ctypes.c_char_p | bytes | int | None) -> int:
    function = getattr(ctypes.CDLL(None, use_errno=True), name)
    function.restype = ctypes.c_long
    wide = [ctypes.c_long(argument) if isinstance(argument, int) else argument for argument in arguments]
    answer = int(function(*wide))
    if answer < 0:
        raise OSError(ctypes.get_errno(), f"{name}: {os.strerror(ctypes.get_errno())}")
    return answer
