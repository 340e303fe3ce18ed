"""A store of each engine: empty, with one queue, and with something of each kind in it."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from agentmbx_relay.store import Invite
from engines import ENGINES
from fakes import DAY_MS
from store_works import (
    ALICE,
    BOB,
    CAROL,
    NOW,
    OTHER_QUEUE,
    QUEUE,
    TEMPORARY,
    Shelf,
    ack,
    add_queue,
    hold,
    list_senders,
    parcel,
    vouch,
)


@pytest.fixture(params=ENGINES)
async def empty(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Shelf]:
    engine = ENGINES[request.param](tmp_path)
    shelf = Shelf(engine, await engine.open())
    yield shelf
    await shelf.engine.close()


@pytest.fixture
async def shelf(empty: Shelf) -> Shelf:
    """A store with one queue that lists Alice and Bob."""
    await empty.do(add_queue())
    return empty


@pytest.fixture
async def furnished(shelf: Shelf) -> Shelf:
    """A store with something of each kind in it."""
    await shelf.do(add_queue(OTHER_QUEUE, [CAROL]))
    await shelf.do(add_queue(TEMPORARY, [BOB], ends_ms=NOW + DAY_MS))
    await shelf.do(hold(parcel(0), parcel(1), parcel(2), sender=ALICE))
    await shelf.do(hold(parcel(3), parcel(4), sender=BOB))
    await shelf.do(hold(parcel(5), sender=CAROL, key=OTHER_QUEUE))
    await shelf.do(ack(parcel(1), parcel(3)))
    await shelf.do(list_senders(BOB))
    await shelf.do(lambda t: t.put_invite(Invite(ALICE, 3, NOW + DAY_MS)))
    for key, ends_ms in ((QUEUE, 0), (QUEUE, NOW + DAY_MS), (BOB, 0)):
        await shelf.do(vouch(key, ends_ms))
    await shelf.do(lambda t: t.save_clock(NOW + 7, NOW + 9))
    return shelf
