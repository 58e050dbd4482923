"""The part of the data-mix file that changes nothing of what is trained on."""

import ipaddress
import re
from collections.abc import Iterable, Iterator
from typing import Annotated, Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from omniload.base.config import StrictModel, fault_at
from omniload.base.settings.quantities import Bytes, Count, Seconds
from omniload.base.units import parse_ports
from omniload.mix.columns import WholeColumn
from omniload.mix.schema.places import CURRENT, EnvConfig, PlaceConfig
from omniload.mix.schema.splits import Name
from omniload.mix.schema.weights import LARGEST_NUMBER

__all__ = [
    "BalanceConfig",
    "LoaderConfig",
    "PipelineConfig",
    "RuntimeConfig",
    "ScalingConfig",
    "ShardCacheConfig",
    "TokenCacheConfig",
]

StageColumn = Literal["tokens", "labels", "images", "own", "all"] | WholeColumn
"""What a stage of a pipeline may have of a batch beside bounds and positions."""
_SHOWN = 12
"""Names that a message lists."""
_HOST_AND_PORT = re.compile(r"(?:[A-Za-z0-9_.-]{1,253}|\[[0-9A-Fa-f:.]{2,45}\]):([0-9]{1,5})")
_INTERFACE = re.compile(r"[^\s/:]{1,15}")
"""What the kernel takes for the name of an interface."""
_NUMBERS = re.compile(r"[0-9./]+")
_LARGEST_PORT = 65_535
_BUCKETS = frozenset({"s3", "gs", "gcs", "abfs", "abfss"})
"""Stores whose URLs name a bucket or a container first."""


class PipelineConfig(StrictModel):
    """Columns of a batch that each stage along ``pp`` uses; others are not sent to it.

    A list takes the place of that stage's own; ``all`` stands for every column, ``own`` for the columns of yours.
    """

    first: tuple[StageColumn, ...] = ("tokens", "images")
    """Of the stage that embeds tokens. Of one that has the last layers too, as of a V, ``[tokens, images, labels]``."""
    middle: tuple[StageColumn, ...] = ()
    """Of stages between: bounds of documents and positions, which every stage has, are enough."""
    last: tuple[StageColumn, ...] = ("labels", "scores", "text", "own")
    """Of the stage that has the loss. ``labels`` brings what leaves labels out, too."""


class BalanceConfig(StrictModel):
    """How rows are dealt to ranks and microbatches."""

    strategy: Name = "balanced"
    """Strategy: ``balanced``, ``in_order``, ``by_length``, ``hybrid`` (rows, and images apart from them), or one that
    an installed distribution registers."""
    cost: Name = "quadratic"
    """Cost of a document: ``quadratic`` of its length, or a function that an installed distribution registers. One of
    yours may go by tags of sources and of samples; what it reads of samples stands under ``batch.columns`` too."""
    method: Literal["greedy_swap", "karmarkar_karp", "none"] = "greedy_swap"
    """Balancing algorithm; ``none`` deals rows in order."""
    linear: float = Field(default=768.0, ge=0, le=LARGEST_NUMBER, allow_inf_nan=False)
    """Cost of a token; six times the width of the model is its feed-forward part."""
    quadratic: float = Field(default=1.0, ge=0, le=LARGEST_NUMBER, allow_inf_nan=False)
    """Cost of a token pair within a document: attention."""
    encoder_linear: float = Field(default=768.0, gt=0, le=LARGEST_NUMBER, allow_inf_nan=False)
    """Cost of a patch in the encoder of images, for ``hybrid``; six times its width is its feed-forward part."""
    encoder_quadratic: float = Field(default=1.0, ge=0, le=LARGEST_NUMBER, allow_inf_nan=False)
    """Cost of a pair of patches of one image there."""
    fit_every: Count = Field(default=0, ge=0, le=10**9, exclude_if=lambda value: value == 0)
    """Steps between two fits of ``linear`` and ``quadratic`` to the compute times that ranks report by
    ``loader.observe(rows, seconds=...)``: where they are off, an edit of the run has others from the next step on. With
    0 what is declared holds. It needs ``run_dir``; the samples of a step stay."""

    @model_validator(mode="after")
    def _some_cost(self) -> Self:
        if self.linear == 0 and self.quadratic == 0:
            raise fault_at("linear and quadratic are both 0; give a cost to balance", "linear")
        if self.fit_every and self.cost != "quadratic":
            raise fault_at(
                f"fit_every is {self.fit_every}, and cost {self.cost!r}; the cost 'quadratic' alone has coefficients "
                "to fit, leave fit_every out",
                "fit_every",
            )
        return self


class TokenCacheConfig(StrictModel):
    """Where tokens of text are kept once they were made, for restarts, other runs and other people."""

    path: Annotated[str, Field(min_length=1, max_length=4096)]
    """A folder, which hosts may share, or ``s3://BUCKET/FOLDER``, ``hdfs://...`` or another URL of a store. A relative
    path starts at the mix file."""
    limit: Annotated[Bytes, Field(ge=1 << 20)] | None = None
    """Most bytes of a folder, for all mixes that use it; what nobody has used for a day makes room, then nothing more
    is kept. Not of a store, which has rules of its own."""
    key_file: str = ""
    """File that those who share a folder or a store have, and nobody else: entries that its holders wrote are used,
    others are not. Without one, a folder serves its owner alone, and a store everyone who may write to it."""

    @property
    def is_url(self) -> bool:
        """Whether a store holds it, and not a folder."""
        return "://" in self.path and not self.path.startswith("file://")

    @model_validator(mode="after")
    def _limits_are_of_folders(self) -> Self:
        if self.is_url and self.limit is not None:
            raise fault_at(
                f"limit is {self.limit} bytes and path is a store, {self.path}; set a rule of that store by which old "
                "objects go, and leave limit out",
                "limit",
            )
        return self


class ShardCacheConfig(StrictModel):
    """Where shards of stores are kept on the disk of each node once they were read, for every process and run there."""

    path: Annotated[str, Field(min_length=1, max_length=4096)]
    """A folder on a disk of the node, for this cache alone. A relative path starts at the mix file."""
    limit: Annotated[Bytes, Field(ge=1 << 20)]
    """Most bytes that it takes of the disk, for all processes and runs that use the folder. Shards that none of them
    uses make room, least recently used first; then nothing more is kept, and the rest is read from its store. Of
    processes with several limits the highest counts for what they use."""

    @field_validator("path")
    @classmethod
    def _is_of_the_node(cls, path: str) -> str:
        if "://" in path and not path.startswith("file://"):
            raise ValueError(
                f"found {path!r}, a store; shards are kept on a disk of the node: give a folder such as /scratch/shards"
            )
        return path


class LoaderConfig(StrictModel):
    """What a source loader may take of its machine; none of this changes what is trained on."""

    memory: Annotated[Bytes, Field(ge=1 << 20)] = 256 << 20
    """What one loader's samples may take of memory: those read ahead, and the decoded blocks that a shuffle draws
    from. Blocks over it lie on the node's disk; of heavy samples, such as images, fewer are read ahead."""
    spill: str = ""
    """Folder of that disk; by default ``TMPDIR``, else ``/var/tmp``. On a tmpfs it would be memory again."""
    token_cache: TokenCacheConfig | None = None
    """Where tokens of text are kept once they were made; nowhere by default."""
    shard_cache: ShardCacheConfig | None = None
    """Where shards of stores are kept on each node once they were read; nowhere by default. Files of the node itself
    are read as they are."""
    readers: dict[Name, Annotated[int, Field(ge=1, le=64)]] = Field(default_factory=dict)
    """How many read a source at once, by its name, such as ``{web: 3}``: its loader, and processes beside it (threads
    in the local runtime). Each has its units of every block. By default as many as its measured cost asks for, and then
    as many as keep up while the job runs."""

    def faults_of_names(self, sources: Iterable[str]) -> Iterator[PydanticCustomError]:
        """Say which readers are of no source."""
        declared = sorted(sources)
        for name in sorted(self.readers.keys() - set(declared)):
            yield fault_at(
                f"{name!r} is not among sources {declared[:_SHOWN]}; declare the source or remove the line",
                *("loader", "readers", name),
            )


class ScalingConfig(StrictModel):
    """How many source loaders there are on Ray; which of them serves a source changes nothing of what it gives."""

    mode: Literal["off", "auto"] = "off"
    """``auto``: loaders are added, and sources move between them, as the load of a running job changes."""
    least: int = Field(default=1, ge=1, le=4096)
    """Loaders that stay, however little there is to do."""
    most: int = Field(default=8, ge=1, le=4096)
    """Most loaders: of those that a job starts with where ``runtime.loaders`` is 0, and of those added later."""

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.least > self.most:
            raise ValueError(
                f"runtime.scaling.least is {self.least}, more than most, {self.most}; lower it or raise most"
            )
        return self


class RuntimeConfig(StrictModel):
    """How the data plane runs; none of this changes what is trained on."""

    kind: Literal["auto", "local", "ray"] = "auto"
    """``local``: threads in the trainer's process, one rank. ``ray``: actors. ``auto``: local for one rank."""
    prefetch_steps: int = Field(default=0, ge=0, le=1024)
    """Steps built ahead of the slowest rank; 0 builds 4, and of small steps up to 64, about four million tokens. With
    images it builds half as many at most, and no more than ``loader.memory`` would hold of images alone; 2 at least."""
    loaders: int = Field(default=0, ge=0, le=4096)
    """Source loader actors; 0 groups sources by their cost."""
    scaling: ScalingConfig = ScalingConfig()
    """How the number of source loaders follows their load."""
    shadows: int = Field(default=0, ge=0, le=2)
    """Processes that stand by for each source loader, their sources open, and take over when it is lost; on another
    host than the loader where Ray has one with a free core, which must find the same data."""
    constructors: int = Field(default=0, ge=0, le=4096)
    """Data constructor actors; 0 starts one for every 8 data-parallel ranks, on one host one for every two cores at
    most."""
    elastic: bool = False
    """Ranks may join and leave while the run goes on. Each step is held until every rank has taken the one after it, so
    that ranks whose step came to nothing, as another died in it, take it again."""
    journal: str = ""
    """Where a run with a folder (``run_dir``) keeps its journal, in place of that folder: ``s3://BUCKET/FOLDER``, ``hdfs://...``
    or another URL of a store. It lies there under the name of the run's folder."""
    address: str = ""
    """A Ray that runs already, to be used in place of one of our own: ``HOST:PORT``, or ``auto`` for this machine's."""
    lifetime: Literal["owned", "detached"] = "owned"
    """``owned``: the plane ends with the process that opened it. ``detached``: it outlives that one in the Ray of
    ``address``, and whoever opens the run's folder (``run_dir``) next goes on with it."""
    keep: Annotated[Seconds, Field(ge=10)] = 1800.0
    """How long a detached plane waits for ranks once it has none, before it ends by itself."""
    place: PlaceConfig = PlaceConfig()
    """On which of its nodes source loaders are, and what roles ask of it."""
    env: EnvConfig = EnvConfig()
    """Variables of the environment that roles have there."""
    bind: str = ""
    """Where the Ray of our own listens: loopback by default; for ranks on several hosts an interface (``eth0``),
    a network (``10.0.0.0/8``) of which each host has an address, or ``auto``, the way to ``MASTER_ADDR``."""
    ports: str = ""
    """Ports that it listens on, as ``20000-20099``; any by default."""
    metrics_port: int = Field(default=0, ge=0, le=65_535)
    """Port where the planner's process answers Prometheus at ``/metrics``; 0 for none."""
    metrics_bind: str = ""
    """Where it does: loopback by default; otherwise as ``bind``."""
    # At least three heartbeats, because with fewer a single late one would cost a role.
    silent_after: Annotated[Seconds, Field(ge=3)] = 10.0
    """A role on Ray that gave no heartbeat for so long is replaced; they come once a second, and late on a busy
    machine. One whose process has ended or is stopped is replaced at once."""
    stuck_after: Annotated[Seconds, Field(ge=30)] = 300.0
    """A source loader on Ray is replaced once a call to its store has taken so long: another may get through."""
    batch_timeout: Annotated[Seconds, Field(gt=0)] = 1800.0
    """Longest that a rank waits for a batch before it is told who holds it up; it is logged from 10 s on."""

    @field_validator("ports")
    @classmethod
    def _ports_are_a_range(cls, ports: str) -> str:
        parse_ports(ports)
        return ports

    @field_validator("journal")
    @classmethod
    def _journal_is_a_url(cls, journal: str) -> str:
        if not journal:
            return journal
        try:
            parts = urlsplit(journal)
        except ValueError:
            # The URL has brackets that do not close, or that contain no address; Python's message would not help its
            # author.
            parts = urlsplit("")
        # The host follows a user and a password, if there are any.
        host = parts.netloc.rpartition("@")[2]
        wrong = ""
        if "://" not in journal or parts.scheme in {"", "mem"}:
            wrong = "no URL of a store that outlives the run; give one such as s3://BUCKET/FOLDER or file:///FOLDER"
        elif parts.scheme == "file" and (host or not parts.path.strip("/")):
            wrong = "no folder of this machine; give its whole path, as file:///FOLDER"
        elif parts.scheme in _BUCKETS and not host:
            wrong = f"which names no bucket; give one, as {parts.scheme}://BUCKET/FOLDER"
        if wrong:
            raise ValueError(f"found {journal!r}, {wrong}")
        return journal

    @field_validator("address")
    @classmethod
    def _address_is_of_a_ray(cls, address: str) -> str:
        found = _HOST_AND_PORT.fullmatch(address)
        if address in {"", "auto"} or (found and 0 < int(found[1]) <= _LARGEST_PORT):
            return address
        raise ValueError(
            f"found {address!r}; give the head of a Ray that runs, as HOST:PORT, or auto for this machine's"
        )

    @field_validator("bind", "metrics_bind")
    @classmethod
    def _is_where_one_listens(cls, bind: str) -> str:
        if bind in {"", "auto"} or _is_network(bind):
            return bind
        # Almost any word may be an interface, but digits and dots alone are an address with a typo.
        if _INTERFACE.fullmatch(bind) and not _NUMBERS.fullmatch(bind):
            return bind
        raise ValueError(
            f"found {bind!r}, neither an interface (eth0), a network of IPv4 (10.0.0.0/8) nor an address; give one of "
            "them, or auto"
        )

    @model_validator(mode="after")
    def _one_ray(self) -> Self:
        if self.address and self.kind == "local":
            raise ValueError(
                f"runtime.address {self.address!r} names a Ray, and runtime.kind is local; use kind: ray"
            )
        if self.address and (self.bind or self.ports):
            raise ValueError(
                f"runtime.address {self.address!r} names a Ray that listens where it was told; leave out bind and ports"
            )
        for name, is_given in {
            "place": self.place != PlaceConfig(),
            "env": self.env != EnvConfig(),
            "lifetime": self.lifetime != "owned",
        }.items():
            if is_given and not self.address:
                raise fault_at(
                    f"{name} is of a Ray that runs already, and runtime.address names none; give it, such as auto, or "
                    f"leave {name} out",
                    name,
                )
        if self.lifetime == "detached" and CURRENT in self.place.groups():
            raise fault_at(
                f"a placement_group of place is {CURRENT!r}, which ends with the job, and lifetime is detached; name a "
                "group that outlives it, or leave one of them out",
                "place",
            )
        return self


def _is_network(text: str) -> bool:
    try:
        ipaddress.IPv4Network(text, strict=False)
    except ValueError:
        return False
    return True
