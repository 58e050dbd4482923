"""Figures that one role keeps of itself: what it has counted, and what it has at present."""

import threading

__all__ = ["Figures"]


class Figures:
    """Numbers by name; names of what only grows end in ``_total``. Safe to call from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: dict[str, float] = {}

    def count(self, name: str, by: float = 1.0) -> None:
        """Add to a figure."""
        with self._lock:
            self._values[name] = self._values.get(name, 0.0) + by

    def note(self, **values: float) -> None:
        """Set figures to what they are now."""
        with self._lock:
            self._values.update(values)

    def read(self) -> dict[str, float]:
        """Return all of them."""
        with self._lock:
            return dict(self._values)
