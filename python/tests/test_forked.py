"""Tests of workers that are forked from a template (``start.mode = "fork"``), with and without a sandbox."""

from __future__ import annotations

import json
import os
import signal

import pytest
from pools import LONG, is_running, wait_for
from running import SOURCE, Supervisor, running, sandboxed

from bulkhead import Client, JobError

PROFILES = ["none", "default", "strict"]
CONFINED = PROFILES[1:]


def forked(profile: str, **keys: object) -> dict[str, object]:
    return {**sandboxed(profile), "start": {"mode": "fork"}, **keys}


def status(pid: int, field: str) -> list[str]:
    with open(f"/proc/{pid}/status") as file:
        return next(line.split()[1:] for line in file if line.startswith(f"{field}:"))


def children(parent: int) -> set[int]:
    found = set()
    for name in os.listdir("/proc"):
        try:
            if name.isdigit() and status(int(name), "PPid") == [str(parent)] and is_running(int(name)):
                found.add(int(name))
        except (OSError, StopIteration):
            continue
    return found


def ready(own: Supervisor, count: int) -> list[int]:
    """Waits for ``count`` ready workers. Returns their PIDs."""

    def found() -> list[int]:
        workers = own.snapshot("one")["workers"]
        return [worker["pid"] for worker in workers if worker["state"] == "ready" and worker.get("pid")]

    return wait_for("workers are ready", lambda: ((pids := found()) and len(pids) == count and pids) or None)


@pytest.mark.parametrize("profile", PROFILES)
def test_forked_workers_behave_like_spawned_workers(profile: str) -> None:
    keys = forked(profile, max_in_flight=4, processes=2, grace="60s", start={"mode": "fork", "ready": "5s"})
    keys["env"] = {"PYTHONPATH": SOURCE, "INIT": "slow"}
    with running(one=keys) as own, Client(own.socket) as client:
        assert client.call("one", b"x").payload == b"x"
        assert b"by init" in client.call("one", operation="about").payload
        jobs = [client.submit("one", b"600", operation=how) for how in ("until-cancelled", "asleep") * 4]
        wait_for("all jobs are running", lambda: own.snapshot("one")["in_flight"] == 8)
        assert all(job.cancel() for job in jobs)
        wait_for("all jobs have ended", lambda: own.snapshot("one")["in_flight"] == 0)
        jobs = [client.submit("one", b"0.01", operation=how) for how in ("sleep", "asleep") * 4]
        assert {bytes(job.result(LONG).payload) for job in jobs} == {b"slept"}
        assert client.call("one", operation="libraries").payload == b'"e3b0"'
        for _ in range(3):
            with pytest.raises(JobError) as died:
                client.call("one", operation="segv")
            assert died.value.outcome.reason == "signal"
        before = ready(own, 2)
        os.kill(before[0], signal.SIGTERM)
        wait_for("the worker is gone", lambda: not is_running(before[0]))
        assert client.call("one", b"goes on").payload == b"goes on"


@pytest.mark.parametrize("profile", PROFILES)
def test_sandbox_separates_forked_workers(profile: str) -> None:
    with running(one=forked(profile, processes=2)) as own, Client(own.socket) as client:
        one, other = ready(own, 2)
        assert status(one, "PPid") == status(other, "PPid")
        parent = int(status(one, "PPid")[0])
        # Helper processes of the start can still be exiting.
        (template,) = wait_for(
            "the template is the only other child",
            lambda: len(found := children(parent) - {one, other}) == 1 and found,
        )
        numbers = [int(status(pid, "NSpid")[-1]) for pid in (one, other, template)]
        jobs = [client.submit("one", json.dumps(numbers).encode(), operation="reach") for _ in range(8)]
        for done in [json.loads(bytes(job.result(LONG).payload)) for job in jobs]:
            if profile == "none":
                assert {"signal", "environment", "descriptors", "memory", "fork"} <= set(done)
            else:
                assert done == []
        if profile != "none":
            filters = [int(status(pid, "Seccomp_filters")[0]) for pid in (one, other, template)]
            assert filters[0] == filters[1] == filters[2] + 1
            assert all(worker["confinement"]["inherited"] for worker in own.snapshot("one")["workers"])


@pytest.mark.parametrize("profile", CONFINED)
def test_temporary_folder_of_a_forked_worker_is_removed(profile: str) -> None:
    keys = forked(profile, recycle={"jobs": 1})
    with running(one=keys) as own, Client(own.socket) as client:
        # A folder deeper than 128 levels on disk is a violation if a check finds it before it is removed.
        depths = [0, 3, 40, 300 if profile == "strict" else 100]
        folders = [client.call("one", str(depth).encode(), operation="litter").payload.decode() for depth in depths]
        assert len(set(folders)) == len(folders)
        (worker,) = ready(own, 1)
        # The paths as seen by the template.
        paths = [f"/proc/{worker}/root{folder}" for folder in folders]
        wait_for("the temporary folders are gone", lambda: not any(map(os.path.exists, paths)))


def test_template_reports_a_missing_temporary_folder() -> None:
    """If `read` grants a parent of the temporary folders, these folders are read-only under ``strict``."""
    keys = sandboxed("strict")
    keys["sandbox"]["read"].append("/tmp")
    with running(one={**keys, "start": {"mode": "fork"}}) as own:
        wait_for("the error is logged", lambda: "fork: temporary directory: Read-only file system" in own.log())
