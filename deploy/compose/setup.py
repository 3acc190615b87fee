"""Make what the services of compose.yaml need before they start: passwords, users, a certificate, settings.

    docker compose --profile core run --rm -T setup token         # prints the administrator's token of the API
    docker compose --profile core run --rm -T setup certificate   # prints the certificate that clients trust
    docker compose --profile core run --rm -T setup node          # prints the settings of a worker on another machine

It runs at each `docker compose up`, and makes each secret once: passwords lie in the volume `admin`, and all other
files are written from them again. A role's volume holds what this role alone may know.
"""

import json
import os
import secrets
import sys
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

VOLUMES = Path("/volumes")
ROLES = ("serve", "worker", "reader")
USER = 10001
"""Owns all files, and all services run as this user: each sees its own volumes alone."""

HOST = os.environ["FARM_HOST"]
BUCKET = "farm"
NAMES = (
    "api_token",
    *(f"redis_{role}" for role in (*ROLES, "admin")),
    *(f"s3_{role}" for role in (*ROLES, "admin")),
    *(f"weed_{number}" for number in range(4)),
    "grafana",
)


def main() -> None:
    """Write all files."""
    known = VOLUMES / "admin" / "passwords.json"
    passwords = json.loads(known.read_text()) if known.is_file() else {}
    passwords |= {name: secrets.token_hex(24) for name in NAMES if name not in passwords}
    write(known, json.dumps(passwords, indent=1))
    write(VOLUMES / "valkey" / "users.acl", users(passwords))
    write(VOLUMES / "s3" / "identities.json", identities(passwords))
    certificates(VOLUMES / "s3", "SeaweedFS", "parts")
    write(VOLUMES / "s3" / "security.toml", security(passwords))
    # An operator's own certificate, put there under these names, stays.
    certificates(VOLUMES / "proxy", HOST, "farm")
    write(VOLUMES / "admin" / "farm.pem", (VOLUMES / "proxy" / "farm.pem").read_text())
    for role in ("serve", "worker", "admin"):
        write(VOLUMES / role / "farm.toml", settings(role, passwords))
    write(VOLUMES / "grafana" / "password", passwords["grafana"])
    for folder in VOLUMES.iterdir():
        os.chown(folder, USER, USER)
        folder.chmod(0o700)
    # Workers of one host agree here who measures; each may make files.
    (VOLUMES / "locks").chmod(0o1777)


def write(path: Path, text: str) -> None:
    """Write a file that its owner alone reads, whole or not at all."""
    part = path.with_name(f".{path.name}.part")
    part.touch(mode=0o600)
    part.write_text(text)
    os.chown(part, USER, USER)
    part.replace(path)


def users(passwords: dict[str, str]) -> str:
    """Return Valkey's users: those of deploy/redis/users.acl with their passwords, and one that administers it."""
    lines = []
    for line in Path("/deploy/redis/users.acl").read_text().splitlines():
        words = line.split()
        role = words[1].removeprefix("farm-")
        lines.append(" ".join([*words[:3], f">{passwords[f'redis_{role}']}", *words[3:]]) if role in ROLES else line)
    return "\n".join([*lines, f"user admin on >{passwords['redis_admin']} ~* &* +@all", ""])


def identities(passwords: dict[str, str]) -> str:
    """Return SeaweedFS' users with the rights of deploy/s3."""
    policies = [
        {"name": role, "content": Path(f"/deploy/s3/{role}.json").read_text().replace("BUCKET", BUCKET)}
        for role in ROLES
    ]
    named = [{"name": f"farm-{role}", "credentials": [key(role, passwords)], "policyNames": [role]} for role in ROLES]
    admin = {"name": "admin", "credentials": [key("admin", passwords)], "actions": ["Admin"]}
    return json.dumps({"identities": [admin, *named], "policies": policies}, indent=1)


def key(role: str, passwords: dict[str, str]) -> dict[str, str]:
    """Return a role's keys of object storage."""
    return {"accessKey": f"farm-{role}", "secretKey": passwords[f"s3_{role}"]}


def security(passwords: dict[str, str]) -> str:
    """Return what SeaweedFS' parts show each other: other containers reach their ports, and must not get past S3."""
    parts = ("master", "volume", "filer", "s3", "admin", "worker", "client")
    pair = 'cert = "/etc/seaweedfs/parts.pem"\nkey = "/etc/seaweedfs/parts.key"\n'
    sections = ("jwt.signing", "jwt.signing.read", "jwt.filer_signing", "jwt.filer_signing.read")
    tokens = [f'[{name}]\nkey = "{passwords[f"weed_{number}"]}"\n' for number, name in enumerate(sections)]
    grpc = ['[grpc]\nca = "/etc/seaweedfs/parts.pem"\n', *(f"[grpc.{part}]\n{pair}" for part in parts)]
    return "\n".join([*tokens, *grpc])


def settings(role: str, passwords: dict[str, str]) -> str:
    """Return the settings file of a role; the administrator's one is for `farm doctor --fix` and `farm token`."""
    user = "admin" if role == "admin" else f"farm-{role}"
    found = {
        "redis_url": f"redis://{user}:{passwords[f'redis_{role}']}@valkey:6379/0",
        "s3_endpoint": "http://s3:8333",
        "s3_bucket": BUCKET,
        "s3_access_key": f"farm-{role}",
        "s3_secret_key": passwords[f"s3_{role}"],
    }
    if role == "serve":
        found |= {"s3_public_endpoint": f"https://{HOST}:{os.environ['FARM_S3_PORT']}"}
    if role == "admin":
        found |= {"api_url": "http://serve:8080"}
    if role != "worker":
        found |= {"api_token": passwords["api_token"]}
    return "".join(f"{name} = {json.dumps(value)}\n" for name, value in found.items())


def node(passwords: dict[str, str]) -> str:
    """Return the variables of a worker on another machine, which has the certificate as /etc/farm/farm.pem."""
    redis = f"{HOST}:{os.environ['FARM_REDIS_PORT']}"
    found = {
        "FARM_REDIS_URL": f"rediss://farm-worker:{passwords['redis_worker']}@{redis}/0?ssl_ca_certs=/etc/farm/farm.pem",
        "FARM_S3_ENDPOINT": f"https://{HOST}:{os.environ['FARM_S3_PORT']}",
        "FARM_S3_BUCKET": BUCKET,
        "FARM_S3_ACCESS_KEY": "farm-worker",
        "FARM_S3_SECRET_KEY": passwords["s3_worker"],
        "AWS_CA_BUNDLE": "/etc/farm/farm.pem",
    }
    return "\n".join(f"{name}={value}" for name, value in found.items())


def certificates(folder: Path, name: str, stem: str) -> None:
    """Make a certificate that signs itself, with its key, where there is none."""
    if (folder / f"{stem}.pem").is_file():
        return
    made = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name[:64])])
    try:
        alternative: x509.GeneralName = x509.IPAddress(ip_address(name))
    except ValueError:
        alternative = x509.DNSName(name)
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(made.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=3650))
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName([alternative, x509.DNSName("localhost")]), critical=False)
        .sign(made, hashes.SHA256())
    )
    pem, plain = serialization.Encoding.PEM, serialization.NoEncryption()
    write(folder / f"{stem}.key", made.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain).decode())
    write(folder / f"{stem}.pem", certificate.public_bytes(pem).decode())


if __name__ == "__main__":
    main()
    known = json.loads((VOLUMES / "admin" / "passwords.json").read_text())
    if sys.argv[1:] == ["token"]:
        print(known["api_token"])  # noqa: T201
    if sys.argv[1:] == ["node"]:
        print(node(known))  # noqa: T201
    if sys.argv[1:] == ["certificate"]:
        print((VOLUMES / "proxy" / "farm.pem").read_text(), end="")  # noqa: T201
