"""Write what an image has as a CycloneDX document: Python's packages of this interpreter, and Debian's packages."""

import json
import re
import sys
from importlib.metadata import distributions
from pathlib import Path

STATUS = Path("/var/lib/dpkg/status")


def component(kind: str, name: str, version: str) -> dict[str, str]:
    """Return one package, named as package URLs name it."""
    place = re.sub(r"[-_.]+", "-", name).lower() if kind == "pypi" else f"debian/{name}"
    purl = f"pkg:{kind}/{place}@{version}"
    return {"type": "library", "name": name, "version": version, "purl": purl, "bom-ref": purl}


def debian(status: str) -> list[dict[str, str]]:
    """Return the installed packages that dpkg's status file names."""
    found = []
    for paragraph in status.split("\n\n"):
        fields = dict(line.split(": ", 1) for line in paragraph.splitlines() if ": " in line and line[0] != " ")
        if fields.get("Status", "").endswith(" installed"):
            found.append(component("deb", fields["Package"], fields["Version"]))
    return found


packages = [component("pypi", each.metadata["Name"], each.version) for each in distributions()]
packages += debian(STATUS.read_text(encoding="utf-8")) if STATUS.is_file() else []
document = {"bomFormat": "CycloneDX", "specVersion": "1.6", "version": 1}
json.dump({**document, "components": sorted(packages, key=lambda each: each["purl"])}, sys.stdout, indent=1)
