"""Setup for all tests."""

import os
import signal
from pathlib import Path

# In a shell's background jobs SIGINT is ignored, and child processes would inherit this disposition.
signal.signal(signal.SIGINT, signal.default_int_handler)

# For interpreters started by tests.
_source = str(Path(__file__).resolve().parents[1] / "src")
os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys([_source, *filter(None, [os.environ.get("PYTHONPATH")])]))
