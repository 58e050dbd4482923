"""The ``omniload`` command, and ``python -m omniload``, as ``torchrun -m omniload`` starts it."""

from omniload.base.linux.interrupts import (
    end_as_interrupted,
    end_when_interrupted,
    ending_when_interrupted,
)

__all__ = ["main"]


def main() -> None:
    """Run the command line, which ends the process; SIGINT ends it without a traceback at any moment."""
    with ending_when_interrupted():
        # Imported here: it takes a tenth of a second, in which there is no command yet to be interrupted.
        from omniload.base.cli import main as run  # noqa: PLC0415
    try:
        run()
    except KeyboardInterrupt:
        end_as_interrupted()
    finally:
        end_when_interrupted()


if __name__ == "__main__":
    main()
