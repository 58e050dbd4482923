"""Options that several verbs of ``omniload env`` share, as values."""

import errno
import functools
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import click

from omniload.base.errors import StateError
from snapshot.env.format.checks import Limits
from snapshot.env.key.keys import Installation
from snapshot.env.node.cache import CACHE_VARIABLE
from snapshot.env.target.environment import Environment, active_environment

__all__ = ["EnvironmentOptions", "Function", "environment_options", "store_option"]

Function = TypeVar("Function", bound=Callable[..., None])


def store_option(*, required: bool) -> Callable[[Function], Function]:
    """Return the option that names a store."""
    return click.option(
        "-o",
        "--store",
        "url",
        envvar="OMNILOAD_ENV_STORE",
        required=required,
        help="Directory, hdfs://, s3://, gs:// or any fsspec URL. [env OMNILOAD_ENV_STORE]",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentOptions:
    """Options that say which environment and which inputs are meant."""

    environment: Environment
    image: str
    files: tuple[str, ...]
    variables: tuple[str, ...]
    limits: Limits

    def installation(self, words: tuple[str, ...]) -> Installation:
        """Return the command with the inputs declared beside it."""
        here = str(Path.cwd())
        return Installation(words, here, dict(os.environ), self.files, self.variables)


def environment_options(function: Function) -> Function:
    """Add the options of ``EnvironmentOptions`` to a command, which gets them as one value."""

    @click.option(
        "--python", help="Interpreter or root of the environment; the active one if not given."
    )
    @click.option("--target", "targets", multiple=True, help="One more directory to capture.")
    @click.option(
        "--base-image",
        "image",
        envvar="OMNILOAD_BASE_IMAGE",
        default="",
        help="Digest of the image below. [env OMNILOAD_BASE_IMAGE]",
    )
    @click.option("--input", "files", multiple=True, help="File or folder the command reads.")
    @click.option("--input-env", "variables", multiple=True, help="Variable the command reads.")
    @click.option("--max-bytes", default=1 << 40, show_default=True, help="Refuse more.")
    @click.option("--case-pairs", is_flag=True, help="Allow paths that differ by case only.")
    @functools.wraps(function)
    def command_of(**given: Any) -> None:  # noqa: ANN401
        options = EnvironmentOptions(
            environment=active_environment(given.pop("python"), given.pop("targets")),
            limits=Limits(raw_bytes=given.pop("max_bytes"), case_pairs=given.pop("case_pairs")),
            **{name: given.pop(name) for name in ("image", "files", "variables")},
        )
        try:
            function(options, **given)
        except OSError as error:
            raise _fault(error) from error

    return command_of  # type: ignore[return-value]


def _fault(error: OSError) -> StateError:
    """Return the error for a system call that failed in the environment or the node cache."""
    place = error.filename or "a file"
    if error.errno in {errno.ENOSPC, errno.EDQUOT}:
        remedy = f"free some, or name a node cache on another disk in {CACHE_VARIABLE}"
        return StateError(f"{place}: no space is left; {remedy}; the environment is as it was")
    if error.errno in {errno.EACCES, errno.EPERM, errno.EROFS}:
        remedy = f"use an environment and a node cache ({CACHE_VARIABLE}) of your own"
        return StateError(f"{place}: user {os.geteuid()} may not: {error.strerror}; {remedy}")
    return StateError(f"{place}: {error.strerror}")
