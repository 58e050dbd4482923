"""What loaders say that they have done, as rates: cores and tokens a second of each source."""

from collections.abc import Mapping

__all__ = ["WorkMeter"]


class WorkMeter:
    """Adds up what each life of each loader has done for its sources, and says how fast it grows."""

    def __init__(self) -> None:
        self._last: dict[tuple[str, int], tuple[float, int]] = {}
        self._done: dict[int, tuple[float, int]] = {}
        self._since_s: float | None = None

    def see(self, loader: str, work: Mapping[int, tuple[float, int]]) -> None:
        """Take in what one life of a loader has done so far: processor seconds and tokens of each source."""
        for source, (busy_s, tokens) in work.items():
            last_s, last_tokens = self._last.get((loader, source), (0.0, 0))
            done_s, done_tokens = self._done.get(source, (0.0, 0))
            self._done[source] = done_s + busy_s - last_s, done_tokens + tokens - last_tokens
            self._last[loader, source] = busy_s, tokens

    def since_last(self, now_s: float) -> tuple[dict[int, float], dict[int, float]]:
        """Return cores and tokens a second of each source since this was asked last; nothing the first time."""
        since_s, done = self._since_s, self._done
        self._since_s, self._done = now_s, {}
        passed_s = 0.0 if since_s is None else now_s - since_s
        if passed_s <= 0:
            return {}, {}
        return (
            {source: busy_s / passed_s for source, (busy_s, _) in done.items()},
            {source: tokens / passed_s for source, (_, tokens) in done.items()},
        )
