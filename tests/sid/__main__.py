"""Set up MIGraphX from Debian sid in a tree of its own, and run the tests of this folder there.

    python -m tests.sid [--tree FOLDER] [PYTEST-ARGUMENT …]
    python -m tests.sid [--tree FOLDER] --rehearse [ARGUMENT-OF-TESTS.GPU …]

The tree (7 GB) is made once, in five to eight minutes, and kept. The tests enter it in a mount namespace: the machine's
/sys and /dev are hidden there by those of a recorded node with an MI210 and a RX 7900 XTX (`tests/support/nodes`; two
MI210 for a rehearsal), and a stand-in for the HIP runtime (`tests/support/amd_sid`) plays the cards. So a genuine
compiler makes genuine programs, and ONNX Runtime's genuine provider (from PyPI, where it is to be had) opens them;
launches do nothing, and accuracy and speed are not measured.

Needs root, debootstrap and a mirror of Debian: that of the machine's apt, with its proxy and authorities. Where these
are not to be had, it says so and ends well, and the next run begins anew. sid changes every day: where it has another
MIGraphX than 2.14, or other versions with which nothing compiles, it says that, too.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import NoReturn

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
ROOM = 9e9
"""Bytes on disk for a tree that is made, with what apt fetched for it."""
MIRROR = "http://deb.debian.org/debian"
"""Debian's own, for a machine that takes its packages from elsewhere."""
AUTHORITIES = Path("/etc/ssl/certs/ca-certificates.crt")
KNOWN = {"migraphx": "7.1.1", "libamdhip64-dev": "6.4.3", "libmiopen1": "6.4.3"}
"""Versions that this works with: if it cannot be set up with others, that is Debian's change and no fault of ours."""
CACHE = "/var/cache/farm-pytest"
"""What failed last, in the tree: the machine's own has what other targets ran."""
PACKAGES = (
    "migraphx migraphx-tools libmigraphx-c3 libmigraphx-c-dev migraphx-dev libamdhip64-dev rocm-device-libs-21 clang-21"
    " clang-tools-21 llvm-21 lld-21 gcc libc6-dev python3 python3-venv ca-certificates"
)
PROVIDER = "onnxruntime-migraphx==1.27.1 --hash=sha256:e7d6005b3dd17eff1f81d43318c740f4986548560339d08e8826456124e10b95"
"""For Python 3.14."""
PLATFORMS = (
    "any",
    "manylinux1",
    "manylinux2010",
    "manylinux2014",
    *(f"manylinux_2_{n}" for n in (5, 12, 17, 26, 27, 28, 34)),
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
    os.environ["PATH"] += ":/usr/sbin:/sbin"
    started = time.monotonic()
    try:
        require_machine(folder)
        make_tree(folder)
        python = install_farm(folder)
        require_compiler(folder, make_node(folder, "mi210" if given.rehearse else "mixed"))
    except NotToBeHad as error:
        print(f"SKIPPED, nothing of sid was tested: {error}")
        return 0
    provider = install_provider(folder)
    print(f"the tree is ready after {time.monotonic() - started:.0f} s", flush=True)
    variables = [f"{name}={SUPPORT}" for name in ("PYTHONPATH", "FARM_MIGRAPHX_PATH")] + ["ROCM=/usr"]
    variables += [f"FARM_TEST_ORT_MIGRAPHX={provider}"] if provider else []
    command = ["-m", "pytest", "-o", f"cache_dir={CACHE}", "tests/sid", "-rs", "--timeout", "900", *rest]
    if given.rehearse:
        variables.append(f"HIP_STANDIN={STANDIN}")
        command = ["-m", "tests.gpu", "--maker", "amd", "--rehearse", "--short", "--kills", "2"]
        command += ["--out", "docs/gpu/amd", *rest]
    done = enter(folder, "env", *variables, python, *command, seconds=None)
    print(f"{time.monotonic() - started:.0f} s; accuracy: NOT MEASURED, speed: NOT MEASURED (launches do nothing)")
    return done


def require_machine(folder: Path) -> None:
    """Raise NotToBeHad if this machine cannot have such a tree."""
    if os.geteuid() != 0:
        raise NotToBeHad("only root can make a tree and enter it")
    if platform.machine() != "x86_64":
        raise NotToBeHad("Debian has MIGraphX for amd64 only")
    if missing := [name for name in ("debootstrap", "unshare", "pivot_root") if not shutil.which(name)]:
        raise NotToBeHad(f"this machine has no {', '.join(missing)} (apt install debootstrap util-linux)")
    folder.mkdir(parents=True, exist_ok=True)
    if run([*ISOLATED, "mount", "-t", "tmpfs", "none", str(folder)], folder / "mount.log"):
        raise NotToBeHad(f"root may not mount anything here: {last_line(folder / 'mount.log')}")


def make_tree(folder: Path) -> None:
    """Make Debian's tree with MIGraphX, unless it is there. Raises NotToBeHad if the mirror does not give it."""
    tree = folder / "tree"
    made = folder / "made"
    if made.exists() and made.read_text() == PACKAGES:
        return
    made.unlink(missing_ok=True)
    shutil.rmtree(tree, ignore_errors=True)
    if (free := shutil.disk_usage(folder).free) < ROOM:
        raise NotToBeHad(f"the tree needs {ROOM / 1e9:.0f} GB, and {folder} has {free / 1e9:.1f} GB free")
    source, log = mirror(), folder / "debootstrap.log"
    command = ["debootstrap", "--variant=minbase", "--include=ca-certificates", "sid", str(tree), source]
    # In a mount namespace, so that nothing of it stays mounted, however it ends.
    if run([*ISOLATED, *command], log, env={**proxies(), **os.environ}):
        raise NotToBeHad(f"debootstrap gets no sid from {source}: {last_line(log)} (all of it is in {log})")
    (tree / "etc/apt/apt.conf.d/99farm").write_text("\n".join(apt_settings(tree)))
    install = (
        f"apt-get update -q && DEBIAN_FRONTEND=noninteractive apt-get install -qy --no-install-recommends {PACKAGES}"
        " && apt-get clean"
    )
    (folder / "node").mkdir(exist_ok=True)
    log = folder / "apt.log"
    if enter(folder, "/bin/sh", "-c", install, log=log):
        raise NotToBeHad(f"apt does not install MIGraphX from sid today: {last_line(log)} (all of it is in {log})")
    made.write_text(PACKAGES)


def mirror() -> str:
    """Return where this machine takes Debian from: it may reach no other."""
    command = ["apt-get", "indextargets", "--format", "$(LABEL) $(REPO_URI)", "Created-By: Packages", "Component: main"]
    found = [uri for label, _, uri in (line.partition(" ") for line in lines_of(command)) if label == "Debian"]
    return next((uri.rstrip("/") for uri in found if uri.startswith("http")), MIRROR)


def machine_settings() -> list[str]:
    """Return what this machine's apt has for fetching by HTTP, as lines of its configuration."""
    lines = lines_of(["apt-config", "dump"])
    return [line for line in lines if line.startswith("Acquire::http") and not line.endswith(' "";')]


def lines_of(command: Sequence[str]) -> list[str]:
    """Return what a command of apt prints; a machine without apt may have debootstrap, too."""
    if not shutil.which(command[0]):
        return []
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.splitlines()


def proxies() -> dict[str, str]:
    """Return the variables that have debootstrap use the proxy of this machine's apt."""
    found = (re.fullmatch(r'Acquire::(https?)::Proxy "(.+)";', line) for line in machine_settings())
    return {f"{match[1]}_proxy": match[2] for match in found if match and match[2] != "DIRECT"}


def apt_settings(tree: Path) -> list[str]:
    """Return what the tree's apt needs to fetch what this machine's can, and put there whom it trusts."""
    lines = ['Acquire::Check-Valid-Until "false";', 'Acquire::Retries "3";', *machine_settings()]
    if AUTHORITIES.is_file():
        shutil.copy(AUTHORITIES, tree / "etc/machine-authorities.crt")
        lines.append('Acquire::https::CaInfo "/etc/machine-authorities.crt";')
    return [*lines, ""]


def install_farm(folder: Path) -> str:
    """Install what the farm needs for the tree's own Python, and what the tests put there; return its interpreter."""
    tree, lock = folder / "tree", ROOT / "deploy" / "locks" / "dev.txt"
    version = python_of(tree)
    wanted = "\n".join(requirements(lock, version))
    kept = tree / "opt/requirements.txt"
    if not kept.exists() or kept.read_text() != wanted:
        download(folder, wanted)
        install = "rm -rf /opt/venv && python3 -m venv /opt/venv && /opt/venv/bin/pip --isolated install -q --no-index"
        install += " --no-deps --find-links /opt/wheels --require-hashes -r /opt/asked.txt"
        if enter(folder, "/bin/sh", "-c", install):
            raise NotToBeHad(f"the farm's packages cannot be installed for Python {version}")
        kept.write_text(wanted)
    support = tree / SUPPORT[1:]
    shutil.rmtree(support, ignore_errors=True)
    shutil.copytree(ROOT / "tests/support/amd_sid", support)
    if enter(folder, "/bin/sh", "/farm/tests/sid/prepare.sh", log=folder / "prepare.log"):
        give_up(folder, "the stand-in for HIP does not compile against sid's headers", folder / "prepare.log")
    return "/opt/venv/bin/python"


def python_of(tree: Path) -> str:
    """Return the version of the tree's Python: 3.14."""
    return "3." + max(path.name.removeprefix("python3.") for path in (tree / "usr/lib").glob("python3.[0-9]*"))


def download(folder: Path, wanted: str) -> None:
    """Bring wheels for the tree's Python into its /opt/wheels, from where this machine's pip takes them."""
    version, asked = python_of(folder / "tree"), folder / "tree/opt/asked.txt"
    asked.write_text(wanted)
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--require-hashes", "-r", str(asked)]
    command += ["--only-binary", ":all:", "--python-version", version, "--implementation", "cp"]
    command += [f"--abi={abi}" for abi in (f"cp{version.replace('.', '')}", "abi3", "none")]
    command += ["--platform=any", *(f"--platform={name}_x86_64" for name in PLATFORMS if name != "any")]
    log = folder / "pip.log"
    if run([*command, "-d", str(folder / "tree/opt/wheels")], log, env=os.environ):
        raise NotToBeHad(f"the registry has not every wheel for Python {version}: {last_line(log)}")


def install_provider(folder: Path) -> str:
    """Install ONNX Runtime with its genuine MIGraphX provider beside the farm's own; return its interpreter, or ""."""
    # The provider links HIP 7's runtime. The stand-in has all that it asks for; only the name has to be there.
    script = """cd /opt && ln -sf libamdhip64.so.6 /usr/lib/x86_64-linux-gnu/libamdhip64.so.7 &&
        rm -rf ort && python3 -m venv ort &&
        ort/bin/pip --isolated install -q --no-index --find-links wheels onnxruntime-migraphx"""
    log, made = folder / "provider.log", folder / "tree/opt/ort/made"
    if made.exists() and made.read_text() == PROVIDER:
        return "/opt/ort/bin/python"
    try:
        download(folder, PROVIDER)
        if enter(folder, "/bin/sh", "-c", script, log=log):
            raise NotToBeHad(last_line(log))
    except NotToBeHad as error:
        print(f"SKIPPED, ONNX Runtime's MIGraphX provider: {error}", flush=True)
        return ""
    made.write_text(PROVIDER)
    return "/opt/ort/bin/python"


def make_node(folder: Path, name: str) -> Path:
    """Write the recorded node that the tests see, and return its folder."""
    shutil.rmtree(folder / "node", ignore_errors=True)
    node = unpack(name, folder / "node")
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
    log = folder / "driver.log"
    if enter(folder, "/bin/sh", "-c", script, log=log):
        give_up(folder, "sid's migraphx-driver compiles no net", log)


def give_up(folder: Path, what: str, log: Path) -> NoReturn:
    """Raise NotToBeHad if sid has other versions than those known to work; with these it is a failure: SystemExit."""
    text = f"{what}: {last_line(log)} (all of it is in {log})"
    status = (folder / "tree/var/lib/dpkg/status").read_text()
    found = dict(re.findall(r"(?m)^Package: (.+)$(?:\n.+)*?\nVersion: (?:\d+:)?([0-9.]+)", status))
    if other := [f"{name} {found.get(name)}" for name, version in KNOWN.items() if found.get(name) != version]:
        raise NotToBeHad(f"{text}; sid has {', '.join(other)} now")
    sys.exit(f"FAILED with the versions of sid that it works with: {text}")


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


ISOLATED = ("unshare", "--mount", "--propagation", "private")


def enter(folder: Path, *command: str, log: Path | None = None, seconds: float | None = LONGEST) -> int:
    """Run a command in the tree, with the recorded node's /sys and /dev; return its exit status.

    Raises NotToBeHad if it takes longer.
    """
    script = [str(HERE / "enter.sh"), str(folder / "tree"), str(ROOT), str(folder / "node")]
    clean = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root", "LANG": "C.UTF-8", "FARM_SID": "1"}
    clean |= {name: value for name, value in os.environ.items() if name.lower().endswith("_proxy")}
    return run([*ISOLATED, "sh", *script, *command], log, env=clean, seconds=seconds)


def run(
    command: Sequence[str], log: Path | None, *, env: Mapping[str, str] | None = None, seconds: float | None = LONGEST
) -> int:
    """Run a command, its output in a log if one is named; return its exit status.

    Raises NotToBeHad if it takes longer: then nothing of it runs on, which would write into the tree of the next run.
    """
    with log.open("w") if log else nullcontext() as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=output, env=env, start_new_session=seconds is not None
        )
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            what = " ".join(command).removeprefix(" ".join(ISOLATED))
            raise NotToBeHad(f"it took more than {seconds:.0f} s: {what:.100}") from None
        finally:
            if process.poll() is None and seconds is not None:
                os.killpg(process.pid, signal.SIGKILL)


def last_line(log: Path) -> str:
    """Return what a log ends with."""
    return next((line.strip() for line in reversed(log.read_text(errors="replace").splitlines()) if line.strip()), "")


if __name__ == "__main__":
    sys.exit(main())
