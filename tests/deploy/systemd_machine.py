"""A machine of namespaces on which systemd is process 1: its root is an overlay of this machine's, and goes with it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.helpers import wait_until
from tests.support.places import ROOT

SYSTEMD = Path("/lib/systemd/systemd")

BOOT = """
set -e
folder=$1 base=$2 site=$3 python=$4
mkdir "$folder/over" "$folder/root"
mount -t tmpfs tmpfs "$folder/over"
mkdir "$folder"/over/{root,root-work,site,site-work}
mount -t overlay -o "lowerdir=/,upperdir=$folder/over/root,workdir=$folder/over/root-work" overlay "$folder/root"
cd "$folder/root"
mkdir -p opt/python opt/farm old
if [ "$base" != /usr ]; then mount --bind "$base" opt/python; else mount --bind /usr opt/python; fi
mount -t proc proc proc
mount -t sysfs -o ro sysfs sys
mount -t cgroup2 cgroup2 sys/fs/cgroup
mount -t tmpfs -o mode=755 tmpfs dev
for name in null zero full random urandom tty; do touch dev/$name; mount --bind /dev/$name dev/$name; done
mkdir dev/shm dev/pts
mount -t tmpfs -o mode=1777 tmpfs dev/shm
mount -t devpts -o newinstance,ptmxmode=0666 devpts dev/pts
ln -s pts/ptmx dev/ptmx
ln -s /proc/self/fd dev/fd
mount -t tmpfs -o mode=755 tmpfs run
mount -t tmpfs -o mode=1777 tmpfs tmp

echo /opt/python/lib > etc/ld.so.conf.d/opt-python.conf
chroot . ldconfig
LD_LIBRARY_PATH=$base/lib chroot . "/opt/python/bin/$python" -m venv --without-pip /opt/farm
packages=opt/farm/lib/$python/site-packages
mount -t overlay -o "lowerdir=$site,upperdir=$folder/over/site,workdir=$folder/over/site-work" overlay $packages
rm -f $packages/_editable*
"$base/bin/$python" -m zipfile -e "$folder"/migraphx_farm-*.whl $packages
chmod -R a+rX $packages/farm $packages/tasks
printf '#!/opt/farm/bin/python\\nfrom farm.cli import main\\nmain()\\n' > opt/farm/bin/farm
chmod +x opt/farm/bin/farm
cp -r "$folder/etc" etc/farm
cp "$folder"/units/* etc/systemd/system/
for group in video render; do chroot . groupadd --force --system $group; done
chroot . useradd --system farm-serve
chroot . useradd --system farm-worker
printf '[Unit]\\nRequires=basic.target\\nAfter=basic.target\\nAllowIsolate=yes\\n' > etc/systemd/system/farm-test.target
# These change the kernel's settings, or what this machine's services left.
for name in sysctl modules-load tmpfiles-setup tmpfiles-setup-dev sysusers update-utmp; do
    ln -sf /dev/null etc/systemd/system/systemd-$name.service
done
pivot_root . old
umount -l /old
mount --make-rshared /
exec env -i container=test PATH=/usr/sbin:/usr/bin:/sbin:/bin /lib/systemd/systemd --unit=farm-test.target
"""
"""A container manager's work. Shared mounts are what carries LoadCredential's files to a service."""


def missing() -> str:
    """Why no systemd can be started here; empty if it can."""
    if os.geteuid() != 0:
        return "only root can start a systemd in namespaces"
    names = ("unshare", "nsenter", "pivot_root", "useradd", "systemctl", "ip")
    if absent := [name for name in names if not shutil.which(name)] + [SYSTEMD.name] * (not SYSTEMD.exists()):
        return f"not installed: {', '.join(absent)}"
    return "" if "cgroup2" in Path("/proc/filesystems").read_text() else "the kernel has no version 2 control groups"


class Machine:
    """Runs commands on it, as root."""

    def __init__(self, pid: int) -> None:
        self._enter = ["nsenter", f"--target={pid}", "--mount", "--pid", "--cgroup", "--uts", "--ipc", "--root", "--wd"]

    def __call__(self, *words: str, check: bool = True) -> str:
        """Return what a command printed."""
        clean = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}
        command = [*self._enter, *words]
        done = subprocess.run(command, env=clean, capture_output=True, text=True, check=False, timeout=120)
        assert not check or done.returncode == 0, f"{' '.join(words)}\n{done.stdout}{done.stderr}"
        return done.stdout + done.stderr

    def shown(self, unit: str, *names: str) -> dict[str, str]:
        """Return properties of a unit."""
        lines = self("systemctl", "show", f"--property={','.join(names)}", unit).splitlines()
        return dict(line.split("=", 1) for line in lines)


@contextmanager
def systemd_machine(folder: Path) -> Iterator[Machine]:
    """Boot it with this checkout's wheel in /opt/farm, and its units. `folder/etc` has what is to be in /etc/farm.

    It is in the network namespace of who calls. What it wrote is gone with it.
    """
    wheel = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(wheel, cwd=ROOT, check=True, capture_output=True)
    shutil.copytree(ROOT / "deploy/systemd", folder / "units")
    python = f"python{sys.version_info.major}.{sys.version_info.minor}"
    arguments = [str(folder), sys.base_prefix, sysconfig.get_path("purelib"), python]
    log = folder / "boot.log"
    with log.open("w") as output:
        spaces = ("--mount", "--pid", "--cgroup", "--uts", "--ipc", "--fork", "--kill-child", "--propagation=private")
        command = ["unshare", *spaces, "bash", "-c", BOOT, "boot", *arguments]
        outer = subprocess.Popen(command, stdout=output, stderr=output)
    children = Path(f"/proc/{outer.pid}/task/{outer.pid}/children")
    try:

        def booted() -> str:
            assert outer.poll() is None, log.read_text()
            pid = children.read_text().strip()
            return pid if pid and Path(f"/proc/{pid}/comm").read_text().strip() == "systemd" else ""

        machine = Machine(int(wait_until(booted, 120, "systemd is process 1")))
        wait_until(lambda: machine("systemctl", "is-system-running", check=False).strip() == "running", 60, "it runs")
        yield machine
    finally:
        outer.kill()  # Which ends process 1, and so all of it.
        outer.wait()
