"""Logging: one logger tree, rich on a terminal, plain lines elsewhere."""

import logging
import sys

from typing_extensions import override

from omniload.base.secrets import without_secrets

__all__ = ["get_logger", "set_up_logging"]

_ROOT = "omniload"


class _Discreet(logging.Formatter):
    """Shows no secret, be it in a message or in a traceback."""

    @override
    def format(self, record: logging.LogRecord) -> str:
        return without_secrets(super().format(record))


def get_logger(name: str) -> logging.Logger:
    """Return the project's logger for a module; pass ``__name__``."""
    return logging.getLogger(name if name.startswith(f"{_ROOT}.") else f"{_ROOT}.{name}")


def set_up_logging(level: str = "INFO", *, role: str = "") -> None:
    """Send the project's log to standard error; ``role`` (``planner``, ``rank 1``) opens each line.

    Only the project's own logger is touched: a library that is imported into
    somebody's program leaves the root logger alone.
    """
    handler: logging.Handler
    if sys.stderr.isatty():
        # Imported here: a quarter of the start of every command that nobody watches.
        from rich.console import Console  # noqa: PLC0415
        from rich.logging import RichHandler  # noqa: PLC0415

        handler = RichHandler(console=Console(stderr=True), show_path=False)
        handler.setFormatter(_Discreet(f"{role + ': ' if role else ''}%(message)s"))
    else:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(
            _Discreet(
                f"%(asctime)s %(levelname)s {role + ' ' if role else ''}%(name)s: %(message)s"
            )
        )
    logger = logging.getLogger(_ROOT)
    logger.handlers[:] = [handler]
    logger.setLevel(level)
    logger.propagate = False
