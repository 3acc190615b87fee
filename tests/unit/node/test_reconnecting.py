"""Workers that have lost their broker together: by simulation, since a thousand are not to be had."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter

from tests.support.places import ROOT

SIMULATION = """
import json
from tasks import celery_app

AWAY = 20.0

class Line:
    alt, default_channel = None, type("Channel", (), {})()

    def ensure_connection(self, error, retries, interval_start=1.0, interval_step=1.0, **_):
        self.at = 0.0
        while self.at < AWAY:  # Each try fails, and the pauses grow as Kombu lets them.
            self.at, interval_start = self.at + interval_start, interval_start + interval_step
        return self

lines = [Line() for _ in range(1000)]
for line in lines:
    consumer = celery_app.Consumer.__new__(celery_app.Consumer)
    consumer.app = celery_app.app
    consumer.first_connection_attempt = False
    consumer.broker_connection_retry_attempt = 0
    consumer.ensure_connected(line)
print(json.dumps([line.at - AWAY for line in lines]))
"""


def test_a_thousand_workers_do_not_return_in_the_same_second() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SIMULATION],
        cwd=ROOT,
        env={**os.environ, "FARM_REDIS_URL": "redis://127.0.0.1:1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    seconds = json.loads(done.stdout)
    fullest = Counter(int(second * 4) for second in seconds).most_common(1)[0][1]
    assert fullest < 250, "in a quarter of a second"
    assert max(seconds) < 4.5, "nobody waits long"
