"""Set up MIGraphX from Debian sid in a tree of its own, and run the tests of this folder there.

    python -m tests.sid [--tree FOLDER] [PYTEST-ARGUMENT …]
    python -m tests.sid [--tree FOLDER] --rehearse [ARGUMENT-OF-TESTS.GPU …]

The tree (7 GB) is made once, in three to five minutes, and kept. The tests enter it in a mount namespace: the machine's
/sys and /dev are hidden there by those of a recorded node with an MI210 and a RX 7900 XTX (`tests/support/nodes`), and
a stand-in for the HIP runtime (`tests/support/amd_sid`) plays the cards. So a genuine compiler makes genuine programs;
launches do nothing, and accuracy and speed are not measured.

Needs root, debootstrap and Debian's mirror; where these are not to be had, it says so and ends well. sid changes every
day: where it has another MIGraphX than 2.14, or MIGraphX's own driver does not compile, it says that, too.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import subprocess
import sys
import time
from pathlib import Path

from packaging.markers import default_environment
from packaging.requirements import Requirement

from tests.gpu.larger_nets import small
from tests.support.places import ROOT
from tests.support.recorded import unpack

HERE = Path(__file__).parent
SUPPORT = "/usr/local/lib/farm-sid"
"""Where the tree has `tests/support/amd_sid`."""
STANDIN = f"{SUPPORT}/libhip_standin.so"
LONGEST = 900.0
"""Seconds for each part of making the tree."""
MIRROR = "http://deb.debian.org/debian"
PACKAGES = (
    "migraphx migraphx-tools libmigraphx-c3 libmigraphx-c-dev migraphx-dev libamdhip64-dev rocm-device-libs-21 clang-21"
    " clang-tools-21 llvm-21 lld-21 gcc libc6-dev python3 python3-venv ca-certificates"
)
PLATFORMS = (
    "any",
    "manylinux1",
    "manylinux2010",
    "manylinux2014",
    *(f"manylinux_2_{n}" for n in (5, 12, 17, 26, 27, 28)),
)


class NotToBeHad(Exception):
    """Something that this needs is not here; the message says what."""


def main() -> int:
    """Make what is missing of the tree, and run pytest in it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tree", type=Path, default=ROOT / ".farm" / "sid", help="the folder of the tree")
    parser.add_argument("--rehearse", action="store_true", help="rehearse `make amd-test` there, in place of the tests")
    given, rest = parser.parse_known_args()
    folder: Path = given.tree.resolve()
    started = time.monotonic()
    try:
        require_machine()
        make_tree(folder)
        python = install_farm(folder)
        require_compiler(folder, make_node(folder))
    except NotToBeHad as error:
        print(f"SKIPPED: {error}")
        return 0
    except subprocess.TimeoutExpired as error:
        print(f"SKIPPED: {error.cmd[0]} took more than {error.timeout:.0f} s")
        return 0
    print(f"the tree is ready after {time.monotonic() - started:.0f} s", flush=True)
    command = [python, "-m", "pytest", "-p", "no:cacheprovider", "tests/sid", "-rs", "--timeout", "900", *rest]
    if given.rehearse:
        variables = [f"{name}={SUPPORT}" for name in ("PYTHONPATH", "FARM_MIGRAPHX_PATH")]
        command = ["env", *variables, f"HIP_STANDIN={STANDIN}", python, "-m", "tests.gpu"]
        command += ["--maker", "amd", "--rehearse", "--short", "--kills", "2", "--out", "docs/gpu/amd", *rest]
    done = enter(folder, *command, seconds=None)
    print(f"{time.monotonic() - started:.0f} s; accuracy: NOT MEASURED, speed: NOT MEASURED (launches do nothing)")
    return done


def require_machine() -> None:
    """Raise NotToBeHad if this machine cannot have such a tree."""
    if os.geteuid() != 0:
        raise NotToBeHad("only root can make a tree and enter it")
    if platform.machine() != "x86_64":
        raise NotToBeHad("Debian has MIGraphX for amd64 only")
    if missing := [name for name in ("debootstrap", "unshare", "pivot_root") if not shutil.which(name)]:
        raise NotToBeHad(f"this machine has no {', '.join(missing)} (apt install debootstrap util-linux)")


def make_tree(folder: Path) -> None:
    """Make Debian's tree with MIGraphX, unless it is there. Raises NotToBeHad if the mirror does not give it."""
    tree = folder / "tree"
    made = folder / "made"
    if made.exists() and made.read_text() == PACKAGES:
        return
    shutil.rmtree(tree, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    options = ["--variant=minbase", "--include=ca-certificates", "sid", str(tree), MIRROR]
    command = ["debootstrap", *options]
    if subprocess.run(command, stdout=subprocess.DEVNULL, check=False, timeout=LONGEST).returncode:
        raise NotToBeHad(f"debootstrap gets no sid from {MIRROR}")
    (tree / "etc/apt/apt.conf.d/99farm").write_text('Acquire::Check-Valid-Until "false";\n')
    install = (
        f"apt-get update -q && DEBIAN_FRONTEND=noninteractive apt-get install -qy --no-install-recommends {PACKAGES}"
    )
    (folder / "node").mkdir(exist_ok=True)
    if enter(folder, "/bin/sh", "-c", f"({install}) > /var/log/farm-apt.log 2>&1"):
        raise NotToBeHad(f"apt does not install MIGraphX from sid today: see {tree}/var/log/farm-apt.log")
    made.write_text(PACKAGES)


def install_farm(folder: Path) -> str:
    """Install what the farm needs for the tree's own Python, and what the tests put there; return its interpreter."""
    tree, lock = folder / "tree", ROOT / "deploy" / "locks" / "dev.txt"
    version = "3." + max(path.name.removeprefix("python3.") for path in (tree / "usr/lib").glob("python3.[0-9]*"))
    wheels, wanted = tree / "opt/wheels", "\n".join(requirements(lock, version))
    kept = tree / "opt/requirements.txt"
    if not kept.exists() or kept.read_text() != wanted:
        wheels.mkdir(parents=True, exist_ok=True)
        asked = folder / "requirements.txt"
        asked.write_text(wanted)
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--require-hashes", "-r", str(asked)]
        command += ["--only-binary", ":all:", "--python-version", version, "--implementation", "cp", "-d", str(wheels)]
        command += [f"--abi={abi}" for abi in (f"cp{version.replace('.', '')}", "abi3", "none")]
        command += ["--platform=any", *(f"--platform={name}_x86_64" for name in PLATFORMS if name != "any")]
        if subprocess.run(command, check=False, timeout=LONGEST).returncode:
            raise NotToBeHad(f"the registry has not every wheel for Python {version}")
        install = "rm -rf /opt/venv && python3 -m venv /opt/venv && /opt/venv/bin/pip --isolated install -q --no-index"
        install += " --no-deps --find-links /opt/wheels --require-hashes -r /opt/asked.txt"
        shutil.copy(asked, tree / "opt/asked.txt")
        if enter(folder, "/bin/sh", "-c", install):
            raise NotToBeHad(f"the farm's packages cannot be installed for Python {version}")
        kept.write_text(wanted)
    support = tree / SUPPORT[1:]
    shutil.rmtree(support, ignore_errors=True)
    shutil.copytree(ROOT / "tests/support/amd_sid", support)
    if enter(folder, "/bin/sh", "/farm/tests/sid/prepare.sh"):
        raise NotToBeHad("the stand-in for HIP does not compile against sid's headers of today")
    return "/opt/venv/bin/python"


def make_node(folder: Path) -> Path:
    """Write the recorded node that the tests see, and return its folder."""
    shutil.rmtree(folder / "node", ignore_errors=True)
    node = unpack("mixed", folder / "node")
    cpus = f"0-{(os.cpu_count() or 1) - 1}"
    for path in (*node.rglob("local_cpulist"), *node.rglob("cpulist")):
        path.write_text(cpus)
    (node / "opt/rocm/.info/version").write_text("7.1.1\n")
    return node


def require_compiler(folder: Path, node: Path) -> None:
    """Raise NotToBeHad unless Debian's MIGraphX is the one this was written for, and its own driver compiles."""
    small(node / "opt/net.onnx")
    if not list(folder.glob("tree/usr/lib/x86_64-linux-gnu/migraphx/lib/libmigraphx.so.2014000")):
        raise NotToBeHad("sid has another MIGraphX than 2.14")
    compile_ = "migraphx-driver compile /opt/net.onnx --gpu --binary -o /tmp/$card.mxr && test -s /tmp/$card.mxr"
    script = f"export LD_PRELOAD={STANDIN}; for card in 0 1; do ROCR_VISIBLE_DEVICES=$card {compile_} || exit 1; done"
    if enter(folder, "/bin/sh", "-c", f"({script}) > /var/log/farm-driver.log 2>&1"):
        raise NotToBeHad(f"sid's migraphx-driver compiles no net today: see {folder}/tree/var/log/farm-driver.log")


def requirements(lock: Path, version: str) -> list[str]:
    """Return the lines of a lock that count for another Python, with their hashes."""
    environment = {**default_environment(), "python_version": version, "python_full_version": f"{version}.0"}
    found = []
    for line in lock.read_text().replace("\\\n", " ").splitlines():
        head, _, hashes = line.strip().partition(" --hash")
        if not head or head.startswith("#"):
            continue
        wanted = Requirement(head)
        if wanted.marker is None or wanted.marker.evaluate(environment):
            found.append(f"{wanted.name}{wanted.specifier} --hash{hashes}")
    return found


def enter(folder: Path, *command: str, seconds: float | None = LONGEST) -> int:
    """Run a command in the tree, with the recorded node's /sys and /dev; return its exit status.

    Raises subprocess.TimeoutExpired.
    """
    script = [str(HERE / "enter.sh"), str(folder / "tree"), str(ROOT), str(folder / "node")]
    unshare = ["unshare", "--mount", "--propagation", "private", "sh", *script]
    clean = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root", "LANG": "C.UTF-8", "FARM_SID": "1"}
    return subprocess.run([*unshare, *command], env=clean, check=False, timeout=seconds).returncode


if __name__ == "__main__":
    sys.exit(main())
