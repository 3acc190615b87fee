"""Cells as rows, for notebooks, pandas, CSV and Parquet."""

from __future__ import annotations

import csv
import importlib.util
from pathlib import Path
from typing import Any

import pytest

from farm.client import tables
from farm.errors import UsageError
from farm.results.verdict import judge_cell
from tests.unit.results.test_gates import facts, planned
from tests.unit.results.test_verdict import row


@pytest.fixture
def cells() -> list[Any]:
    """A cell that passed and one that failed, with a message that is anybody's."""
    passed = judge_cell(planned(), row(state="succeeded", facts=facts(), elapsed=2.0))
    failed = judge_cell(planned(), row(state="failed", kind="bad_model", message='=1+1 <b>, "x"'))
    return [passed, failed]


def test_cells_become_rows_of_the_same_columns(cells: list[Any]) -> None:
    passed, failed = tables.rows(cells)
    assert list(passed) == list(failed)
    assert (passed["state"], passed["latency"], passed["size"]) == (
        "succeeded", cells[0]["facts"]["latency"], cells[0]["facts"]["program"]["size"],
    )  # fmt: skip
    assert (failed["kind"], failed["latency"], failed["size"], failed["key"]) == ("bad_model", None, None, None)
    rough = {**cells[0], "facts": {**cells[0]["facts"], "shared": True, "weak": True}}
    assert [row["marks"] for row in tables.rows([*cells, rough])] == ["", None, "shared weak"]
    assert "<td>shared weak</td>" in tables.html("b-1", "", [rough])


def test_a_csv_file_has_all_rows_and_nothing_that_a_spreadsheet_runs(cells: list[Any], tmp_path: Path) -> None:
    tables.write(cells, tmp_path / "cells.csv")
    with (tmp_path / "cells.csv").open(newline="") as file:
        _, failed = csv.DictReader(file)
    assert (failed["message"], failed["latency"]) == ('\'=1+1 <b>, "x"', "")
    tables.write([{**cells[1], "message": "half of a \ud83d character"}], tmp_path / "half.csv")
    assert "half of a \\ud83d character" in (tmp_path / "half.csv").read_text()
    with pytest.raises(UsageError, match=r"not .csv or .parquet"):
        tables.write(cells, tmp_path / "cells.xlsx")


def test_a_notebook_gets_a_table_in_which_no_text_is_markup(cells: list[Any]) -> None:
    shown = tables.html("<i>b-1", 'https://farm.example/"x', cells * 101)
    assert "<i>" not in shown and '/"x' not in shown
    assert shown.count("<tr>") == 1 + tables.SHOWN and "and 2 more cells" in shown
    assert "<td>failed bad_model</td>" in shown


@pytest.mark.parametrize("library", ["pandas", "pyarrow"])
def test_what_is_not_installed_is_named(library: str, cells: list[Any], tmp_path: Path) -> None:
    def use() -> Any:
        return tables.frame(cells) if library == "pandas" else tables.write(cells, tmp_path / "cells.parquet")

    if importlib.util.find_spec(library) is None:
        with pytest.raises(UsageError, match=f"this needs {library}, which is not installed"):
            use()
    elif library == "pandas":
        assert list(use()["state"]) == ["succeeded", "failed"]
    else:
        use()
        read = importlib.import_module("pyarrow.parquet").read_table(tmp_path / "cells.parquet")
        assert read.to_pylist() == tables.rows(cells)
