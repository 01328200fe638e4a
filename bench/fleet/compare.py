"""Compares durable jobs on two hosts: Bulkhead's fleet, plain JetStream consumers, and Celery on Redis.

    python bench/fleet/compare.py [--nats-server PATH] [--redis-server PATH] [--programs FOLDER] [SYSTEM...]

Needs the Python packages ``nats-py`` and ``celery[redis]``, and the programs built by ``cargo build --profile dist
--workspace``. All systems run the same work in the same run: each of two hosts runs four jobs at once. Prints the
latency of single jobs, the jobs per second with 128 open jobs, and the outcomes of 1,000 jobs of 50 ms while a worker
is killed every second and a whole host every four seconds.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import os
import random
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
sys.path[:0] = [str(HERE), str(ROOT / "python" / "src")]
HOSTS = 2
#: Number of jobs that a host runs at once.
PROCESSES = 4
#: Time in seconds after which each system considers a silent host lost.
HOST_LOST_AFTER = 4.0
#: Maximum time in seconds to wait for a job's outcome, counted from the last fault.
PATIENCE = 60.0
ALONE = 300
OPEN = 128


def free_port() -> int:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return int(bound.getsockname()[1])


def wait_port(port: int) -> None:
    began = time.monotonic()
    while time.monotonic() - began < 30:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        time.sleep(0.05)
    raise SystemExit(f"no process is listening on port {port}")


def children(pid: int) -> list[int]:
    """Returns all descendants of a process."""
    parents: dict[int, list[int]] = collections.defaultdict(list)
    for entry in os.listdir("/proc"):
        with contextlib.suppress(OSError, ValueError):
            stat = Path(f"/proc/{int(entry)}/stat").read_text()
            parents[int(stat.rsplit(") ", 1)[1].split()[1])].append(int(entry))
    found, waiting = [], [pid]
    while waiting:
        below = parents[waiting.pop()]
        found += below
        waiting += below
    return found


def command_line(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    return ""


class System:
    """A system under test."""

    name = ""
    #: True if the system knows which jobs can safely run twice.
    knows_idempotent = False

    def __init__(self, arguments: argparse.Namespace, folder: Path) -> None:
        self.arguments = arguments
        self.folder = folder
        self.log = (folder / "log").open("w")
        self.services: list[subprocess.Popen[bytes]] = []
        self.hosts: list[list[subprocess.Popen[bytes]]] = [[] for _ in range(HOSTS)]
        (folder / "begun").touch()
        (folder / "ended").touch()
        for path in (folder, folder / "begun", folder / "ended"):
            path.chmod(0o777)

    def spawn(self, *command: str | Path, **variables: str) -> subprocess.Popen[bytes]:
        path = f"{HERE}:{ROOT / 'python' / 'src'}"
        return subprocess.Popen(
            [str(part) for part in command],
            env=os.environ | {"PYTHONPATH": path} | variables,
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            stdout=self.log,
            stderr=self.log,
            start_new_session=True,
        )

    async def start(self) -> None:
        raise NotImplementedError

    def start_host(self, host: int) -> None:
        raise NotImplementedError

    async def submit(self, number: int, seconds: float, is_idempotent: bool) -> Awaitable[str]:
        """Returns once the system has accepted the job. The awaitable yields the job's outcome."""
        raise NotImplementedError

    async def close(self) -> None:
        raise NotImplementedError

    def is_worker(self, pid: int) -> bool:
        return True

    def kill_worker(self, host: int) -> None:
        workers = [pid for process in self.hosts[host] for pid in children(process.pid) if self.is_worker(pid)]
        if workers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(random.choice(workers), signal.SIGKILL)

    def kill_host(self, host: int) -> None:
        for process in self.hosts[host]:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def report(self) -> None:
        """Prints the last lines of the log."""
        print((self.folder / "log").read_text()[-4000:], file=sys.stderr)

    async def stop(self) -> None:
        await self.close()
        for host in range(HOSTS):
            self.kill_host(host)
        for process in self.services:
            process.kill()
            process.wait()

    def payload(self, number: int, seconds: float) -> str:
        return f"{number} {seconds} {self.folder}"

    def start_nats(self) -> list[str]:
        routes = [free_port() for _ in range(self.arguments.servers)]
        ports = [free_port() for _ in routes]
        for index, (port, route) in enumerate(zip(ports, routes, strict=True)):
            text = f'port: {port}\nserver_name: n{index}\njetstream {{ store_dir: "{self.folder}/n{index}" }}\n'
            if len(routes) > 1:
                others = ", ".join(f'"nats://127.0.0.1:{other}"' for other in routes if other != route)
                text += f'cluster {{ name: compare, listen: "127.0.0.1:{route}", routes: [{others}] }}\n'
            config = self.folder / f"n{index}.conf"
            config.write_text(text)
            self.services.append(self.spawn(self.arguments.nats_server, "-c", config))
        for port in ports:
            wait_port(port)
        return [f"nats://127.0.0.1:{port}" for port in ports]


class Fleet(System):
    name = "bulkhead-fleet"
    knows_idempotent = True

    async def start(self) -> None:
        from bulkhead.fleet import AsyncFleet

        servers = self.start_nats()
        quoted = ", ".join(f'"{server}"' for server in servers)
        self.settings = (
            f'[nats]\nservers = [{quoted}]\nping = "1s"\n[streams]\nreplicas = {len(servers)}\n'
            f'host_lost_after = "{HOST_LOST_AFTER:g}s"\nmax_bytes = "256MiB"\nledger_max_bytes = "256MiB"\n'
            'dead_max_bytes = "64MiB"\ntenant_backlog = 10000\n[bulkhead.work]\n'
        )
        (self.folder / "fleet.toml").write_text(self.settings)
        program, began = self.arguments.programs / "bulkhead-fleet", time.monotonic()
        while subprocess.run(
            [program, "--config", self.folder / "fleet.toml", "init"], stdout=self.log, stderr=self.log
        ).returncode:
            if time.monotonic() - began > 30:
                raise SystemExit("the streams are not ready")
            time.sleep(0.2)
        self.fleet = await AsyncFleet.connect(servers, host_lost_after=HOST_LOST_AFTER)

    def start_host(self, host: int) -> None:
        folder = self.folder / f"host{host}"
        folder.mkdir(exist_ok=True)
        folder.chmod(0o755)
        (folder / "workers.toml").write_text(
            f'[supervisor]\nsocket = "{folder}/jobs.sock"\n[bulkhead.work]\n'
            f'command = ["{sys.executable}", "-m", "bulkhead", "serve", "tasks:bulkhead_handler"]\n'
            f'env = {{ PYTHONPATH = "{HERE}:{ROOT}/python/src" }}\nprocesses = {PROCESSES}\nmax_queue = 16\n'
            f'[bulkhead.work.sandbox]\nread = ["{HERE}", "{ROOT}/python/src", "{sys.prefix}"]\n'
            f'write = ["{self.folder}"]\n'
        )
        (folder / "fleet.toml").write_text(
            f'{self.settings}[agent]\nname = "host{host}"\nsocket = "{folder}/jobs.sock"\n'
        )
        programs = self.arguments.programs
        self.hosts[host] = [
            self.spawn(programs / "bulkhead-supervisor", "--config", folder / "workers.toml"),
            self.spawn(programs / "bulkhead-fleet", "--config", folder / "fleet.toml", "agent"),
        ]

    def is_worker(self, pid: int) -> bool:
        return "bulkhead serve" in command_line(pid)

    async def submit(self, number: int, seconds: float, is_idempotent: bool) -> Awaitable[str]:
        from bulkhead import JobError

        submitted = await self.fleet.submit(
            "work", self.payload(number, seconds).encode(), id=str(number), deadline=600, idempotent=is_idempotent
        )

        async def outcome() -> str:
            try:
                await submitted.result()
                return "ok"
            except JobError as error:
                return str(error)

        return outcome()

    async def close(self) -> None:
        await self.fleet.close()


class JetStream(System):
    name = "JetStream consumers"

    async def start(self) -> None:
        import nats

        self.servers = self.start_nats()
        self.nats = await nats.connect(servers=self.servers, max_reconnect_attempts=-1)
        self.stream = self.nats.jetstream(timeout=5)
        replicas, began = len(self.servers), time.monotonic()
        while True:
            try:
                await self.stream.add_stream(
                    name="PLAIN_JOBS", subjects=["plain.jobs.*"], retention="workqueue", num_replicas=replicas
                )
                await self.stream.add_stream(name="PLAIN_RESULTS", subjects=["plain.results.*"], num_replicas=replicas)
                config = nats.js.api.ConsumerConfig(
                    durable_name="work", ack_policy="explicit", ack_wait=HOST_LOST_AFTER
                )
                await self.stream.add_consumer("PLAIN_JOBS", config)
                break
            except (nats.errors.Error, nats.js.errors.Error):
                if time.monotonic() - began > 30:
                    raise
                await asyncio.sleep(0.2)
        self.open: dict[str, asyncio.Future[str]] = {}

        async def on_result(message: Any) -> None:
            future = self.open.get(message.data.decode())
            if future is not None and not future.done():
                future.set_result("ok")

        await self.nats.subscribe("plain.results.*", cb=on_result)

    def start_host(self, host: int) -> None:
        self.hosts[host] = [
            self.spawn(sys.executable, HERE / "tasks.py", "consume", ",".join(self.servers), str(PROCESSES))
        ]

    async def submit(self, number: int, seconds: float, is_idempotent: bool) -> Awaitable[str]:
        future: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.open[str(number)] = future
        await self.stream.publish(f"plain.jobs.{number}", self.payload(number, seconds).encode())
        return future

    async def close(self) -> None:
        await self.nats.close()


class Celery(System):
    name = "Celery on Redis, late acks"
    late = f"{HOST_LOST_AFTER:g}"

    async def start(self) -> None:
        import redis

        port = free_port()
        self.services.append(
            self.spawn(
                self.arguments.redis_server,
                "--port",
                str(port),
                "--dir",
                self.folder,
                "--appendonly",
                "yes",
                "--bind",
                "127.0.0.1",
            )
        )
        wait_port(port)
        self.variables = {"CELERY_BROKER": f"redis://127.0.0.1:{port}/0", "CELERY_LATE": self.late}
        os.environ.update(self.variables)
        sys.modules.pop("tasks", None)
        import tasks

        self.task = tasks.celery_work
        self.redis = redis.Redis(port=port)
        self.open: dict[str, asyncio.Future[str]] = {}
        self.poller = asyncio.create_task(self.poll())

    async def poll(self) -> None:
        """Reads the results of all open jobs. Celery's own wait functions read one result at a time."""
        import json

        while True:
            ids = [id for id, future in self.open.items() if not future.done()]
            if ids:
                results = self.redis.mget([f"celery-task-meta-{id}" for id in ids])
                for id, result in zip(ids, results, strict=True):
                    status = json.loads(result)["status"] if result else ""
                    if status in ("SUCCESS", "FAILURE"):
                        self.open.pop(id).set_result("ok" if status == "SUCCESS" else "failed")
            await asyncio.sleep(0.001)

    def start_host(self, host: int) -> None:
        self.hosts[host] = [
            self.spawn(
                sys.executable,
                "-m",
                "celery",
                "-A",
                "tasks",
                "worker",
                "-c",
                str(PROCESSES),
                "-n",
                f"host{host}",
                "--without-gossip",
                "--without-mingle",
                **self.variables,
            )
        ]

    async def submit(self, number: int, seconds: float, is_idempotent: bool) -> Awaitable[str]:
        sent = self.task.apply_async((self.payload(number, seconds),))
        future: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.open[sent.id] = future
        return future

    async def close(self) -> None:
        self.poller.cancel()


class CeleryDefault(Celery):
    name = "Celery on Redis, default"
    late = ""


SYSTEMS: dict[str, type[System]] = {
    "fleet": Fleet,
    "jetstream": JetStream,
    "celery": Celery,
    "celery-default": CeleryDefault,
}


async def served(outcome: Awaitable[str]) -> None:
    """Waits for a job that must succeed, because a figure that includes a failure is worthless."""
    if (told := await outcome) != "ok":
        raise SystemExit(f"a job ended as {told}")


async def measure_alone(system: System, numbers: Iterator[int]) -> list[float]:
    """Returns the times in ms from submission to outcome, for jobs that run one after another."""
    times = []
    for number in (next(numbers) for _ in range(ALONE)):
        began = time.perf_counter()
        await served(await system.submit(number, 0, True))
        times.append((time.perf_counter() - began) * 1000)
    return sorted(times)


async def measure_rate(system: System, numbers: Iterator[int], jobs: int) -> float:
    """Returns the number of jobs per second with `OPEN` concurrent jobs."""
    left = iter(range(jobs))

    async def submitter() -> None:
        for _ in left:
            await served(await system.submit(next(numbers), 0, True))

    began = time.perf_counter()
    await asyncio.gather(*(submitter() for _ in range(OPEN)))
    return jobs / (time.perf_counter() - began)


def counts(path: Path) -> collections.Counter[int]:
    return collections.Counter(int(line) for line in path.read_text().split())


async def survive(system: System, numbers: Iterator[int], jobs: int) -> dict[str, int]:
    """Submits jobs while workers and hosts are killed. Returns the number of accepted jobs with each outcome."""
    waits: dict[int, asyncio.Task[str]] = {}
    is_over = asyncio.Event()

    async def wait(outcome: Awaitable[str]) -> str:
        return await outcome

    async def disturb() -> None:
        turn = 0
        while not is_over.is_set():
            await asyncio.sleep(1)
            turn += 1
            host = turn % HOSTS
            if turn % 4:
                await asyncio.to_thread(system.kill_worker, host)
            else:
                await asyncio.to_thread(system.kill_host, turn // 4 % HOSTS)
                await asyncio.sleep(0.5)
                system.start_host(turn // 4 % HOSTS)

    disturbance = asyncio.create_task(disturb())
    for number in (next(numbers) for _ in range(jobs)):
        waits[number] = asyncio.create_task(wait(await system.submit(number, 0.05, number % 2 == 0)))
        await asyncio.sleep(1 / 60)
    is_over.set()
    await disturbance
    await asyncio.wait(waits.values(), timeout=PATIENCE)
    outcomes = {number: task.result() if task.done() else "none" for number, task in waits.items()}
    for task in waits.values():
        task.cancel()
    begun, ended = counts(system.folder / "begun"), counts(system.folder / "ended")
    told = collections.Counter(outcomes.values())
    return {
        "accepted": len(waits),
        "ok": told["ok"],
        "another outcome": len(waits) - told["ok"] - told["none"],
        "no outcome": told["none"],
        "never ran to the end, no outcome": sum(
            outcome == "none" and not ended[number] for number, outcome in outcomes.items()
        ),
        "ok, never ran to the end": sum(outcome == "ok" and not ended[number] for number, outcome in outcomes.items()),
        "began twice": sum(begun[number] > 1 for number in waits),
        "of these, not idempotent": sum(begun[number] > 1 and number % 2 for number in waits),
    }


async def run(kind: type[System], arguments: argparse.Namespace) -> dict[str, str]:
    with tempfile.TemporaryDirectory(prefix="bulkhead-compare-") as folder:
        system = kind(arguments, Path(folder))
        try:
            await system.start()
        except BaseException:
            system.report()
            raise
        try:
            for host in range(HOSTS):
                system.start_host(host)
            numbers = iter(range(1, 1 << 40))
            # The hosts count as ready once they have served this many jobs in total.
            await asyncio.gather(*[await system.submit(next(numbers), 0.5, True) for _ in range(4 * HOSTS * PROCESSES)])
            alone = await measure_alone(system, numbers)
            rates = [await measure_rate(system, numbers, arguments.jobs) for _ in range(3)]
            found = {
                "p50 alone, ms": f"{statistics.median(alone):.1f}",
                "p99 alone, ms": f"{alone[len(alone) * 99 // 100]:.1f}",
                f"jobs/s, {OPEN} open": f"{statistics.median(rates):.0f}",
            }
            return found | {
                name: str(count) for name, count in (await survive(system, numbers, arguments.jobs)).items()
            }
        except BaseException:
            system.report()
            raise
        finally:
            await system.stop()


def program(name: str, path: str | None) -> str:
    found = shutil.which(path or name)
    if found is None:
        raise SystemExit(f"{path or name} is missing; specify it with --{name}, or omit the systems that need it")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nats-server")
    parser.add_argument("--redis-server")
    parser.add_argument("--programs", type=Path, default=ROOT / "target" / "dist")
    parser.add_argument("--servers", type=int, default=3, help="number of NATS servers, and of replicas")
    parser.add_argument("--jobs", type=int, default=1000)
    parser.add_argument("systems", nargs="*", metavar="SYSTEM", help=", ".join(SYSTEMS))
    arguments = parser.parse_args()
    kinds: list[Callable[..., Any]] = []
    for name in arguments.systems or SYSTEMS:
        if name not in SYSTEMS:
            parser.error(f"there is no system {name!r}; the systems are {', '.join(SYSTEMS)}")
        kinds.append(SYSTEMS[name])
    arguments.programs = arguments.programs.resolve()
    if any(issubclass(kind, (Fleet, JetStream)) for kind in kinds):
        arguments.nats_server = program("nats-server", arguments.nats_server)
    if any(issubclass(kind, Celery) for kind in kinds):
        arguments.redis_server = program("redis-server", arguments.redis_server)
    results = {kind.name: asyncio.run(run(kind, arguments)) for kind in kinds}
    rows = list(next(iter(results.values())))
    print("| | " + " | ".join(results) + " |\n| --- |" + " --- |" * len(results))
    for row in rows:
        print(f"| {row} | " + " | ".join(found[row] for found in results.values()) + " |")


if __name__ == "__main__":
    main()
