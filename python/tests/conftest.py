"""What holds for all tests."""

import signal

# A shell that starts tests in the background has it ignored, and children would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
