"""What holds for all tests."""

import signal

# A shell starts background jobs with SIGINT ignored, and programs that are started from there
# inherit it; tests that stop a program with it need what a terminal gives.
signal.signal(signal.SIGINT, signal.default_int_handler)
