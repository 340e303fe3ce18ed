"""The verifier's process: reads signature checks from standard input, answers a byte for each.

Kept to one import beyond the standard library, so that it starts fast and stays small.
"""

import os
import signal
import struct
from typing import Final

from nacl import bindings
from nacl.exceptions import CryptoError

COUNT: Final = struct.Struct(">I")
KEY_BYTES: Final = 32
SIGNATURE_BYTES: Final = 64
GOOD: Final = 1
BAD: Final = 0


def check(signer: bytes, message: bytes, signature: bytes) -> int:
    """`GOOD` if libsodium accepts the signature, else `BAD`."""
    try:
        bindings.crypto_sign_open(signature + message, signer)
    except CryptoError:
        return BAD
    return GOOD


def main() -> None:
    """Serve until standard input ends, as it does when the relay is gone."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    source = os.fdopen(0, "rb")
    while header := source.read(2 * COUNT.size):
        count, message_bytes = struct.unpack(">II", header)
        record_bytes = KEY_BYTES + SIGNATURE_BYTES + message_bytes
        data = source.read(count * record_bytes)
        if len(data) < count * record_bytes:
            return
        verdicts = bytearray()
        for at in range(0, len(data), record_bytes):
            signed_at = at + KEY_BYTES
            message_at = signed_at + SIGNATURE_BYTES
            verdicts.append(
                check(
                    data[at:signed_at],
                    data[message_at : at + record_bytes],
                    data[signed_at:message_at],
                )
            )
        os.write(1, verdicts)


if __name__ == "__main__":
    main()
