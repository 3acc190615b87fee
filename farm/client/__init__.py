"""Client: what a submitter runs: read and freeze a manifest, ask a farm over HTTP, fetch and check what it made.

These names are documented; they are imported when first used, so that a command pays only for what it needs.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from farm.client.client import FarmClient, SubmittedBuild, running_farm
    from farm.client.freezing import Frozen, freeze
    from farm.client.loading import Loaded, load
    from farm.client.storage_client import StorageClient

__all__ = ["FarmClient", "Frozen", "Loaded", "StorageClient", "SubmittedBuild", "freeze", "load", "running_farm"]

_MODULES = {"Loaded": "loading", "load": "loading", "StorageClient": "storage_client"}
_MODULES |= {"Frozen": "freezing", "freeze": "freezing"}


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES.get(name, 'client')}"), name)
