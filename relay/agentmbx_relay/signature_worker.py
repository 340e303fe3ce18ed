"""The process that checks and makes signatures: tasks by standard input, answers by output.

It reads the secret key first. Kept to one import beyond the standard library, so that it starts
fast and stays small.
"""

import os
import signal
import struct
from typing import Final

from nacl import bindings
from nacl.exceptions import CryptoError

HEAD: Final = struct.Struct(">BHH")  # the task, how many records, bytes of each
CHECK: Final = 0
SIGN: Final = 1
SECRET_BYTES: Final = 64
KEY_BYTES: Final = 32
SIGNATURE_BYTES: Final = 64
NICENESS: Final = 5
GOOD: Final = b"\1"
BAD: Final = b"\0"
ANSWER_BYTES: Final = {CHECK: 1, SIGN: SIGNATURE_BYTES}


def check(record: bytes) -> bytes:
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
    # Where both want one core, the relay goes first: all of its connections wait for it.
    os.nice(NICENESS)
    source = os.fdopen(0, "rb")
    secret = source.read(SECRET_BYTES)
    while len(head := source.read(HEAD.size)) == HEAD.size:
        task, count, record_bytes = HEAD.unpack(head)
        data = source.read(count * record_bytes)
        if len(data) < count * record_bytes:
            return
        records = [data[at : at + record_bytes] for at in range(0, len(data), record_bytes)]
        if task == SIGN:
            signed = (bindings.crypto_sign(message, secret) for message in records)
            answers = [each[:SIGNATURE_BYTES] for each in signed]
        else:
            answers = [check(record) for record in records]
        os.write(1, b"".join(answers))


if __name__ == "__main__":
    main()
