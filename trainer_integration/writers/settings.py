"""What a tool that draws figures is told of a run: the ``log`` section of a training file. No secret stands there.

A name that is left out is the tool's own variable (``WANDB_PROJECT``, ``MLFLOW_TRACKING_URI``, ...), or a default.
Keys and passwords are in variables alone, which the tools read themselves.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, Self, get_args
from urllib.parse import urlsplit

from pydantic import (
    Field,
    SerializerFunctionWrapHandler,
    field_validator,
    model_serializer,
    model_validator,
)

from omniload.base.config import StrictModel, checked, fault_at
from omniload.base.errors import ConfigError
from trainer_integration.writers.protocol import Kind

__all__ = ["LogConfig", "MlflowConfig", "TensorBoardConfig", "WandbConfig", "as_log"]

_Name = Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[^\x00-\x1f\x7f]+$")]
_Tag = Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[^\x00-\x1f\x7f]+$")]
_MOST_TAGS = 64
_PLACES = ("http", "https", "file", "sqlite", "databricks")
"""How a place of MLflow's runs begins."""


def _without_password(url: str | None) -> str | None:
    """Refuse a URL that holds a secret: what is configured is kept in the run's folder."""
    try:
        parts = None if url is None else urlsplit(url)
    except ValueError as error:
        raise ValueError(f"is no URL: {error}") from error
    if parts is not None and "@" in parts.netloc:
        raise ValueError(
            f"names a user for {parts.hostname}; leave user and password to the tool's own variables"
        )
    # Clients read more as a host than the standard does: ``http:NAME``, ``http:///NAME``, backslashes.
    is_odd = parts is not None and (not parts.hostname or "\\" in parts.netloc + parts.path)
    if parts is not None and is_odd and parts.scheme in {"http", "https"}:
        raise ValueError(f"names no host; write {parts.scheme}://HOST[:PORT]")
    return url


def _place_of_runs(uri: str | None) -> str | None:
    """Refuse what MLflow's client would need a database's password for, or take for something else."""
    if uri is None:
        return None
    kind, _, rest = uri.partition(":")
    if kind not in _PLACES:
        # Without slashes what stands before the colon may be a secret.
        found = f"begins with {kind!r}" if rest.startswith("//") else "begins with no SCHEME://"
        raise ValueError(
            f"{found}, none of {list(_PLACES)}; give what a database holds by 'mlflow server "
            "--backend-store-uri', and its http://HOST:PORT here"
        )
    if re.search(r"\s", uri):
        raise ValueError("holds white space; write it as %20")
    return uri


class TensorBoardConfig(StrictModel):
    """Event files for TensorBoard."""

    folder: str = Field(default="tensorboard", min_length=1)
    """Folder of the event files; a relative path starts at the run's folder."""


class WandbConfig(StrictModel):
    """Weights & Biases. The API key comes from ``WANDB_API_KEY`` or from ``wandb login``."""

    mode: Literal["offline", "online"] | None = None
    """``offline`` sends nothing; ``wandb sync`` sends it later. Default: ``WANDB_MODE``, or offline."""
    project: _Name | None = None
    """Project of the run. Default: ``WANDB_PROJECT``, or ``omniload``."""
    entity: _Name | None = None
    """User or team that owns the project. Default: ``WANDB_ENTITY``, or the user of the key."""
    name: _Name | None = None
    """Name of the run. Default: ``WANDB_NAME``, or the name of the run's folder."""
    group: _Name | None = None
    """Runs that belong together."""
    tags: tuple[_Tag, ...] = Field(default=(), max_length=_MOST_TAGS)
    """Labels of the run."""
    base_url: str | None = Field(default=None, pattern=r"^https?://[^\s]+$")
    """Address of your own server. Default: ``WANDB_BASE_URL``, or the server of W&B."""

    _no_password = field_validator("base_url")(_without_password)


class MlflowConfig(StrictModel):
    """MLflow. User, password and token come from ``MLFLOW_TRACKING_USERNAME``, ``_PASSWORD`` and ``_TOKEN``."""

    tracking_uri: str | None = None
    """Tracking server, or folder of the runs. Default: ``MLFLOW_TRACKING_URI``, or files in the run's folder."""
    experiment: _Name | None = None
    """Experiment of the run. Default: ``MLFLOW_EXPERIMENT_NAME``, or ``omniload``."""
    name: _Name | None = None
    """Name of the run. Default: ``MLFLOW_RUN_NAME``, or the name of the run's folder."""
    tags: dict[_Name, Annotated[str, Field(max_length=5000)]] = Field(
        default={}, max_length=_MOST_TAGS
    )
    """Labels of the run, by name."""

    _known_place = field_validator("tracking_uri")(_place_of_runs)
    _no_password = field_validator("tracking_uri")(_without_password)


class LogConfig(StrictModel):
    """Tools that receive the figures of every step. Each needs its extra; a list of names uses the defaults."""

    tensorboard: TensorBoardConfig | None = None
    """Event files for TensorBoard."""
    wandb: WandbConfig | None = None
    """A run of Weights & Biases."""
    mlflow: MlflowConfig | None = None
    """A run of MLflow."""

    @model_validator(mode="before")
    @classmethod
    def _names_take_defaults(cls, given: Any) -> Any:  # noqa: ANN401 -- of a file, or of a program
        if isinstance(given, list | tuple):
            for i, name in enumerate(given):
                if name not in get_args(Kind):
                    raise fault_at(_unknown(name), i)
            return {name: {} for name in given}
        if isinstance(given, dict):
            # ``wandb:`` alone in a file is null, and means the tool.
            return {name: {} if value is None else value for name, value in given.items()}
        return given

    @model_serializer(mode="wrap")
    def _only_wanted(self, inner: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out the tools that are not wanted: a null would mean one with its defaults."""
        return {name: value for name, value in inner(self).items() if value is not None}

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """The tools that are wanted."""
        return tuple(kind for kind in get_args(Kind) if getattr(self, kind) is not None)

    @classmethod
    def of(cls, *kinds: Kind) -> Self:
        """Return tools with their defaults."""
        return cls.model_validate(list(kinds))


def as_log(log: LogConfig | Sequence[str] | Mapping[str, object]) -> LogConfig:
    """Return what a program gives: names of tools, or their settings by name.

    Raises:
        ConfigError: A tool or one of its settings is not known, or is refused.
    """
    if isinstance(log, LogConfig):
        return log
    if isinstance(log, Mapping):
        return checked(log, LogConfig, name="log")
    for name in log:
        if name not in get_args(Kind):
            raise ConfigError(_unknown(name))
    return LogConfig.model_validate(list(log))


def _unknown(name: object) -> str:
    return f"writer {name!r:.60} is not known; choose among {list(get_args(Kind))}"
