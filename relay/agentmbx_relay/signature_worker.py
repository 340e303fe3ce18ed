"""The process that checks and makes signatures: batches by standard input, answers by output.

Kept to one import beyond the standard library, so that it starts fast and stays small.
"""

import os
import signal
import struct
from typing import Final

from nacl import bindings
from nacl.exceptions import CryptoError

HEAD: Final = struct.Struct(">BII")
CHECK: Final = 1
SIGN: Final = 2
KEY_BYTES: Final = 32
SIGNATURE_BYTES: Final = 64
GOOD: Final = b"\x01"
BAD: Final = b"\x00"


def check(record: bytes) -> bytes:
    """`GOOD` if libsodium accepts a record of signer, signature and message, else `BAD`."""
    try:
        bindings.crypto_sign_open(record[KEY_BYTES:], record[:KEY_BYTES])
    except CryptoError:
        return BAD
    return GOOD


def main() -> None:
    """Serve until standard input ends, as it does when the relay is gone.

    The first 32 bytes of the input are the seed of the relay's key; it is never an argument, which
    everybody on the machine may read.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    source = os.fdopen(0, "rb")
    _, secret = bindings.crypto_sign_seed_keypair(source.read(KEY_BYTES))
    while len(head := source.read(HEAD.size)) == HEAD.size:
        kind, count, message_bytes = HEAD.unpack(head)
        record_bytes = message_bytes + (KEY_BYTES + SIGNATURE_BYTES if kind == CHECK else 0)
        data = source.read(count * record_bytes)
        if len(data) < count * record_bytes:
            return
        records = (data[at : at + record_bytes] for at in range(0, len(data), record_bytes))
        if kind == CHECK:
            answer = b"".join(map(check, records))
        else:
            signed = (bindings.crypto_sign(record, secret) for record in records)
            answer = b"".join(each[:SIGNATURE_BYTES] for each in signed)
        os.write(1, answer)


if __name__ == "__main__":
    main()
