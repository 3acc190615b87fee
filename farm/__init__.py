"""The compile farm: models in, tuned and verified programs for AMD GPUs out.

The upper folders say who runs the code; below them is what is asked and what is kept (`CONTRIBUTING.md` has a picture).
A folder imports only folders below it: `tests/unit/test_imports.py` has the table.
"""

__version__ = "0.3.0.dev0"
