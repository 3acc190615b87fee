"""The HTTP API: `create_app(farm)` in `app`, one module per concept beside it."""
