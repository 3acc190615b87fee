"""The matrix: a manifest's entries multiplied out to cells, each with its fully resolved spec. Pure.

`combinations` lists the cells and finds what they name, `cells` merges their settings, says what is not possible, and
makes the finished cells; `planned` has the documents.
"""
