"""Images built from this checkout, and a farm of them in docker compose."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from farm.local.servers import free_ports
from tests.deploy.docker_machine import BASE, Docker, docker_machine, missing
from tests.support.farm_command import Command
from tests.support.places import ROOT

FILES = (ROOT / "deploy" / "compose" / "compose.yaml", ROOT / "tests" / "deploy" / "standins" / "compose.yaml")
PROFILES = ("core", "cpu", "nodes", "observability")
SERVICES = ("proxy", "proxy-nodes", "worker", "prometheus")
"""What is started, with all that these need. Grafana is in no package."""

IMAGES = {"serve": "farm-test/serve", "worker": "farm-test/worker"}


@pytest.fixture(scope="session")
def docker() -> Iterator[Docker]:
    """A Docker; skips with the reason where there is none."""
    if why := missing():
        pytest.skip(why)
    with docker_machine() as machine:
        yield machine


@pytest.fixture(scope="session")
def images(docker: Docker) -> dict[str, str]:
    """The images of the control plane and the CPU worker, and the servers' stand-ins.

    FARM_DEPLOY_KEEP takes those of the run before, for who changes compose.yaml or a test.
    """
    if "FARM_DEPLOY_KEEP" in os.environ:
        return IMAGES
    words = ["make", "-o", f"{sys.prefix}/.dev", "dist", f"VENV={sys.prefix}"]
    subprocess.run(words, cwd=ROOT, check=True, capture_output=True)
    base = ("--build-arg", f"BASE={BASE}", "--network", "host", "--quiet")
    dockerfile = ROOT / "deploy" / "images" / "Dockerfile"
    for target, name in IMAGES.items():
        docker("build", *base, "--file", dockerfile, "--target", target, "--tag", name, ROOT)
    docker("build", *base, "--tag", "farm-test/standins", ROOT / "tests" / "deploy" / "standins")
    return IMAGES


@dataclass(frozen=True)
class Composed:
    """A farm in compose, and `farm` as somebody on another machine has it."""

    docker: Docker
    environ: dict[str, str]
    folder: Path

    def __call__(self, *words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run `docker compose …`."""
        files = [word for path in FILES for word in ("--file", str(path))]
        profiles = [word for name in PROFILES for word in ("--profile", name)]
        return self.docker(
            "compose", "--project-name", "farm-test", *files, *profiles, *words, check=check, **self.environ
        )

    def up(self, *services: str) -> None:
        """Start services, by default all, and wait until they are healthy."""
        self("up", "--detach", "--wait", "--no-build", *(services or SERVICES))

    def client(self) -> Command:
        """Return `farm` with the token and the certificate that `setup` prints."""
        certificate = self.folder / "farm.pem"
        certificate.write_text(self("run", "--rm", "-T", "setup", "certificate").stdout)
        token = self("run", "--rm", "-T", "setup", "token").stdout.strip()
        named = {
            "FARM_API_URL": f"https://localhost:{self.environ['FARM_PORT']}",
            "FARM_API_TOKEN": token,
            "FARM_DATA_DIR": str(self.folder / "data"),
            "SSL_CERT_FILE": str(certificate),
            "PYTHONPATH": str(ROOT),
        }
        return Command(self.folder, {**os.environ, **named})

    def container(self, service: str) -> str:
        """Return the id of a service's container, also of one that has stopped."""
        return self("ps", "--all", "--quiet", service).stdout.split()[0]

    def state(self, service: str, field: str) -> str:
        """Return one field of the state of a service's container."""
        return self.docker("inspect", "--format", f"{{{{.State.{field}}}}}", self.container(service)).stdout.strip()

    def logs(self, service: str) -> str:
        """Return what a service has logged."""
        done = self.docker("logs", self.container(service))
        return done.stdout + done.stderr


@pytest.fixture(scope="session")
def composed(docker: Docker, images: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Composed]:
    """A farm that is up, made on a machine that had none."""
    port, s3_port, redis_port = free_ports(3)
    folder = tmp_path_factory.mktemp("composed")
    # Docker's daemon may have a root of its own: it sees the checkout, but not that folder.
    backup = ROOT / ".farm" / "deploy-backup"
    environ = {
        "FARM_PORT": str(port),
        "FARM_S3_PORT": str(s3_port),
        "FARM_REDIS_PORT": str(redis_port),
        "FARM_GRACE_SECONDS": "2",
        "FARM_BACKUP": str(backup),
    }
    farm = Composed(docker, environ, folder)
    farm("down", "--volumes", "--timeout", "1")
    try:
        farm.up()
        yield farm
    finally:
        farm("down", "--volumes", "--timeout", "1", check=False)
