"""The matrix: a manifest's entries multiplied out to cells, each with its fully resolved spec. Pure.

`combinations` lists the cells, `layers` merges the settings of each cell, `inputs` resolves its inputs, and `cells`
makes the finished cells of them.
"""

from farm.matrix.cells import Cell, check, data_key, expand, overridden_calibration

__all__ = ["Cell", "check", "data_key", "expand", "overridden_calibration"]
