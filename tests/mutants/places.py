"""What is changed, and which tests may notice."""

from tests.support.places import ROOT

ROOMS = ("farm/builds", "farm/results", "farm/artifacts", "farm/matrix", "farm/manifest", "farm/store")

PICTURES = {"farm/results/pictures.py"}
"""What is only looked at."""

_UNIT = "artifacts builds cli client jobs manifest matrix models pages results store targets"
_FILES = "test_cache_key.py test_extension.py test_foreign_text.py test_reference.py"
TESTS = (
    *(f"tests/unit/{name}" for name in f"{_UNIT} {_FILES}".split()),
    "tests/contracts",
    "tests/extras/radar",
    "tests/extras/signing",
    "tests/extras/triggers",
    *(f"tests/integration/{room}" for room in ("api", "artifacts", "builds", "cli", "control", "pages", "store")),
)
"""Those near the rooms. The others run the same lines on their way to something else, and take an hour of their own."""

LIMITS = "tests/unit/test_reference.py::test_a_generated_page_is_what_the_code_says[limits.md]"
"""Reads the constants of every file."""
DOCUMENTS = "tests/contracts/test_contracts.py::test_a_checked_in_document_is_the_codes["
"""How the tests begin that write schemas from the fields of every file: those are read when it is imported."""

KEPT = ROOT / ".farm" / "mutants" / "tests.json"
EQUAL = ROOT / "tests" / "mutants" / "equal.toml"
