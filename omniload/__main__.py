"""``python -m omniload``: the ``omniload`` command, as ``torchrun -m omniload`` starts it."""

from omniload.base.cli import main

__all__: list[str] = []

if __name__ == "__main__":
    main()
