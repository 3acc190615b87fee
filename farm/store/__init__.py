"""The job store: builds, cells, jobs and workers as they are now. The only package that knows Redis.

Every change of state is one Lua script that names the state it expects and writes one event. Every script may be
repeated and gives the same answer. `docs/job-store.md` lists the keys.
"""

from farm.store.job_records import Claim, Renewal, Renewed
from farm.store.store import Beat, Store

__all__ = ["Beat", "Claim", "Renewal", "Renewed", "Store"]
