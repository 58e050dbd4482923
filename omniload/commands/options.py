"""Options that several commands share."""

from pathlib import Path
from typing import Any

import click
from typing_extensions import override

from omniload.base.cli import WAIT
from omniload.base.units import parse_bytes, parse_count

__all__ = [
    "BYTES",
    "COUNT",
    "cache_option",
    "dp_option",
    "json_option",
    "mix_argument",
    "run_argument",
    "store_option",
]


class _Bytes(click.ParamType[int]):
    """A size such as ``12MiB``."""

    name = "size"

    @override
    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            size = parse_bytes(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)
        assert isinstance(size, int), f"a size is a whole number, not {size!r}"
        return size


BYTES = _Bytes()
"""Type of an option that takes a size."""


class _Count(click.ParamType[int]):
    """A count such as ``32M``."""

    name = "count"

    @override
    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            count = int(str(parse_count(value)))
        except ValueError as error:
            self.fail(str(error), param, ctx)
        if count < 1:
            self.fail(f"{value!r} is below 1; give a count such as 32M", param, ctx)
        return count


COUNT = _Count()
"""Type of an option that takes a count."""


mix_argument = click.argument("file", type=click.Path(path_type=Path))
"""The mix file."""

run_argument = click.argument("run", type=click.Path(path_type=Path))
"""Folder of a run."""

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")
"""Machine-readable output."""

dp_option = click.option(
    "--dp",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Data-parallel ranks that share a step.",
)
"""Ranks to plan for."""

store_option = click.option(
    "--store-timeout",
    type=WAIT,
    default="30s",
    show_default=True,
    help="How long to wait for the first answer of a store, such as 2m; listing it may take longer.",
)
"""Time limit of commands that ask the stores of sources before anything else."""

cache_option = click.option(
    "--cache-dir",
    type=click.Path(path_type=Path),
    help="Folder for the indexes of sources; by default, a folder for this mix file under ~/.cache.",
)
"""Folder of indexes."""
