"""Artifacts: what the farm keeps in object storage, and the operations for it.

Two kinds of things: *blobs*, bytes named by their SHA-256 that anyone may write again, and *documents*, small
JSON under readable names that are created or replaced under conditions. An artifact is a document (the
sidecar) that leads to its blobs; `docs/object-storage.md` describes the layout.
"""
