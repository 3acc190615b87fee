"""What runs inside a Celery worker process. Started by `farm/worker.py`; `farm/` never imports it."""
