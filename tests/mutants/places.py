"""What is changed, and which tests may notice."""

from tests.support.places import ROOT

ROOMS = ("farm/builds", "farm/results", "farm/artifacts", "farm/matrix", "farm/manifest", "farm/store")

PICTURES = {"farm/results/pictures.py"}
"""What is only looked at."""

TESTS = (
    "tests/unit",
    "tests/contracts",
    "tests/extras/radar",
    *(f"tests/integration/{room}" for room in ("api", "artifacts", "builds", "cli", "control", "pages", "store")),
)
"""Those near the rooms. The others run the same lines on their way to something else, and take an hour of their own."""

KEPT = ROOT / ".farm" / "mutants" / "tests.json"
EQUAL = ROOT / "tests" / "mutants" / "equal.toml"
