"""The process that checks signatures: batches by standard input, a byte for each by output.

Kept to one import beyond the standard library, so that it starts fast and stays small.
"""

import os
import signal
import struct
from typing import Final

from nacl import bindings
from nacl.exceptions import CryptoError

HEAD: Final = struct.Struct(">II")
KEY_BYTES: Final = 32
SIGNATURE_BYTES: Final = 64
GOOD: Final = 1
BAD: Final = 0


def check(record: bytes) -> int:
    """`GOOD` if libsodium accepts a record of signer, signature and message, else `BAD`."""
    try:
        bindings.crypto_sign_open(record[KEY_BYTES:], record[:KEY_BYTES])
    except CryptoError:
        return BAD
    return GOOD


def main() -> None:
    """Serve until standard input ends, as it does when the relay is gone."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    source = os.fdopen(0, "rb")
    while len(head := source.read(HEAD.size)) == HEAD.size:
        count, message_bytes = HEAD.unpack(head)
        record_bytes = KEY_BYTES + SIGNATURE_BYTES + message_bytes
        data = source.read(count * record_bytes)
        if len(data) < count * record_bytes:
            return
        records = (data[at : at + record_bytes] for at in range(0, len(data), record_bytes))
        os.write(1, bytes(map(check, records)))


if __name__ == "__main__":
    main()
