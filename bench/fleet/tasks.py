"""Contains the work of the comparison, as a Bulkhead handler, a JetStream consumer and Celery tasks.

``compare.py`` starts these processes, submits the jobs and measures.

python tasks.py consume SERVERS PROCESSES    consumes JetStream jobs in PROCESSES processes
"""

from __future__ import annotations

import asyncio
import os
import sys
import time


def work(payload: str) -> str:
    """Runs a job: ``NUMBER SECONDS FOLDER``. Appends the number to one file at the start and another at the end."""
    number, seconds, folder = payload.split(" ", 2)
    _append(f"{folder}/begun", number)
    if float(seconds):
        time.sleep(float(seconds))
    _append(f"{folder}/ended", number)
    return number


def _append(path: str, number: str) -> None:
    # A single write in append mode prevents lines from mixing.
    file = os.open(path, os.O_WRONLY | os.O_APPEND)
    os.write(file, f"{number}\n".encode())
    os.close(file)


def bulkhead_handler(payload, context) -> bytes:
    """Handles a job in the Bulkhead worker."""
    return work(bytes(payload).decode()).encode()


async def consume(servers: list[str]) -> None:
    """Pulls one job at a time. The job is acknowledged after its result is stored."""
    import nats
    import nats.errors

    connection = await nats.connect(servers=servers, max_reconnect_attempts=-1, reconnect_time_wait=0.2)
    stream = connection.jetstream(timeout=5)
    subscription = await stream.pull_subscribe_bind(consumer="work", stream="PLAIN_JOBS")
    while True:
        try:
            (message,) = await subscription.fetch(1, timeout=5)
        except (nats.errors.Error, asyncio.TimeoutError):
            continue
        result = await asyncio.to_thread(work, message.data.decode())
        while True:
            try:
                await stream.publish(f"plain.results.{result}", result.encode())
                await message.ack_sync(timeout=5)
                break
            except (nats.errors.Error, asyncio.TimeoutError):
                await asyncio.sleep(0.2)


def keep_consumers(servers: str, processes: int) -> None:
    """Runs consumers, and replaces each consumer that exits."""
    while True:
        while processes:
            processes -= 1
            if os.fork() == 0:
                asyncio.run(consume(servers.split(",")))
                os._exit(0)
        os.wait()
        processes += 1


if os.environ.get("CELERY_BROKER"):
    from celery import Celery

    app = Celery("tasks", broker=os.environ["CELERY_BROKER"], backend=os.environ["CELERY_BROKER"])
    app.conf.worker_prefetch_multiplier = 1
    app.conf.broker_connection_retry_on_startup = True
    if os.environ.get("CELERY_LATE"):
        app.conf.task_acks_late = True
        app.conf.task_reject_on_worker_lost = True
        app.conf.broker_transport_options = {"visibility_timeout": float(os.environ["CELERY_LATE"])}
    celery_work = app.task(name="work")(work)

if __name__ == "__main__":
    keep_consumers(sys.argv[2], int(sys.argv[3]))
