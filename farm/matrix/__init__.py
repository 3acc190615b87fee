"""The matrix: a manifest's entries multiplied out to cells, each with its fully resolved spec. Pure.

`combinations` lists the cells and merges the settings of each, `lookup` finds what they name, `checks` says what is not
possible, and `cells` makes the finished cells of them.
"""
