"""Setup for all tests."""

import os
import signal
from pathlib import Path

# A shell that runs tests in the background ignores SIGINT, and child processes would inherit this disposition.
signal.signal(signal.SIGINT, signal.default_int_handler)

# For interpreters that tests start.
_source = str(Path(__file__).resolve().parents[1] / "src")
os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys([_source, *filter(None, [os.environ.get("PYTHONPATH")])]))
