"""Audit: contradictions within the store. Reads only; each record is read in one step."""

from __future__ import annotations

from collections.abc import Iterator

from farm.store.link import Link, key, lots

LOT = 100
"""Records that are asked about at once."""


class AuditRecords:
    """Finds records that contradict each other; that happens only if a script has a bug."""

    def __init__(self, link: Link) -> None:
        self._link = link

    def builds(self) -> Iterator[tuple[str, str, str]]:
        """Yield namespace, build and one sentence for each contradiction about a build."""
        for namespace in self._link.ask("SMEMBERS", ("namespaces",)):
            ids = self._link.ask("ZRANGE", ("builds", namespace), 0, -1)
            for build_id, problem in self._asked("build", ids):
                yield namespace, build_id, problem

    def jobs(self) -> Iterator[tuple[str, str, str]]:
        """Yield namespace, job and one sentence for each contradiction about a job."""
        for job_id, problem in self._asked("job", self._job_ids()):
            yield self._link.ask("HGET", ("job", job_id), "namespace") or "", job_id, problem

    def count(self) -> dict[str, int]:
        """Return the numbers of builds and jobs in the store."""
        namespaces = self._link.ask("SMEMBERS", ("namespaces",))
        builds = self._link.ask_many(["ZCARD", ("builds", namespace)] for namespace in namespaces)
        return {"builds": sum(builds), "jobs": sum(1 for _ in self._job_ids())}

    def _asked(self, record: str, ids: Iterator[str] | list[str]) -> Iterator[tuple[str, str]]:
        for lot in lots(ids, LOT):
            answers = self._link.run_many(f"audit_{record}", [{record: one} for one in lot])
            for one, problems in zip(lot, answers, strict=True):
                for problem in problems:
                    yield one, problem

    def _job_ids(self) -> Iterator[str]:
        cursor, prefix, seen = "0", key("job", ""), set[str]()
        while True:
            cursor, names = self._link.ask("SCAN", cursor, "MATCH", f"{prefix}*", "COUNT", 1000)
            for name in names:
                job_id = name.removeprefix(prefix)
                # A scan may return a key twice.
                if ":" not in job_id and job_id not in seen:
                    seen.add(job_id)
                    yield job_id
            if str(cursor) == "0":
                return
