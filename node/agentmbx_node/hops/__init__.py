"""Hops: ways to carry envelopes to the next machine and bring back a signed answer."""
