"""Manifest: a user's request. It is read and checked as a whole, and each problem has its place.

The fields are documented in `docs/manifest.md`; `manifest_schema` gives editors the same rules as JSON Schema.
What the entries together mean (the matrix) is in `farm.matrix`.
"""
