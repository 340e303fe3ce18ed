"""What a sender and an owner may count on at a relay, whatever happens to the relay's process."""

import itertools
from collections.abc import Iterable, Sequence

from agentmbx_protocol.custody import HeldFact
from agentmbx_protocol.envelope import Envelope, parse_envelope


class Ledger:
    """One queue's envelopes and what is known of each, kept by their digests.

    `facts` are those of the last `held` that was received. Of an envelope that was offered without
    an answer nothing is known, nor whether an ack without an answer counted.
    """

    def __init__(self) -> None:
        self.offered: dict[bytes, Envelope] = {}
        self.facts: dict[bytes, HeldFact] = {}
        self.acked: set[bytes] = set()
        self.perhaps_acked: set[bytes] = set()
        self.unanswered: list[list[bytes]] = []
        self._order: dict[bytes, int] = {}
        self._places = itertools.count()
        self.deposit_count = 0
        self.same_count = 0

    def offer(self, envelopes: Sequence[Envelope]) -> None:
        """Record what is about to be deposited."""
        self.offered |= {envelope.digest: envelope for envelope in envelopes}

    def leave_unanswered(self, envelopes: Sequence[Envelope]) -> None:
        """Record a deposit of new envelopes that got no answer."""
        self.unanswered.append([envelope.digest for envelope in envelopes])

    def believe(self, held: Iterable[HeldFact]) -> None:
        """Check a `held` against the last one for each envelope, then believe it.

        Other facts than before are right only when the until time of those before had passed by
        the relay's own clock, which the new time of acceptance shows.
        """
        for fact in held:
            self.deposit_count += 1
            before = self.facts.get(fact.digest)
            if before == fact:
                self.same_count += 1
                continue
            if before is not None:
                assert fact.accepted_ms >= before.until_ms, (before, fact)
                self.acked.discard(fact.digest)
                self.perhaps_acked.discard(fact.digest)
                self._order.pop(fact.digest, None)
            self.facts[fact.digest] = fact

    def ack(self, digests: Sequence[bytes], *, answered: bool) -> None:
        """Record acks that were sent."""
        (self.acked if answered else self.perhaps_acked).update(digests)

    def check_handed_out(self, envelopes: Sequence[bytes]) -> list[bytes]:
        """Check one answer to a collect; its digests.

        Each is whole and was offered, none was acked, and the order is that of acceptance, the
        same at every collect.
        """
        digests = []
        for data in envelopes:
            parcel = parse_envelope(data)
            parcel.frame.verify()
            assert self.offered[parcel.digest].frame.data == data
            digests.append(parcel.digest)
        assert len(set(digests)) == len(digests)
        back = self.acked.intersection(digests)
        assert not back, f"{len(back)} that were acked came back"
        accepted = [self.facts[digest].accepted_ms for digest in digests if digest in self.facts]
        assert accepted == sorted(accepted)
        places = [self._order[digest] for digest in digests if digest in self._order]
        assert places == sorted(places)
        for digest in digests:
            self._order.setdefault(digest, next(self._places))
        return digests

    def check_all_there(self, digests: Sequence[bytes], now_ms: int) -> None:
        """Check that all that is held and neither acked nor past its time by `now_ms` is there."""
        gone = {
            digest
            for digest, fact in self.facts.items()
            if fact.until_ms > now_ms
            and digest not in self.acked
            and digest not in self.perhaps_acked
        } - set(digests)
        assert not gone, f"{len(gone)} that were held are not there"

    def check_none_is_half(self, digests: Sequence[bytes]) -> None:
        """Check that of a deposit without an answer either all is there or nothing."""
        seen = set(digests) | self.acked | self.perhaps_acked | set(self.facts)
        for deposit in self.unanswered:
            count = len(seen.intersection(deposit))
            assert count in (0, len(deposit)), f"{count} of {len(deposit)} are there"
        self.unanswered.clear()
