"""Every bound of the protocol in one place, each checked against the others at import.

Sizes are bytes, times carry their unit, counts are plain. SPEC section 11 lists the same numbers
and a test compares the two.
"""

from typing import Final

KEY_BYTES: Final = 32
SIGNATURE_BYTES: Final = 64
DIGEST_BYTES: Final = 32
SHORT_DIGEST_BYTES: Final = 8
INSTANCE_BYTES: Final = 16
STREAM_BYTES: Final = 16
TOKEN_BYTES: Final = 16
TOKEN_ID_BYTES: Final = 8
NONCE_BYTES: Final = 32
SEAL_OVERHEAD_BYTES: Final = 48

FRAME_BYTES_MAX: Final = 512 * 1024
FRAME_OVERHEAD_BYTES: Final = 4 + 1 + 3 + KEY_BYTES + 4 + SIGNATURE_BYTES
ENVELOPE_FIELDS_BYTES: Final = KEY_BYTES + 4
SEALED_BYTES_MAX: Final = FRAME_BYTES_MAX - FRAME_OVERHEAD_BYTES - ENVELOPE_FIELDS_BYTES
PADDED_BYTES_MIN: Final = 1024
PADDED_BYTES_MAX: Final = 507_904
BODY_BYTES_MAX: Final = 262_144
LETTER_BYTES_MAX: Final = 320 * 1024

TTL_S_MIN: Final = 1
TTL_S_MAX: Final = 7 * 24 * 3600
LETTER_LIFETIME_S_MAX: Final = 72 * 3600
LETTER_TTL_EXTRA_S: Final = 3600
QUEUE_LIFETIME_S_MAX: Final = 7 * 24 * 3600
COUNTER_MAX: Final = 2**63 - 1
TIME_MS_MAX: Final = 2**63 - 1

DEPOSIT_ENVELOPES_MAX: Final = 64
DEPOSIT_BYTES_MAX: Final = 4 * 1024 * 1024
COLLECT_BYTES_MAX: Final = 4 * 1024 * 1024
COLLECT_ACKS_MAX: Final = 1024
COLLECT_WAIT_S_MAX: Final = 50
COMMAND_BYTES_MAX: Final = 64 * 1024
SENDERS_MAX: Final = 256
TOMBSTONE_BYTES: Final = 128

NAME_BYTES_MAX: Final = 64
ADDRESSES_MAX: Final = 16
ROUTES_MAX: Final = 4
URL_BYTES_MAX: Final = 512
CARD_TAIL_BYTES_MAX: Final = 4096
CARD_BYTES_MAX: Final = FRAME_OVERHEAD_BYTES + 8 + CARD_TAIL_BYTES_MAX
ROTATION_BYTES_MAX: Final = FRAME_OVERHEAD_BYTES + 8 + CARD_BYTES_MAX
ROTATION_CHAIN_MAX: Final = 16
CONTENT_TYPE_BYTES_MAX: Final = 64

STATE_KEYS_MAX: Final = 64
STATE_KEY_CHARACTERS_MAX: Final = 32
STATE_STREAMS_MAX: Final = 64
STATE_RANGES_MAX: Final = 1024
STATE_DIGESTS_MAX: Final = 4096
STATE_REFUSED_MAX: Final = 256
STATE_CARDS_MAX: Final = 16
STATE_UNOPENED_MAX: Final = 32
# The most that each list takes in a state letter: a head is 1 to 3 bytes, a number up to 9.
_STREAM_PACKED: Final = 2 + STREAM_BYTES
_SHORT_DIGEST_PACKED: Final = 2 + SHORT_DIGEST_BYTES
_RANGES_LIST_BYTES_MAX: Final = STATE_STREAMS_MAX * (
    1 + _STREAM_PACKED + 3 + 3
) + STATE_RANGES_MAX * (1 + 9 + 9)
STATE_BYTES_MAX: Final = (
    3 * _RANGES_LIST_BYTES_MAX
    + STATE_DIGESTS_MAX * (1 + 9 + _SHORT_DIGEST_PACKED)
    + STATE_REFUSED_MAX * (1 + _STREAM_PACKED + 9 + _SHORT_DIGEST_PACKED)
    + STATE_STREAMS_MAX * (1 + _STREAM_PACKED + 9 + 9)
    + STATE_CARDS_MAX * (1 + 9 + 2 + DIGEST_BYTES)
    + STATE_UNOPENED_MAX * (2 + DIGEST_BYTES)
    + 512
)

if not (
    # A full deposit answer, collect command and register command fit the command bound.
    COMMAND_BYTES_MAX >= DEPOSIT_ENVELOPES_MAX * (DIGEST_BYTES + 4 + 8 + 8) + 1024
    and COLLECT_ACKS_MAX * DIGEST_BYTES + 1024 <= COMMAND_BYTES_MAX
    and SENDERS_MAX * KEY_BYTES + 1024 <= COMMAND_BYTES_MAX
    # The largest padded plaintext fits an envelope, and the largest envelope fits a request.
    and PADDED_BYTES_MAX + SEAL_OVERHEAD_BYTES <= SEALED_BYTES_MAX
    and min(DEPOSIT_BYTES_MAX, COLLECT_BYTES_MAX) >= FRAME_BYTES_MAX + 4
    # The largest letter with a card and a whole rotation chain fits the largest plaintext.
    and BODY_BYTES_MAX + 32 * 1024 <= LETTER_BYTES_MAX
    and LETTER_BYTES_MAX + CARD_BYTES_MAX + ROTATION_CHAIN_MAX * ROTATION_BYTES_MAX + 1024
    <= PADDED_BYTES_MAX
    # The largest state fits a letter.
    and STATE_BYTES_MAX + 64 <= LETTER_BYTES_MAX
    # What a sender asks for is what a relay must take.
    and LETTER_LIFETIME_S_MAX + LETTER_TTL_EXTRA_S <= TTL_S_MAX
):
    raise AssertionError("the limits of the protocol contradict each other")
