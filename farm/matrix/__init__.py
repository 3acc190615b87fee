"""The matrix: a manifest's entries multiplied out to cells, each with its fully resolved spec. Pure.

`combinations` lists the cells, `layers` merges the settings of each cell, `inputs` resolves its inputs, and `cells`
makes the finished cells of them.
"""
