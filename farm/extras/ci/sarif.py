"""Problems of manifests as SARIF 2.1.0, which code scanning shows at their lines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import PurePath
from urllib.parse import quote

from farm import __version__
from farm.errors import Problem

RULE = "manifest"
MOST = 5000
"""Results of one run that GitHub shows."""


def render(problems: Sequence[Problem], version: str = __version__) -> Mapping[str, object]:
    """Return the log of one run of `farm lint`; `version` is the farm's."""
    return {
        "$schema": "https://json.schemastore.org/sarif-2.1.0.json",
        "version": "2.1.0",
        "runs": [
            {
                "tool": {
                    "driver": {
                        "name": "farm lint",
                        "version": version,
                        "informationUri": "https://migraphx-farm.dev",
                        "rules": [{"id": RULE, "shortDescription": {"text": "The manifest cannot be built."}}],
                    }
                },
                "columnKind": "unicodeCodePoints",
                "results": [_result(problem) for problem in problems[:MOST]],
            }
        ],
    }


def _result(problem: Problem) -> Mapping[str, object]:
    text = problem.message + (f"\n{problem.hint}" if problem.hint else "")
    text = text.replace("](", "] (")  # Else it would be a link.
    region = {"region": {"startLine": problem.line, "startColumn": max(1, problem.column)}} if problem.line else {}
    place = {"artifactLocation": {"uri": quote(PurePath(problem.file or "manifest").as_posix())}, **region}
    return {
        "ruleId": RULE,
        "level": "error",
        "message": {"text": text},
        "locations": [{"physicalLocation": place}],
    }
