"""Whether the relay is alive and ready, and which part is not."""

from collections.abc import Callable, Sequence


class Health:
    """Named checks, each true while its part works; `/readyz` is green when all are."""

    def __init__(self) -> None:
        self._parts: dict[str, Callable[[], bool]] = {}

    def watch(self, part: str, works: Callable[[], bool]) -> None:
        """Ask `works` about `part` whenever readiness is asked for."""
        self._parts[part] = works

    def failing(self) -> Sequence[str]:
        """The parts that do not work now."""
        return [part for part, works in self._parts.items() if not works()]

    @property
    def ready(self) -> bool:
        """Whether all parts work."""
        return not self.failing()
