"""What runs inside a Celery worker process. Started by `farm/node/supervisor.py`; `farm/` never imports it."""
