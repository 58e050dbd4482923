"""The crossover of the transports in a file. Free of torch, for the launcher."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

import orjson
from pydantic import Field, ValidationError

from omniload.base.config import StrictModel
from omniload.base.errors import ConfigError, IntegrityError
from omniload.base.reading import read_kept_file

__all__ = ["Crossover", "Measured", "TransportName", "last_below", "read_crossover"]

TransportName = Literal["a2a", "ag_rs"]
"""A way of moving rows between ranks."""
_MOST_BYTES = 1 << 20


class Measured(StrictModel):
    """Both transports at one number of experts per token; a layer forward and backward, on the slowest rank."""

    top_k: int = Field(ge=1, le=4096)
    seconds: dict[TransportName, Annotated[float, Field(ge=0, allow_inf_nan=False)]] = Field(
        min_length=2
    )
    """Median over repetitions."""
    sent_bytes: dict[TransportName, Annotated[int, Field(ge=0)]] = Field(min_length=2)
    """Bytes sent from one rank to others, mean over ranks."""


class Crossover(StrictModel):
    """A measurement, and the choice that ``transport: auto`` makes from it."""

    version: Literal[1] = 1
    sp: int = Field(ge=2, le=1024)
    """Ranks that share the layer."""
    tokens: int = Field(ge=1, le=1 << 24)
    """Tokens of a rank."""
    dim: int = Field(ge=2, le=65_536)
    hidden: int = Field(ge=1, le=1 << 20)
    num_experts: int = Field(ge=1, le=4096)
    rows: tuple[Measured, ...] = Field(min_length=1, max_length=4096)
    """Measurements, rising in ``top_k``."""

    @property
    def by_time(self) -> int:
        """Most experts of a token up to which ``a2a`` is faster."""
        return last_below({row.top_k: row.seconds for row in self.rows})

    @property
    def by_bytes(self) -> int:
        """Most experts of a token up to which ``a2a`` sends less."""
        return last_below({row.top_k: row.sent_bytes for row in self.rows})


def last_below(costs: Mapping[int, Mapping[TransportName, float]]) -> int:
    """Return the largest number up to which ``a2a`` costs no more at every measured number; 0 if at none."""
    found = 0
    for top_k in sorted(costs):
        # Ends at the first number at which it costs more; a cheaper one beyond that is noise of the measurement.
        if costs[top_k]["a2a"] > costs[top_k]["ag_rs"]:
            break
        found = top_k
    return found


def read_crossover(path: Path, *, sp: int) -> Crossover:
    """Read a file written by ``omniload train crossover``.

    Raises:
        ConfigError: The file does not exist, has another form, or is of another number of ranks.
    """
    try:
        data = read_kept_file(path, most_bytes=_MOST_BYTES, what="a measured crossover")
        found = Crossover.model_validate(orjson.loads(data))
    except OSError as error:
        raise ConfigError(
            f"parallel.crossover names {path}: {error.strerror}; write it with omniload train crossover"
        ) from error
    except IntegrityError as error:
        raise ConfigError(f"parallel.crossover names {error}") from error
    except (orjson.JSONDecodeError, ValidationError) as error:
        raise ConfigError(
            f"parallel.crossover names {path}, which is no measured crossover of this release; write it again with "
            "omniload train crossover"
        ) from error
    # With another number of ranks, each sends another part of its rows, and the costs are equal elsewhere.
    if found.sp != sp:
        raise ConfigError(
            f"parallel.crossover names {path}, measured with {found.sp} ranks, and sp is {sp}; measure it again"
        )
    return found
