"""What both ends of the control socket agree on: the longest line, and who the other user is."""

import socket
import struct
import sys

# One JSON object on each line: a request, then events, then an answer.
LINE_BYTES_MAX = 8 * 1024 * 1024
_XUCRED_BYTES = 76


def peer_user(plug: socket.socket) -> int:
    """The user id of the process at the other end, as the kernel knows it; raises `OSError`."""
    if sys.platform == "linux":
        form = "3i"
        packed = plug.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize(form))
        return int(struct.unpack(form, packed)[1])
    # macOS and BSD: struct xucred begins with its version and the user id; SOL_LOCAL is 0 there.
    packed = plug.getsockopt(0, getattr(socket, "LOCAL_PEERCRED", 1), _XUCRED_BYTES)
    return int(struct.unpack_from("=II", packed)[1])
