"""A bad cable: makes two taps and carries frames between them, late, and not all of them.

    python cable.py TAP TAP DELAY_MS LOSS_PERCENT

It returns when the taps are there and goes on in the background until it is killed. (The kernel's
own netem is not in every kernel.)
"""

import fcntl
import os
import random
import select
import struct
import sys
import time
from collections import deque
from contextlib import suppress
from typing import Final

TUNSETIFF: Final = 0x400454CA
TAP_WITHOUT_HEADER: Final = 0x1002
FRAME_BYTES_MAX: Final = 2048
FRAMES_MAX: Final = 1000


def open_tap(name: str) -> int:
    """A tap device of that name, as long as the file is open."""
    tap = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    request = struct.pack("16sH22x", name.encode(), TAP_WITHOUT_HEADER)
    fcntl.ioctl(tap, TUNSETIFF, request)
    return tap


def go_to_background() -> None:
    """Go on as a child with no ties to the caller, who is free at once."""
    if os.fork():
        os._exit(0)
    os.setsid()
    nothing = os.open(os.devnull, os.O_RDWR)
    for standard in range(3):
        os.dup2(nothing, standard)


def carry(taps: tuple[int, int], delay_s: float, loss: float) -> None:
    """Carry frames both ways in their order, for ever."""
    waiting: dict[int, deque[tuple[float, bytes]]] = {tap: deque() for tap in taps}
    other = {taps[0]: taps[1], taps[1]: taps[0]}
    while True:
        dues = [frames[0][0] for frames in waiting.values() if frames]
        patience_s = max(0.0, min(dues) - time.monotonic()) if dues else None
        ready, _, _ = select.select(taps, [], [], patience_s)
        for tap in ready:
            frame = os.read(tap, FRAME_BYTES_MAX)
            if random.random() >= loss and len(waiting[tap]) < FRAMES_MAX:
                waiting[tap].append((time.monotonic() + delay_s, frame))
        for tap, frames in waiting.items():
            while frames and frames[0][0] <= time.monotonic():
                with suppress(OSError):  # the far side is down: lost
                    os.write(other[tap], frames.popleft()[1])


def main() -> None:
    """See the top."""
    one, another, delay_ms, loss_percent = sys.argv[1:]
    taps = open_tap(one), open_tap(another)
    go_to_background()
    carry(taps, float(delay_ms) / 1000, float(loss_percent) / 100)


if __name__ == "__main__":
    main()
