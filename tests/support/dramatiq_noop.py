"""A message of Dramatiq that does nothing, for benchmarks, on the server that `DRAMATIQ_URL` names."""

import importlib
import os

dramatiq = importlib.import_module("dramatiq")
"""Imported so because it need not be installed."""
redis_broker = importlib.import_module("dramatiq.brokers.redis").RedisBroker(url=os.environ["DRAMATIQ_URL"])
dramatiq.set_broker(redis_broker)


def _nothing(*_: object) -> None:
    pass


noop = dramatiq.actor(_nothing, actor_name="noop")
