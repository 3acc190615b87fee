"""What is changed, and which tests may notice."""

from tests.support.places import ROOT

ROOMS = ("farm/builds", "farm/results", "farm/artifacts", "farm/matrix", "farm/manifest", "farm/store")

PICTURES = {"farm/results/pictures.py"}
"""What is only looked at."""

TESTS = (
    "tests/unit",
    "tests/contracts",
    "tests/integration",
    "tests/extras",
)

KEPT = ROOT / ".farm" / "mutants" / "tests.json"
EQUAL = ROOT / "tests" / "mutants" / "equal.toml"
