"""Averages of what a training run logs."""

from collections import defaultdict


class Means:
    """Averages of the values added since the last `take`."""

    def __init__(self) -> None:
        self._values: dict[str, list[float]] = defaultdict(list)

    def __bool__(self) -> bool:
        return bool(self._values)

    def add(self, **values: float) -> None:
        for name, value in values.items():
            self._values[name].append(value)

    def take(self) -> dict[str, float]:
        means = {name: sum(values) / len(values) for name, values in self._values.items()}
        self._values.clear()
        return means
