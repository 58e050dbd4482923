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
_LEAST_JOURNAL_STEPS, _MOST_JOURNAL_STEPS = 2_048, 1 << 40
"""The least: twice as many as may be planned ahead, and as lie between two bases of a journal."""
_BUCKETS = frozenset({"s3", "gs", "gcs", "abfs", "abfss"})
"""Stores whose URLs name a bucket or a container first."""


class PipelineConfig(StrictModel):
    """Columns of a batch that each stage along ``pp`` uses; the other columns are not sent to that stage.

    A list replaces the default of its stage. ``all`` stands for every column, ``own`` for your own columns.
    """

    first: tuple[StageColumn, ...] = ("tokens", "images")
    """Columns for the stage that embeds tokens. If that stage also has the last layers, as in a V schedule, give
    ``[tokens, images, labels]``."""
    middle: tuple[StageColumn, ...] = ()
    """Columns for the stages between. Every stage also gets document bounds and positions, which is enough here."""
    last: tuple[StageColumn, ...] = ("labels", "scores", "text", "own")
    """Columns for the stage that computes the loss. ``labels`` also brings the loss mask."""


class BalanceConfig(StrictModel):
    """How rows are dealt to ranks and microbatches."""

    strategy: Name = "balanced"
    """Placement strategy: ``balanced``, ``in_order``, ``by_length``, ``hybrid`` (which places rows and images
    separately), or one that an installed distribution registers."""
    cost: Name = "quadratic"
    """Cost of a document: ``quadratic`` in its length, or a function that an installed distribution registers. Such a
    function may use the tags of sources and of samples; list the sample columns that it reads under ``batch.columns``
    too."""
    method: Literal["greedy_swap", "karmarkar_karp", "none"] = "greedy_swap"
    """Balancing algorithm; ``none`` deals rows in order."""
    linear: float = Field(default=768.0, ge=0, le=LARGEST_NUMBER, allow_inf_nan=False)
    """Cost of a token, which stands for the feed-forward part; a good value is six times the width of the model."""
    quadratic: float = Field(default=1.0, ge=0, le=LARGEST_NUMBER, allow_inf_nan=False)
    """Cost of a pair of tokens within a document, which stands for attention."""
    encoder_linear: float = Field(default=768.0, gt=0, le=LARGEST_NUMBER, allow_inf_nan=False)
    """For ``hybrid``: cost of a patch in the image encoder, which stands for its feed-forward part; a good value is six
    times the width of the encoder."""
    encoder_quadratic: float = Field(default=1.0, ge=0, le=LARGEST_NUMBER, allow_inf_nan=False)
    """For ``hybrid``: cost of a pair of patches of one image in the encoder."""
    fit_every: Count = Field(default=0, ge=0, le=10**9, exclude_if=lambda value: value == 0)
    """Steps between two fits of ``linear`` and ``quadratic`` to the compute times that ranks report by
    ``loader.observe(rows, seconds=...)``. If the declared values are off, an edit of the run replaces them from the
    next step on; the samples of a step do not change. 0 keeps the declared values. Needs ``run_dir``."""

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
    """Where the tokens of text are cached for restarts, for other runs and for other users."""

    path: Annotated[str, Field(min_length=1, max_length=4096)]
    """A folder, which several hosts may share, or the URL of a store, such as ``s3://BUCKET/FOLDER`` or ``hdfs://...``.
    A relative path starts at the mix file."""
    limit: Annotated[Bytes, Field(ge=1 << 20)] | None = None
    """Largest size of the folder, over all mixes that use it. Entries unused for a day are deleted to make room; if
    that is not enough, no more tokens are cached. Not for a store, which has expiry rules of its own."""
    key_file: str = ""
    """A secret file that only those who share the folder or store have: entries signed with its key are used, others
    are not. Without a key file, a folder serves its owner alone, and a store trusts everyone who may write to it."""

    @property
    def is_url(self) -> bool:
        """Whether a store holds it, and not a folder."""
        return "://" in self.path and not self.path.startswith("file://")

    @model_validator(mode="after")
    def _limits_are_of_folders(self) -> Self:
        if self.is_url and self.limit is not None:
            raise fault_at(
                f"limit is {self.limit} bytes and path is a store, {self.path}; set an expiry rule in that store, "
                "and leave limit out",
                "limit",
            )
        return self


class ShardCacheConfig(StrictModel):
    """Where each node caches shards of stores on its disk, for every process and run there."""

    path: Annotated[str, Field(min_length=1, max_length=4096)]
    """A folder on a disk of the node, used for this cache alone. A relative path starts at the mix file."""
    limit: Annotated[Bytes, Field(ge=1 << 20)]
    """Largest size on disk, over all processes and runs that use the folder. Shards that no process uses are evicted,
    the least recently used first. If that is not enough, no more shards are cached, and the rest is read from the
    store. If runs give different limits, the highest applies."""

    @field_validator("path")
    @classmethod
    def _is_of_the_node(cls, path: str) -> str:
        if "://" in path and not path.startswith("file://"):
            raise ValueError(
                f"found {path!r}, a store; shards are kept on a disk of the node: give a folder such as /scratch/shards"
            )
        return path


class LoaderConfig(StrictModel):
    """What a source loader may use of its machine. None of these settings changes which samples are trained on."""

    memory: Annotated[Bytes, Field(ge=1 << 20)] = 256 << 20
    """Memory for the samples of one loader: the samples read ahead, and the decoded blocks that a shuffle draws from.
    Blocks that do not fit go to the node's disk. If samples are large, such as images, fewer of them are read ahead."""
    spill: str = ""
    """Folder on that disk; by default ``TMPDIR``, else ``/var/tmp``. Avoid a tmpfs, which is memory again."""
    token_cache: TokenCacheConfig | None = None
    """Where the tokens of text are cached; by default they are not cached."""
    shard_cache: ShardCacheConfig | None = None
    """Where each node caches shards of stores; by default they are not cached. Files on the node itself are read
    directly."""
    readers: dict[Name, Annotated[int, Field(ge=1, le=64)]] = Field(default_factory=dict)
    """Number of readers by source, such as ``{web: 3}``: the loader itself and further processes (threads in the local
    runtime), which divide the units of every block among them. By default, the measured cost of a source decides, and
    later the number that keeps up with the job."""

    def faults_of_names(self, sources: Iterable[str]) -> Iterator[PydanticCustomError]:
        """Say which readers are of no source."""
        declared = sorted(sources)
        for name in sorted(self.readers.keys() - set(declared)):
            yield fault_at(
                f"{name!r} is not among sources {declared[:_SHOWN]}; declare the source or remove the line",
                *("loader", "readers", name),
            )


class ScalingConfig(StrictModel):
    """Number of source loaders on Ray. Which loader serves a source has no effect on its samples."""

    mode: Literal["off", "auto"] = "off"
    """``auto``: loaders are added, and sources move between loaders, as the load of a running job changes."""
    least: int = Field(default=1, ge=1, le=4096)
    """Smallest number of loaders, however little there is to do."""
    most: int = Field(default=8, ge=1, le=4096)
    """Largest number of loaders: those that a job starts with if ``runtime.loaders`` is 0, and those added later."""

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.least > self.most:
            raise ValueError(
                f"runtime.scaling.least is {self.least}, more than most, {self.most}; lower it or raise most"
            )
        return self


class RuntimeConfig(StrictModel):
    """How the data plane runs. None of these settings changes which samples are trained on."""

    kind: Literal["auto", "local", "ray"] = "auto"
    """``local``: threads in the trainer's process, for one rank. ``ray``: actors. ``auto``: ``local`` for one rank,
    else ``ray``."""
    prefetch_steps: int = Field(default=0, ge=0, le=1024)
    """Steps to build ahead of the slowest rank. 0 builds 4 steps; if steps are small, up to 64, about four million
    tokens in all. With images, 0 builds at most half as many, and at most what ``loader.memory`` would hold of images
    alone, but at least 2."""
    loaders: int = Field(default=0, ge=0, le=4096)
    """Number of source loader actors; 0 groups sources by their cost."""
    scaling: ScalingConfig = ScalingConfig()
    """How the number of source loaders follows their load."""
    shadows: int = Field(default=0, ge=0, le=2)
    """Shadow loaders for each source loader. They keep their sources open and take over if the loader is lost. If Ray
    has another host with a free core, shadows run there, so that host must find the same data."""
    constructors: int = Field(default=0, ge=0, le=4096)
    """Number of data constructor actors; 0 starts one for every 8 data-parallel ranks. On a single host, 0 starts at
    most one for every two cores."""
    elastic: bool = False
    """Ranks may join and leave while the run goes on. Each step is kept until every rank has taken the step after it.
    So if a rank dies in a step and the step fails, the other ranks can take that step again."""
    journal: str = ""
    """Where a run with a folder (``run_dir``) keeps its journal instead of in that folder: the URL of a store, such as
    ``s3://BUCKET/FOLDER`` or ``hdfs://...``. The journal is stored there under the name of the run's folder."""
    journal_steps: int = Field(default=0, ge=0, le=_MOST_JOURNAL_STEPS)
    """Number of last steps that the journal of a run with a folder keeps at least, such as 20_000; 0 keeps all. It has
    at most twice as many. Earlier steps can be neither audited nor compared."""
    address: str = ""
    """A running Ray to use instead of starting one: ``HOST:PORT``, or ``auto`` for the Ray of this machine."""
    lifetime: Literal["owned", "detached"] = "owned"
    """``owned``: the plane ends with the process that opened it. ``detached``: the plane outlives that process in the
    Ray of ``address``, and the next process that opens the run's folder (``run_dir``) uses the same plane."""
    keep: Annotated[Seconds, Field(ge=10)] = 1800.0
    """How long a detached plane without ranks waits for new ranks before it ends."""
    place: PlaceConfig = PlaceConfig()
    """With ``address``: the nodes of source loaders, and the resources that roles request."""
    env: EnvConfig = EnvConfig()
    """With ``address``: environment variables of the roles."""
    bind: str = ""
    """Where the Ray that omniload starts listens; by default, on loopback. For ranks on several hosts, give an
    interface (``eth0``), a network in which each host has an address (``10.0.0.0/8``), or ``auto``, the route to
    ``MASTER_ADDR``."""
    ports: str = ""
    """Ports for the Ray that omniload starts, as ``20000-20099``; any port by default."""
    metrics_port: int = Field(default=0, ge=0, le=65_535)
    """Port on which the planner's process serves Prometheus metrics at ``/metrics``; 0 for none."""
    metrics_bind: str = ""
    """Where the metrics port listens: on loopback by default; other values are as for ``bind``."""
    # At least three heartbeats, because with fewer a single late one would cost a role.
    silent_after: Annotated[Seconds, Field(ge=3)] = 10.0
    """On Ray, a role is replaced if it sends no heartbeat for this long. Heartbeats come once a second, and later on a
    busy machine. A role whose process has ended or is stopped is replaced at once."""
    stuck_after: Annotated[Seconds, Field(ge=30)] = 300.0
    """On Ray, a source loader is replaced if one call to its store takes this long, because another process may get
    through."""
    batch_timeout: Annotated[Seconds, Field(gt=0)] = 1800.0
    """How long a rank waits for a batch before an error tells it which role is late. The log reports the wait from 10 s
    on."""

    @field_validator("ports")
    @classmethod
    def _ports_are_a_range(cls, ports: str) -> str:
        parse_ports(ports)
        return ports

    @field_validator("journal_steps")
    @classmethod
    def _keeps_what_planners_read(cls, steps: int) -> int:
        if 0 < steps < _LEAST_JOURNAL_STEPS:
            raise ValueError(
                f"found {steps}; give at least {_LEAST_JOURNAL_STEPS:,}, which a planner that takes over may read, "
                "or 0 to keep all"
            )
        return steps

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
                f"runtime.address {self.address!r} names a running Ray, which listens already; leave out bind and ports"
            )
        for name, is_given in {
            "place": self.place != PlaceConfig(),
            "env": self.env != EnvConfig(),
            "lifetime": self.lifetime != "owned",
        }.items():
            if is_given and not self.address:
                raise fault_at(
                    f"{name} is for a running Ray, but runtime.address names none; set it, such as to auto, or leave "
                    f"{name} out",
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
