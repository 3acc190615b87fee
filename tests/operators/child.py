"""Runs many operator cases in one child: compile, store, load from the file, run, compare."""

from __future__ import annotations

import importlib
import json
import sys
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "farm" / "runner"))

import child


class Quiet:
    """Stands in for the messages of one case; only this script's own go to the parent."""

    def phase(self, *args, **kwargs) -> None:
        """Say nothing."""


def work(request: dict, messages) -> dict:
    """Take each case through compile and evaluate; tell the parent before and after each."""
    actions = importlib.import_module(f"{child.PACKAGE}.actions")
    failure = importlib.import_module(f"{child.PACKAGE}.protocol").RequestFailed
    for case in request["cases"]:
        messages.phase("verifying", None, json.dumps({"case": case["name"]}))
        shared = {name: request[name] for name in ("compiler", "device", "threads", "search", "options")}
        answer = {"case": case["name"]}
        try:
            actions.run_action({**shared, **case["compile"], "action": "compile"}, Quiet())
            answer["found"] = actions.run_action({**shared, **case["evaluate"], "action": "evaluate"}, Quiet())[
                "verification"
            ]
        except failure as error:
            answer["error"] = {"kind": error.kind, "message": error.message, "detail": error.detail[:2000]}
        except Exception as error:
            traceback.print_exc()
            answer["error"] = {"kind": "internal", "message": f"{type(error).__name__}: {error}", "detail": ""}
        messages.phase("verifying", None, json.dumps(answer))
    return {}


if __name__ == "__main__":
    sys.exit(child.start(work))
