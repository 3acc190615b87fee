"""The Celery application of a worker process; `farm/node/celery_process.py` starts it."""

from __future__ import annotations

import gc
import logging
import warnings
from typing import Any

from celery import bootsteps, signals
from celery.exceptions import CPendingDeprecationWarning

from farm.app import Farm
from farm.compiling.slots import from_text
from farm.errors import FarmFault
from farm.logging import configure
from farm.node.attempts import Attempts
from tasks.consumer import Reading

app = Farm.current().celery
app.conf.worker_consumer = "tasks.consumer:Consumer"


class Lifeline(bootsteps.StartStopStep):  # type: ignore[misc]  # Celery has no types
    """Makes the slots that attempts run in, and ties the process to its supervisor.

    Of the options, `lifeline` is the file descriptor on which the supervisor speaks: its end ends the process. `worker`
    is the id under which the supervisor registered it, on `node`; `slots` is as `farm/compiling/slots.py` writes them.
    """

    def __init__(
        self,
        parent: Any,
        lifeline: int | None = None,
        worker: str = "",
        node: str = "",
        slots: str = "[]",
        **options: Any,
    ) -> None:
        farm = Farm.current()
        try:
            opened = Attempts.open(farm.store, farm.executor, farm.settings, from_text(slots), worker=worker, node=node)
        except FarmFault as error:
            raise SystemExit(f"the worker process cannot start: {error.message}; {error.hint}") from None
        if lifeline is not None:
            opened.obey(lifeline)
        super().__init__(parent, **options)


app.steps["worker"].add(Lifeline)
app.steps["consumer"].add(Reading)


@signals.setup_logging.connect  # type: ignore[untyped-decorator]  # Celery has no types
def configure_logging(**_: Any) -> None:
    """Log like the rest of the farm. With a receiver of this signal, Celery does not set up its own logging."""
    configure(Farm.current().settings)
    for name in ("celery.app.trace", "celery.worker.strategy"):  # Attempts log the same with their ids.
        logging.getLogger(name).setLevel(logging.WARNING)
    for name in ("celery.worker.consumer.connection", "celery.worker.consumer.consumer"):  # As our consumer says it.
        logging.getLogger(name).setLevel(logging.ERROR)


@signals.celeryd_after_setup.connect  # type: ignore[untyped-decorator]  # Celery has no types
def ignore_warnings(**_: Any) -> None:
    """Ignore warnings about settings that we have chosen on purpose."""
    warnings.simplefilter("ignore", CPendingDeprecationWarning)


@signals.worker_ready.connect  # type: ignore[untyped-decorator]  # Celery has no types
def tell_supervisor(**_: Any) -> None:
    """Report that this process takes messages."""
    gc.freeze()  # What was imported is not garbage: to look for some in it takes 0.4 s at the end.
    Attempts.current().consuming()
