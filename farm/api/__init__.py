"""The HTTP API: one `…_routes` module for each concept, and the gate before them (`farm.serving` makes the app)."""
