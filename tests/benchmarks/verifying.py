"""How long `farm verify` takes for a large program, against hashing the same file, in pairs of the same run.

    python tests/benchmarks/verifying.py [--size 500] [--rounds 9]

Both read the file from the page cache. Verifying also reads policy, keys, sidecar and statements, and
checks signatures. Imports are not counted. The interval is of the median ratio, 95 %, by bootstrap.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from farm.client.fetching import bundle_lines, statements_path
from farm.extras.signing.signing_keys import clock
from farm.extras.signing.trust import load_policy
from farm.extras.signing.verifying import Trust, verify_file
from tests.benchmarks.fetching import interval
from tests.benchmarks.figures import figure
from tests.support.signed import Signed, key_in, sidecar_of

POLICY = """\
[signers.farm]
key = "farm.pub"
[namespaces.main]
signers = ["farm"]
require = ["provenance", "test-results"]
"""


def main() -> None:
    """Measure and print the ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=500, help="MB")
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        program = prepared(Path(name), os.urandom(10**6) * options.size)
        kinds = {"verify": lambda: verify(program), "hash": lambda: digest(program)}
        pairs = []
        for number in range(options.rounds + 1):
            order = ["verify", "hash"] if number % 2 else ["hash", "verify"]
            seconds = {kind: timed(kinds[kind]) for kind in order}
            pairs.append((seconds["verify"], seconds["hash"]))
    low, _, high = interval([verified / hashed for verified, hashed in pairs[1:]])  # The first one imports.
    speed = options.size / statistics.median(hashed for _, hashed in pairs[1:])
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, {options.rounds} pairs of {options.size} MB")
    print(f"  hashing {speed:.0f} MB/s; the median lies between {low:.3f} and {high:.3f} (95 %)")
    figure("verifying a program, against hashing it", [verified / hashed for verified, hashed in pairs[1:]], "x")


def prepared(folder: Path, content: bytes) -> Path:
    """Write a program with its sidecar and statements, and the policy of who trusts them; return the program."""
    signed = Signed(sidecar_of(content), key_in(folder, "farm"))
    program = folder / signed.sidecar["blobs"]["program"]["path"]
    program.write_bytes(content)
    (folder / "artifact.json").write_bytes(signed.text)
    statements = bundle_lines([signed.provenance(clock()), signed.results(clock())])
    statements_path(folder / "artifact.json").write_bytes(statements)
    (folder / "trust.toml").write_text(POLICY)
    return program


def verify(program: Path) -> None:
    """Verify it, from the policy on."""
    found = verify_file(program, Trust(load_policy(program.parent / "trust.toml")))
    assert [check.verdict for check in found] == ["ok"] * 3, found


def digest(program: Path) -> None:
    """Hash it."""
    with program.open("rb") as file:
        hashlib.file_digest(file, "sha256")


def timed(work: object) -> float:
    """Return the seconds of a call."""
    start = time.perf_counter()
    assert callable(work)
    work()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
