"""Logging: one logger tree, rich on a terminal, plain lines elsewhere."""

import logging
import sys

__all__ = ["get_logger", "set_up_logging"]

_ROOT = "omniload"


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
        handler.setFormatter(logging.Formatter(f"{role + ': ' if role else ''}%(message)s"))
    else:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(
            logging.Formatter(
                f"%(asctime)s %(levelname)s {role + ' ' if role else ''}%(name)s: %(message)s"
            )
        )
    logger = logging.getLogger(_ROOT)
    logger.handlers[:] = [handler]
    logger.setLevel(level)
    logger.propagate = False
