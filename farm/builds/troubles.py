"""What is apart from what, and what else operators have to see to: one list for pages, `farm doctor` and `farm ls`."""

from __future__ import annotations

from farm import __version__
from farm.settings import Settings
from farm.store import Store
from farm.units import duration


def troubles(store: Store, settings: Settings) -> list[str]:
    """Return what needs somebody, as sentences that say what to do. Raises StoreUnavailable."""
    now, said = store.now(), []
    for name, (at, away) in store.planes.list().items():
        if now - at > settings.lease_seconds:
            how = "it ended without a word, or does not reach Redis: see its log and /v1/health"
            said.append(f"control plane {name} has been silent for {duration(now - at)}: {how}")
        elif away:
            said.append(f"control plane {name} cannot reach object storage: {away}: see the network between them")
    for node, at in store.workers.silent().items():
        how = "it is off, has another name now, or does not reach Redis: see its worker's log"
        said.append(f"node {node} has been silent for {duration(now - at)}: {how}")
    for worker in store.workers.list():
        node, release = worker["node"], worker.get("versions", {}).get("farm", __version__)
        if worker["resting"].startswith("object storage"):
            said.append(f"node {node} cannot reach object storage: {worker['resting']}: see the network between them")
        if worker["warning"]:
            said.append(f"node {node}: {worker['warning']}")
        if release != __version__:
            how = f"this control plane {__version__}: upgrade control planes first, then workers"
            said.append(f"node {node} runs release {release} of the farm, {how}")
    return list(dict.fromkeys(said))
