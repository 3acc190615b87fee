"""The task that messages name."""

from __future__ import annotations

from celery import shared_task
from celery.exceptions import Reject

from farm.node.attempts import Attempts, Draining


@shared_task(name="tasks.compile")  # type: ignore[untyped-decorator]  # Celery has no types
def compile_model(job_id: str, attempt: int, *_: object, **__: object) -> None:
    """Run one attempt of a job. Further arguments are those of a later release, and ignored."""
    try:
        Attempts.current().run(job_id, attempt)
    except Draining:
        raise Reject("the worker is draining", requeue=True) from None
