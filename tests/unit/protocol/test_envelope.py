import pytest

from agentmbx_protocol import envelope, limits
from agentmbx_protocol.errors import BadSignature, Malformed, TooLarge, UnsupportedVersion
from vector_parts import typical
from vector_parts.raw_forms import filler

SEALED = filler("sealed", 1072)


def test_an_envelope_says_what_it_was_made_of() -> None:
    data = envelope.make_envelope(typical.PAIR, typical.QUEUE.public, 3600, SEALED)
    parcel = envelope.parse_envelope(data)
    assert parcel.signer == typical.PAIR.public
    assert (parcel.queue, parcel.ttl_s, parcel.sealed) == (typical.QUEUE.public, 3600, SEALED)
    assert parcel.length == len(data) == 1216
    assert parcel.digest == parcel.frame.digest
    parcel.frame.verify()


def test_a_direct_envelope_names_a_queue_of_zeros() -> None:
    data = envelope.make_envelope(typical.PAIR, envelope.DIRECT, 1, SEALED)
    assert envelope.parse_envelope(data).queue == bytes(32)


@pytest.mark.parametrize("ttl_s", [1, 604_800])
def test_the_shortest_and_the_longest_ttl_are_read(ttl_s: int) -> None:
    data = envelope.make_envelope(typical.PAIR, typical.QUEUE.public, ttl_s, SEALED)
    assert envelope.parse_envelope(data).ttl_s == ttl_s


@pytest.mark.parametrize("ttl_s", [0, 604_801, 2**32 - 1])
def test_a_ttl_out_of_range_is_malformed_and_never_made(ttl_s: int) -> None:
    with pytest.raises(Malformed):
        envelope.parse_envelope(typical.envelope(ttl_s=ttl_s).data)
    with pytest.raises(ValueError, match="ttl_s"):
        envelope.make_envelope(typical.PAIR, typical.QUEUE.public, ttl_s, SEALED)


@pytest.mark.parametrize("length", [1024, 1088, 1152, 2048, 2176, 65_536, 507_904])
def test_sealed_bytes_of_every_padded_length_are_read(length: int) -> None:
    assert len(envelope.parse_envelope(typical.envelope(plain_length=length).data).sealed) == (
        length + 48
    )


@pytest.mark.parametrize("length", [1023, 1025, 1087, 2049, 65_537, 507_903, 507_905, 516_096])
def test_sealed_bytes_of_a_length_of_their_own_are_malformed(length: int) -> None:
    with pytest.raises(Malformed):
        envelope.parse_envelope(typical.envelope(plain_length=length).data)


def test_an_envelope_beyond_the_largest_frame_is_too_large() -> None:
    with pytest.raises(TooLarge):
        envelope.parse_envelope(typical.envelope(plain_length=524_097).data)
    with pytest.raises(TooLarge):
        envelope.make_envelope(
            typical.PAIR, typical.QUEUE.public, 1, bytes(limits.SEALED_BYTES_MAX + 1)
        )


def test_another_kind_and_another_version_are_no_envelope() -> None:
    with pytest.raises(Malformed):
        envelope.parse_envelope(typical.held().data)
    with pytest.raises(UnsupportedVersion):
        envelope.parse_envelope(typical.envelope()._replace(magic=b"MBX2").data)


def test_the_signature_of_an_envelope_is_left_to_the_caller() -> None:
    data = typical.envelope().data
    parcel = envelope.parse_envelope(data[:-1] + bytes((data[-1] ^ 1,)))
    with pytest.raises(BadSignature):
        parcel.frame.verify()
