"""Hypothesis strategies for what a wire or a hostile relay can do to good bytes."""

from collections.abc import Sequence

from hypothesis import strategies as st


@st.composite
def mutated(draw: st.DrawFn, goods: Sequence[bytes], *, at_most: int = 3) -> bytes:
    """One of `goods` after one to `at_most` small changes, and never one of `goods`."""
    good = data = draw(st.sampled_from(goods))
    for _ in range(draw(st.integers(1, at_most))):
        data = draw(st.sampled_from(CHANGES))(draw, data)
    if data in goods:
        data = _insert(draw, good)
    return data if data not in goods else data + b"\x01"


def _flip(draw: st.DrawFn, data: bytes) -> bytes:
    if not data:
        return b"\0"
    bit = draw(st.integers(0, 8 * len(data) - 1))
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def _set(draw: st.DrawFn, data: bytes) -> bytes:
    if not data:
        return b"\0"
    at, value = draw(st.integers(0, len(data) - 1)), draw(st.integers(0, 255))
    return data[:at] + bytes((value,)) + data[at + 1 :]


def _cut(draw: st.DrawFn, data: bytes) -> bytes:
    return data[: draw(st.integers(0, max(len(data) - 1, 0)))]


def _cut_front(draw: st.DrawFn, data: bytes) -> bytes:
    return data[draw(st.integers(0, len(data))) :]


def _append(draw: st.DrawFn, data: bytes) -> bytes:
    return data + draw(st.binary(min_size=1, max_size=40))


def _insert(draw: st.DrawFn, data: bytes) -> bytes:
    at = draw(st.integers(0, len(data)))
    return data[:at] + draw(st.binary(min_size=1, max_size=3)) + data[at:]


def _remove(draw: st.DrawFn, data: bytes) -> bytes:
    at = draw(st.integers(0, max(len(data) - 1, 0)))
    return data[:at] + data[at + draw(st.integers(1, 33)) :]


def _swap(draw: st.DrawFn, data: bytes) -> bytes:
    if not data:
        return b"\0"
    first, second = (draw(st.integers(0, len(data) - 1)) for _ in range(2))
    changed = bytearray(data)
    changed[first], changed[second] = changed[second], changed[first]
    return bytes(changed)


def _repeat(draw: st.DrawFn, data: bytes) -> bytes:
    at, length = draw(st.integers(0, len(data))), draw(st.integers(1, 64))
    return data[: at + length] + data[at:]


CHANGES = (_flip, _set, _cut, _cut_front, _append, _insert, _remove, _swap, _repeat)
