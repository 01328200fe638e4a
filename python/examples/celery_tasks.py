"""Celery tasks that run unreliable code in a bulkhead, so that a crash does not kill the Celery worker's processes.

celery -A celery_tasks worker
"""

import os

from celery import Celery

import bulkhead

app = Celery("pictures", broker=os.environ["CELERY_BROKER"], backend=os.environ["CELERY_BACKEND"])
app.conf.broker_transport_options = {
    "data_folder_in": os.environ.get("CELERY_FOLDER", ""),
    "data_folder_out": os.environ.get("CELERY_FOLDER", ""),
}

# A single client for the module. Each process that Celery forks connects again.
client = bulkhead.Client()


@app.task(bind=True, max_retries=5)
def thumbnail(self, picture: str) -> int:
    """Returns the thumbnail. Rejected jobs are retried after the delay that the supervisor requests."""
    with open(picture, "rb") as file:
        content = file.read()
    try:
        return len(client.call("thumbnail", content, deadline=5, priority="best-effort").payload)
    except bulkhead.Rejected as error:
        if error.retryable:
            raise self.retry(exc=error, countdown=error.retry_after or 1) from error
        raise
