"""The part of the data-mix file that changes nothing of what is trained on."""

import ipaddress
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Annotated, Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator
from pydantic_core import PydanticCustomError
from typing_extensions import override

from omniload.base.config import StrictModel, fault_at
from omniload.base.errors import ConfigError
from omniload.base.settings.quantities import Bytes, Seconds
from omniload.base.units import parse_ports
from omniload.mix.schema.splits import Name

__all__ = [
    "AsksConfig",
    "EnvConfig",
    "LoaderConfig",
    "LoaderPlaceConfig",
    "PlaceConfig",
    "RuntimeConfig",
    "ScalingConfig",
    "ShardCacheConfig",
    "TokenCacheConfig",
]

Text = Annotated[str, Field(min_length=1, max_length=253)]
"""A word that Ray was given where its nodes were started."""
_SHOWN = 12
"""Names that a message lists."""
_HOST_AND_PORT = re.compile(r"(?:[A-Za-z0-9_.-]{1,253}|\[[0-9A-Fa-f:.]{2,45}\]):([0-9]{1,5})")
_INTERFACE = re.compile(r"[^\s/:]{1,15}")
"""What the kernel takes for the name of an interface."""
_NUMBERS = re.compile(r"[0-9./]+")
_LARGEST_PORT = 65_535
_RAYS_OWN = {
    "CPU": "give cpus",
    "memory": "give memory",
    "GPU": "no role computes on one: leave it out",
    "object_store_memory": "what is in the object store is counted there: leave it out",
}
"""Resources that every node has, and what is said in their place."""
_OF_CODE = ("LD_", "PYTHON", "RAY_")
"""What the names of variables begin with that a mix file may not set: it names no code."""
_SECRET = re.compile("SECRET|TOKEN|PASSW|CREDENTIAL|_KEY$|_KEY_", re.IGNORECASE)
_BUCKETS = frozenset({"s3", "gs", "gcs", "abfs", "abfss"})
"""Stores whose URLs name a bucket or a container first."""


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


class AsksConfig(StrictModel):
    """What each process of a role asks of a Ray that runs already, which starts it where so much is free."""

    cpus: Annotated[float, Field(ge=0, le=4096)] = 0.0
    """Cores of Ray's count; 0 asks for none, and takes what is there."""
    memory: Bytes = 0
    """Memory of Ray's count; 0 asks for none. Ray counts it and bounds nobody by it."""

    def asked(self) -> dict[str, float]:
        """Return the amount of each resource of Ray that is asked for, by the names that nodes have it under."""
        each = {"CPU": self.cpus, "memory": float(self.memory)}
        return {name: amount for name, amount in each.items() if amount}


class LoaderPlaceConfig(AsksConfig):
    """Nodes that source loaders and their shadows are on: those for which all of this holds."""

    without_gpu: bool = False
    """Only nodes that have no GPU by Ray's count."""
    labels: dict[Text, str] = Field(default_factory=dict)
    """Labels of the node, each with this value, such as ``{ray.io/node-group: readers}`` of KubeRay."""
    resources: dict[Text, Annotated[float, Field(gt=0, le=1e9)]] = Field(default_factory=dict)
    """Resources of the user's own that each loader asks for, such as ``{readers: 1}``: only nodes that have them."""

    @field_validator("resources")
    @classmethod
    def _are_the_users_own(cls, resources: dict[str, float]) -> dict[str, float]:
        for name in sorted(resources.keys() & _RAYS_OWN.keys()):
            raise ValueError(f"found {name!r}, a resource of Ray's own; {_RAYS_OWN[name]}")
        return resources

    @override
    def asked(self) -> dict[str, float]:
        return super().asked() | self.resources


class PlaceConfig(StrictModel):
    """Where roles are in a Ray that runs already, and what they ask of it; none of this changes what is trained on."""

    loaders: LoaderPlaceConfig | None = None
    """Source loaders are spread over such nodes, each shadow on another one than its loader where there are several. By
    default they are on the opener's node. Their sources must be there under the same paths."""
    planner: AsksConfig = AsksConfig()
    """What the planner asks for; it is on the opener's node."""
    constructors: AsksConfig = AsksConfig()
    """What each data constructor asks for; they are beside their ranks."""
    wait: Annotated[Seconds, Field(gt=0)] = 300.0
    """Longest that opening waits for nodes with room for all of them, before it says what is missing where."""


Variable = Annotated[str, Field(min_length=1, max_length=128, pattern="^[A-Za-z_][A-Za-z0-9_]*$")]


class EnvConfig(StrictModel):
    """Variables of the environment that roles have in a Ray that runs already, beside those of its nodes."""

    set: dict[Variable, str] = Field(default_factory=dict)
    """Variables of all roles, as Ray's ``runtime_env`` sets them before their processes begin. Ray shows them to
    whoever may look at its jobs, and the run's folder keeps them: no secrets."""
    pass_on: list[Variable] = Field(default_factory=list, max_length=256)
    """Names of variables that the process which opens the plane has, such as ``AWS_SECRET_ACCESS_KEY``: the planner and
    source loaders have them too. No value is written to a file, a log or Ray's tables."""

    @field_validator("set", "pass_on")
    @classmethod
    def _name_no_code(cls, named: Collection[str]) -> Collection[str]:
        for name in named:
            if name.startswith(_OF_CODE):
                raise ValueError(
                    f"found {name!r}, which says what code a process runs, or is Ray's own; set it where the nodes of "
                    "Ray are started"
                )
        return named

    @field_validator("set")
    @classmethod
    def _holds_no_secret(cls, variables: dict[str, str]) -> dict[str, str]:
        for name in variables:
            if _SECRET.search(name):
                raise ValueError(
                    f"found {name!r}, which is a secret by its name; set it where rank 0 is started and name it in "
                    "pass_on"
                )
        return variables

    def passed_on(self, environment: Mapping[str, str]) -> dict[str, str]:
        """Return the variables that roles are handed of a process's environment.

        Raises:
            ConfigError: The process has not one of them.
        """
        missing = [name for name in self.pass_on if name not in environment]
        if missing:
            raise ConfigError(
                f"runtime.env.pass_on names {missing[:_SHOWN]}, which the process that opens the data plane has not; "
                "set them where it is started, or leave them out"
            )
        return {name: environment[name] for name in self.pass_on}


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
    # Three heartbeats at least: with fewer, one that comes late would cost a role.
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
            # Brackets that do not close, or hold no address: what that says is no help to whoever wrote the URL.
            parts = urlsplit("")
        # Behind a user and a password, where there are such.
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
        # Almost any word may be an interface: of digits and dots alone it is an address with a slip.
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
        }.items():
            if is_given and not self.address:
                raise fault_at(
                    f"{name} is of a Ray that runs already, and runtime.address names none; give it, such as auto, or "
                    f"leave {name} out",
                    name,
                )
        return self


def _is_network(text: str) -> bool:
    try:
        ipaddress.IPv4Network(text, strict=False)
    except ValueError:
        return False
    return True
