"""The HTTP API: `create_app(farm)` in `application`, one `…_routes` module for each concept."""
