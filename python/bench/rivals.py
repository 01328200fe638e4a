"""Wraps the compared pools in a common interface.

Each pool has two workers, and returns a future-like object for each job. ``compare.py`` and ``survival.py`` submit the
jobs and measure the pools. A pool whose package is not installed is left out.
"""

from __future__ import annotations

import concurrent.futures
import importlib
import importlib.util
import multiprocessing
from collections.abc import Callable
from typing import Any

WORKERS = 2


class Rival:
    """A pool. ``submit`` returns an object with ``result(timeout)``; ``has_timeout`` is true if jobs can time out."""

    has_timeout = False

    def submit(self, fn: Callable[..., Any], *args: Any, timeout: float | None = None) -> Any:
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError


class ProcessPool(Rival):
    """concurrent.futures.ProcessPoolExecutor with the default start method of Python 3.14."""

    def __init__(self, method: str = "forkserver") -> None:
        context = multiprocessing.get_context(method)
        self.pool = concurrent.futures.ProcessPoolExecutor(WORKERS, mp_context=context)

    def submit(self, fn: Callable[..., Any], *args: Any, timeout: float | None = None) -> Any:
        return self.pool.submit(fn, *args)

    def close(self) -> None:
        self.pool.shutdown()


class Loky(Rival):
    """loky's executor. A broken executor is replaced only when a new executor is requested."""

    def __init__(self) -> None:
        loky = importlib.import_module("loky")
        self.pool = loky.ProcessPoolExecutor(WORKERS)

    def submit(self, fn: Callable[..., Any], *args: Any, timeout: float | None = None) -> Any:
        return self.pool.submit(fn, *args)

    def close(self) -> None:
        self.pool.shutdown()


class Pebble(Rival):
    """pebble's ProcessPool."""

    has_timeout = True

    def __init__(self) -> None:
        pebble = importlib.import_module("pebble")
        self.pool = pebble.ProcessPool(WORKERS, context=multiprocessing.get_context("forkserver"))

    def submit(self, fn: Callable[..., Any], *args: Any, timeout: float | None = None) -> Any:
        return self.pool.schedule(fn, args=list(args), timeout=timeout)

    def close(self) -> None:
        self.pool.close()
        self.pool.join()


class _Asked:
    """Adapts an AsyncResult of multiprocessing or billiard to a future."""

    def __init__(self, asked: Any) -> None:
        self.asked = asked

    def result(self, timeout: float | None = None) -> Any:
        try:
            return self.asked.get(timeout)
        except multiprocessing.TimeoutError as error:
            raise concurrent.futures.TimeoutError from error


class Pool(Rival):
    """multiprocessing.Pool."""

    def __init__(self) -> None:
        self.pool = multiprocessing.get_context("forkserver").Pool(WORKERS)

    def submit(self, fn: Callable[..., Any], *args: Any, timeout: float | None = None) -> Any:
        return _Asked(self.pool.apply_async(fn, args))

    def close(self) -> None:
        self.pool.terminate()
        self.pool.join()


class Billiard(Rival):
    """billiard's Pool, which Celery uses."""

    has_timeout = True

    def __init__(self) -> None:
        billiard = importlib.import_module("billiard.pool")
        self.timeout_error = importlib.import_module("billiard.exceptions").TimeoutError
        self.pool = billiard.Pool(WORKERS, enable_timeouts=True)

    def submit(self, fn: Callable[..., Any], *args: Any, timeout: float | None = None) -> Any:
        asked = self.pool.apply_async(fn, args, timeout=timeout)
        return _BilliardAsked(asked, self.timeout_error)

    def close(self) -> None:
        self.pool.terminate()
        self.pool.join()


class _BilliardAsked:
    def __init__(self, asked: Any, timeout_error: type[BaseException]) -> None:
        self.asked, self.timeout_error = asked, timeout_error

    def result(self, timeout: float | None = None) -> Any:
        try:
            return self.asked.get(timeout)
        except self.timeout_error as error:
            raise concurrent.futures.TimeoutError from error


class Ours(Rival):
    """bulkhead.BulkheadExecutor."""

    has_timeout = True

    def __init__(self) -> None:
        from bulkhead import BulkheadExecutor

        self.pool = BulkheadExecutor(WORKERS)

    def submit(self, fn: Callable[..., Any], *args: Any, timeout: float | None = None) -> Any:
        if timeout is not None:
            return self.pool.with_options(timeout=timeout).submit(fn, *args)
        return self.pool.submit(fn, *args)

    def close(self) -> None:
        self.pool.shutdown()


RIVALS: dict[str, Callable[[], Rival]] = {
    "ProcessPoolExecutor": ProcessPool,
    "loky": Loky,
    "pebble": Pebble,
    "billiard": Billiard,
    "multiprocessing.Pool": Pool,
    "BulkheadExecutor": Ours,
}

_MODULES = {"loky": "loky", "pebble": "pebble", "billiard": "billiard", "BulkheadExecutor": "bulkhead"}


def installed() -> tuple[list[str], list[str]]:
    """Returns two lists of names: the pools that are installed, and the pools that are not installed."""
    there, missing = [], []
    for name in RIVALS:
        module = _MODULES.get(name)
        try:
            if module:
                importlib.import_module(module)
        except ImportError:
            missing.append(name)
        else:
            there.append(name)
    return there, missing


def installed_modules() -> list[str]:
    """Returns the modules of the installed pools that are not part of Python."""
    return [module for module in _MODULES.values() if importlib.util.find_spec(module)]
