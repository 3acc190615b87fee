"""The matrix: a manifest's entries multiplied out to cells, each with its fully resolved spec. Pure.

Which cells there are is in `combinations`, what the layers of settings come to for one is in `layers`, what its inputs
are in `inputs`; `cells` makes of them what a cell is.
"""

from farm.matrix.cells import Cell, check, data_key, expand, overridden_calibration

__all__ = ["Cell", "check", "data_key", "expand", "overridden_calibration"]
