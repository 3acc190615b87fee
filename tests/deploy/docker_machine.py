"""A Docker to test with: this machine's own, else one in a Debian tree that is made for it (root and debootstrap)."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.support.helpers import wait_until
from tests.support.places import ROOT

CACHE = Path(os.environ.get("FARM_DEPLOY_CACHE", "/var/tmp/farm-deploy-tests"))
"""Keeps the tree, the base image and Docker's data from run to run."""

BASE = "localhost/debian:trixie"
PACKAGES = ("docker.io", "docker-cli", "docker-compose", "iptables")
AUTHORITIES = Path("/etc/ssl/certs/ca-certificates.crt")

ENTER = """
set -e
tree=$1
mount --bind "$tree" "$tree"
for folder in proc sys dev; do mount --rbind /$folder "$tree/$folder"; done
mount -t tmpfs tmpfs "$tree/run"
mount -t tmpfs tmpfs "$tree/tmp"
for folder in "$2" "$3"; do mkdir -p "$tree$folder"; mount --bind "$folder" "$tree$folder"; done
cd "$tree"
mkdir -p old
pivot_root . old
umount -l /old
exec dockerd --storage-driver overlay2 --default-ulimit nofile=20000:20000
"""
"""A root of its own, not a chroot, in which runc cannot work."""


class Docker:
    """Runs docker's commands."""

    def __init__(self, prefix: Sequence[str] = ()) -> None:
        self._prefix = list(prefix)

    def __call__(self, *words: str | Path, check: bool = True, **environ: str) -> subprocess.CompletedProcess[str]:
        """Run `docker …` with its output as text."""
        command = [*self._prefix, "docker", *map(str, words)]
        # The builder that needs no further image.
        env = {**os.environ, "DOCKER_BUILDKIT": "0", "COMPOSE_DOCKER_CLI_BUILD": "0", **environ}
        done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
        assert not check or done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-5000:]}\n{done.stderr[-10000:]}"
        return done


def missing() -> str:
    """Why there is no Docker to test with; empty if there is."""
    if _works(Docker()):
        return ""
    if os.geteuid() != 0:
        return "no Docker with compose answers, and only root can start one in a tree"
    absent = [name for name in ("debootstrap", "setpriv", "unshare", "nsenter", "pivot_root") if not shutil.which(name)]
    return f"no Docker with compose answers, and {', '.join(absent)} is not installed" if absent else ""


@contextmanager
def docker_machine() -> Iterator[Docker]:
    """Yield a Docker that has the base image."""
    own = Docker()
    if _works(own):
        if not own("images", "-q", BASE).stdout:
            _import(own, _base())
        yield own
        return
    tree = _tree(_base())
    with (CACHE / "dockerd.log").open("w") as log:
        # It ends with this process, however that ends: two daemons cannot have one folder.
        command = ["setpriv", "--pdeathsig", "TERM", "unshare", "--mount", "--propagation", "private"]
        command += ["bash", "-c", ENTER, "bash", str(tree), str(ROOT), str(CACHE)]
        daemon = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
    docker = Docker(["nsenter", f"--mount=/proc/{daemon.pid}/ns/mnt", f"--wdns={ROOT}"])
    try:
        wait_until(lambda: daemon.poll() is not None or _works(docker), 60, "Docker's daemon")
        assert daemon.poll() is None, (CACHE / "dockerd.log").read_text()[-3000:]
        if not docker("images", "-q", BASE).stdout:
            _import(docker, CACHE / "base.tar")
        yield docker
    finally:
        daemon.send_signal(signal.SIGTERM)
        daemon.wait(60)


def _works(docker: Docker) -> bool:
    try:
        return docker("info", check=False).returncode == 0 and docker("compose", "version", check=False).returncode == 0
    except FileNotFoundError:
        return False


def _base() -> Path:
    """Return the archive of a small Debian with what the images' base has to have."""
    archive = CACHE / "base.tar"
    if not archive.is_file():
        tree = CACHE / "base"
        shutil.rmtree(tree, ignore_errors=True)
        tree.mkdir(parents=True)
        include = "--include=python3,python3-venv,ca-certificates"
        _run("debootstrap", "--variant=minbase", include, "trixie", tree)
        if AUTHORITIES.is_file():  # Registries may be behind a proxy that this machine trusts.
            shutil.copy(AUTHORITIES, tree / AUTHORITIES.relative_to("/"))
        _run("tar", "-C", tree, "-cf", f"{archive}.part", ".")
        Path(f"{archive}.part").rename(archive)
        shutil.rmtree(tree)
    return archive


def _tree(archive: Path) -> Path:
    """Return a tree that also has Docker."""
    tree = CACHE / "tree"
    if not (tree / "ready").is_file():
        shutil.rmtree(tree, ignore_errors=True)
        tree.mkdir(parents=True)
        _run("tar", "-C", tree, "-xf", archive)
        for name in ("resolv.conf", "hosts"):
            shutil.copy(f"/etc/{name}", tree / "etc" / name)
        install = f"apt-get update -qq && apt-get install -qq -y --no-install-recommends {' '.join(PACKAGES)}"
        _run("chroot", tree, "env", "DEBIAN_FRONTEND=noninteractive", "sh", "-c", install)
        (tree / "ready").touch()
    return tree


def _import(docker: Docker, archive: Path) -> None:
    docker("import", archive, BASE)


def _run(*words: str | Path) -> None:
    done = subprocess.run(list(map(str, words)), capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{words}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
