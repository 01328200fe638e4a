"""The folder in which programs of the current user create their sockets."""

from __future__ import annotations

import os


def runtime_dir() -> str | None:
    """Returns ``$XDG_RUNTIME_DIR``. Ignores a relative path and an empty value, as the XDG specification requires."""
    folder = os.environ.get("XDG_RUNTIME_DIR", "")
    return folder if os.path.isabs(folder) else None
