"""The node's errors: a failure of a command, with its code, next step and exit code."""


class Failure(Exception):
    """What happened, what to do next, a stable code, and the exit code.

    1 failed, 2 usage, 3 refused, 4 unreachable.
    """

    def __init__(self, code: str, message: str, next_step: str, exit_code: int) -> None:
        super().__init__(message)
        self.code = code
        self.next_step = next_step
        self.exit_code = exit_code


class OperatingError(Exception):
    """Something outside the program does not work; `retry` says whether time may mend it."""

    def __init__(self, text: str, *, retry: bool) -> None:
        super().__init__(text)
        self.retry = retry
