"""Runs functions in isolated worker processes, so that a crash, hang or leak in one job does not affect other jobs.

``BulkheadExecutor`` is a replacement for ``concurrent.futures.ProcessPoolExecutor``. ``Client`` and ``AsyncClient``
send jobs to a supervisor. ``serve`` turns a program into a worker. Submodules are imported on first use.
"""

from __future__ import annotations

__version__ = "0.1.0"

import sys

#: Copy of ``sys.platform``. If the module compared ``sys.platform`` directly, type checkers on other systems would
#: treat the rest as unreachable.
_platform: str = sys.platform
if _platform != "linux":
    raise ImportError(f"bulkhead needs Linux kernel features, so it runs only on Linux; this is {_platform}")

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ._aio import AsyncClient as AsyncClient
    from ._client import Client as Client
    from ._future import JobFuture as JobFuture
    from ._reply import Reply as Reply
    from .errors import Cancelled as Cancelled
    from .errors import Crashed as Crashed
    from .errors import DeadlineExceeded as DeadlineExceeded
    from .errors import Disconnected as Disconnected
    from .errors import Failed as Failed
    from .errors import JobError as JobError
    from .errors import Outcome as Outcome
    from .errors import Rejected as Rejected
    from .errors import SupervisorNotFound as SupervisorNotFound
    from .executor import BulkheadExecutor as BulkheadExecutor
    from .executor import CallTimeout as CallTimeout
    from .executor import PoolDisconnected as PoolDisconnected
    from .executor import ResultRefused as ResultRefused
    from .executor import ResultUnreadable as ResultUnreadable
    from .executor import WorkerCrashed as WorkerCrashed
    from .worker import Context as Context
    from .worker import HandlerError as HandlerError
    from .worker import handler as handler
    from .worker import initializer as initializer
    from .worker import serve as serve

_NAMES_OF = {
    "_aio": ("AsyncClient",),
    "_client": ("Client",),
    "_future": ("JobFuture",),
    "_reply": ("Reply",),
    "errors": (
        *("Cancelled", "Crashed", "DeadlineExceeded", "Disconnected", "Failed", "JobError", "Outcome", "Rejected"),
        "SupervisorNotFound",
    ),
    "executor": (
        *("BulkheadExecutor", "CallTimeout", "PoolDisconnected", "ResultRefused", "ResultUnreadable", "WorkerCrashed"),
    ),
    "worker": ("Context", "HandlerError", "handler", "initializer", "serve"),
}
_MODULE_OF = {name: module for module, names in _NAMES_OF.items() for name in names}

__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> object:
    module = _MODULE_OF.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    value = getattr(importlib.import_module(f".{module}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULE_OF})
