"""Which farm a command talks to."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from farm.client.client import FarmClient
    from farm.settings import Settings


def connect(settings: Settings | None = None) -> FarmClient:
    """Return a client of the farm that the settings name (default: this process's settings)."""
    from farm.client.client import FarmClient
    from farm.settings import load_settings

    return FarmClient.from_settings(settings or load_settings())
