"""Prompts of a feed, by the order in which they are taken: of streams and mixtures."""

from collections.abc import Mapping
from typing import Any

from upweight.data.stream.feed import RowFeed

KEPT = 4096  # rows that rollouts may still refer to; a checkpoint holds them


class FedPrompts:
    """Rows and their order at once: a row has the number of rows that were taken before it."""

    def __init__(self, feed: RowFeed, epoch: int) -> None:
        self.feed, self.epoch = feed, epoch  # rows of an epoch, or of the run where that is not known
        self.position = 0
        self._rows: dict[int, Mapping[str, Any]] = {}

    def __len__(self) -> int:
        return self.epoch

    def __getitem__(self, number: int, /) -> Mapping[str, Any]:
        return self._rows[number]

    def take(self, count: int, step: int = 0) -> list[int]:
        """Take the next rows of the feed and return their numbers; `step` chooses the weights of a mixture."""
        first = self.position
        for fed in self.feed.take(count, step):
            self._rows[self.position] = fed.row
            self.position += 1
        for number in [number for number in self._rows if number < self.position - max(KEPT, count)]:
            del self._rows[number]
        return list(range(first, self.position))

    def state(self) -> dict[str, Any]:
        """Return where it stands, as JSON values, with the rows that it keeps."""
        return {"position": self.position, "feed": self.feed.state(), "rows": self._rows}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go to where it stood."""
        self.position = state["position"]
        self._rows = {int(number): row for number, row in state["rows"].items()}
        self.feed.restore(state["feed"])
