"""Two homes and a relay between them: whatever the network does, all mail arrives once."""

import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Final

import pytest

from lab.homes import Homes
from lab.network import HOME, INTERNET, Network

CUT_S: Final = 10.0
DOWN_S: Final = 3.0

Scene = Callable[[Homes], None]


def on_one_lan(homes: Homes) -> None:
    with homes.writing():
        homes.some_arrive()
    assert homes.ways() == {"direct"}
    homes.check()


def across_homes(homes: Homes) -> None:
    homes.take_laptop_away()
    with homes.writing():
        homes.some_arrive()
    assert homes.ways() == {"relay"}
    homes.check()


def a_laptop_that_roams(homes: Homes) -> None:
    homes.take_laptop_away()
    with homes.writing():
        homes.some_arrive()
        homes.network.readdress("laptop", f"{HOME}.77")
        homes.some_arrive()
        homes.network.move("laptop", "home-b", f"{HOME}.78")
        homes.some_arrive("direct")
    homes.check()


def a_silent_cut_on_the_lan(homes: Homes) -> None:
    with homes.writing():
        homes.some_arrive("direct")
        homes.network.cut("laptop")
        homes.none_arrive(CUT_S)
        homes.network.mend("laptop")
        homes.some_arrive()
    homes.check()


def a_silent_cut_between_homes(homes: Homes) -> None:
    homes.take_laptop_away()
    with homes.writing():
        homes.some_arrive()
        homes.network.cut("laptop")
        homes.none_arrive(CUT_S)
        homes.network.mend("laptop")
        homes.some_arrive()
        # The router forgets its connections, and nobody says so.
        homes.network.readdress_home("home-a", f"{INTERNET}.77")
        homes.some_arrive()
    homes.check()


def loss_and_delay(homes: Homes) -> None:
    homes.network.spoil("laptop", delay_ms=40, loss_percent=4)
    with homes.writing():
        homes.some_arrive("direct")
        homes.take_laptop_away()
        homes.some_arrive("relay")
    homes.check()


def a_relay_that_restarts(homes: Homes) -> None:
    homes.take_laptop_away()
    with homes.writing():
        homes.some_arrive()
        homes.relay.kill()
        time.sleep(DOWN_S)
        homes.relay.restart()
        homes.some_arrive()
        homes.relay.stop()
        homes.relay.restart()
        homes.some_arrive()
    homes.check()


SCENES: Final[tuple[Scene, ...]] = (
    on_one_lan,
    across_homes,
    a_laptop_that_roams,
    a_silent_cut_on_the_lan,
    a_silent_cut_between_homes,
    loss_and_delay,
    a_relay_that_restarts,
)


def play(scene: Scene, folder: Path) -> None:
    with Network() as network, Homes(network, folder) as homes:
        scene(homes)


@pytest.fixture(scope="module")
def played(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Mapping[str, Future[None]]]:
    """All scenes that are asked for, at once: by relay, word of what is stored takes a minute."""
    asked = [
        scene for scene in SCENES if any(scene.__name__ in each.name for each in _items(request))
    ]
    with ThreadPoolExecutor(len(SCENES)) as threads:
        yield {
            scene.__name__: threads.submit(play, scene, tmp_path_factory.mktemp(scene.__name__))
            for scene in asked
        }


def _items(request: pytest.FixtureRequest) -> list[pytest.Item]:
    return [each for each in request.session.items if each.path == request.path]


@pytest.mark.parametrize("scene", [scene.__name__ for scene in SCENES])
def test_all_mail_arrives_once_and_both_sides_agree(
    scene: str, played: Mapping[str, Future[None]]
) -> None:
    played[scene].result()
