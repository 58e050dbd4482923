"""Which rank this process is, and of how many: from arguments, a device mesh or the launcher's variables."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Protocol

import numpy as np

from omniload.base.errors import ConfigError
from omniload.batch.stages import LABELS, Stage
from omniload.mix.config import PipelineConfig

__all__ = ["DeviceMesh", "Launch", "Place", "group_of_torch", "launch_of", "place_of"]

_DP_NAMES = {"dp", "ddp", "fsdp", "dp_replicate", "dp_shard", "replicate", "shard"}
"""Names of mesh axes whose ranks take different samples, as used by torchtitan, FSDP2 and DDP."""
_SAME_DATA = {"tp", "pp", "ep"}
"""Names of mesh axes whose ranks take the same batch: one rank fetches it, and broadcasts to each other rank the part
that its stage uses."""


class DeviceMesh(Protocol):
    """The part of ``torch.distributed.device_mesh.DeviceMesh`` that is used here."""

    mesh_dim_names: tuple[str, ...] | None
    """Names of the axes."""
    mesh: Any
    """Numbers of the ranks, an array or tensor with those axes."""

    def size(self, mesh_dim: int | None = None) -> int:
        """Return the ranks along an axis, or of the whole mesh."""
        ...

    def get_coordinate(self) -> "list[int] | tuple[int, ...] | None":
        """Return this rank's place on every axis; ``None`` outside the mesh."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """One process of a job."""

    rank: int
    """Number of the process, from 0."""
    world_size: int
    """Processes of the job."""
    attempt: str
    """Text that distinguishes one start of the job from the next, if the launcher restarts it."""
    found_in: str
    """Origin of the numbers, for messages."""
    restarts: int = 0
    """Number of restarts by the launcher, if it reports them."""
    starts_ranks: bool = False
    """Whether the launcher starts a process for each rank. A single task of Slurm may start them itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A rank's place on the axes along which data is dealt."""

    dp_rank: int
    dp_size: int
    cp_rank: int = 0
    cp_size: int = 1
    peers: tuple[int, ...] = ()
    """Numbers of the ranks that take the same batch, including this one, in order; empty without peers."""
    along_pp: tuple[int, ...] = ()
    """Place along pp of each of ``peers``, in their order; empty if pp has one rank."""
    ranks: tuple[int, ...] = ()
    """Numbers of all ranks by place along dp, then cp, then among peers; empty if they rise in that order."""

    def places_of(self, world_size: int) -> list[int]:
        """Return the place of each rank of a job, numbered along dp, then cp; different places share no rows."""
        return [at // self._same(world_size) for at in self._order(world_size)]

    def peers_in(self, world_size: int) -> list[int]:
        """Return the number of each rank of a job among the ranks that take the same batch, in the order of ranks."""
        return [at % self._same(world_size) for at in self._order(world_size)]

    def _same(self, world_size: int) -> int:
        return world_size // (self.dp_size * self.cp_size)

    def _order(self, world_size: int) -> list[int]:
        """Return the position of each rank in the order of dp, then cp, then peers."""
        at_of = {number: at for at, number in enumerate(self.ranks or range(world_size))}
        return [at_of[number] for number in range(world_size)]

    def stages(self, columns: PipelineConfig) -> tuple[Stage | None, ...]:
        """Return the stage of each peer, or of this rank alone; ``None`` if pp has one rank.

        Args:
            columns: Columns that the stages use, from the mix.
        """
        if not self.along_pp:
            return (None,) * max(1, len(self.peers))
        count = max(self.along_pp) + 1
        return tuple(Stage.at(number, count, columns.model_dump()) for number in self.along_pp)

    def leads(self, rank: int, columns: PipelineConfig) -> bool:
        """Return whether ``rank``, this rank, reports for its peers: it is the first that has labels and so losses."""
        stages = zip(self.peers, self.stages(columns), strict=False)
        heard = [peer for peer, stage in stages if stage is None or stage.has(LABELS)]
        return not self.peers or rank == (heard or self.peers)[0]

    def fetches(self, rank: int) -> bool:
        """Return whether ``rank``, this rank, asks the data plane itself; its peers get the batch from it."""
        return not self.peers or rank == self.peers[0]


def group_of_torch() -> tuple[int, int] | None:
    """Return the number of this process and the size of torch's process group; ``None`` without a group."""
    # Looked up and not imported: a process with a group has torch loaded, and a loop without torch does not need it.
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    return distributed.get_rank(), distributed.get_world_size()


def launch_of(
    environment: Mapping[str, str],
    *,
    rank: int | None = None,
    world_size: int | None = None,
    group: tuple[int, int] | None = None,
) -> Launch:
    """Return the rank of this process and the size of its job.

    Arguments come first, then torchrun's variables, then those of a Slurm step, then those of ``mpirun``. If these name
    no other processes, torch's process group is used, as with ``mp.spawn``. A process without any of these is a job of
    its own.

    Args:
        environment: Variables of the process.
        rank: Number of the process, as given by the caller.
        world_size: Number of processes of the job, as given by the caller.
        group: Result of ``group_of_torch``.

    Raises:
        ConfigError: One number was given without the other, a variable is no number, or the rank is outside the job.
    """
    if rank is not None or world_size is not None:
        if rank is None or world_size is None:
            raise ConfigError(
                f"rank is {rank!r} and world_size is {world_size!r}; give both, or neither to have them found"
            )
        # Ranks that are given by hand carry no count of restarts, because each start has an address of its own.
        return _checked(rank, world_size, "", "the arguments rank and world_size")
    launch = _launch_in(environment)
    if launch.world_size > 1 or group is None or group[1] == 1:
        return launch
    return Launch(
        rank=group[0], world_size=group[1], attempt=launch.attempt, found_in="torch's process group"
    )


def _launch_in(environment: Mapping[str, str]) -> Launch:
    if "RANK" in environment and "WORLD_SIZE" in environment:
        attempt = environment.get("TORCHELASTIC_RUN_ID", "")
        if environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
            # Each agent may count restarts by itself. If agents share a store, the ranks agree on a start.
            attempt = f"{attempt}/{environment.get(_RESTARTS, '')}"
        launch = _launch_by(environment, "RANK", "WORLD_SIZE", attempt)
        return replace(launch, restarts=_counted(environment, _RESTARTS), starts_ranks=True)
    if "SLURM_STEP_ID" in environment:
        attempt = "/".join(
            environment.get(name, "")
            # Slurm sets the last variable after a job was requeued; a new step in one allocation has a new number.
            for name in ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
        )
        launch = _launch_by(environment, "SLURM_PROCID", "SLURM_NTASKS", attempt)
        restarts = _counted(environment, "SLURM_RESTART_COUNT")
        return replace(launch, restarts=restarts, starts_ranks=launch.world_size > 1)
    for rank, size, job in _MPI:
        if rank in environment and size in environment:
            launch = _launch_by(environment, rank, size, environment.get(job, ""))
            return replace(launch, starts_ranks=launch.world_size > 1)
    return Launch(rank=0, world_size=1, attempt="", found_in="no launcher's variables")


_RESTARTS = "TORCHELASTIC_RESTART_COUNT"
_MPI = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "PMIX_NAMESPACE"),
    ("PMI_RANK", "PMI_SIZE", "PMI_JOBID"),
)
"""Number, size and name of a job under ``mpirun``: variables of Open MPI, and of MPICH and its relatives, which may set
no name."""


def _counted(environment: Mapping[str, str], name: str) -> int:
    # Whatever a launcher writes here must not stop the job, so a value that is no count is taken as 0.
    found = environment.get(name, "")
    return int(found) if found.isascii() and found.isdigit() and len(found) < 9 else 0


def place_of(launch: Launch, mesh: DeviceMesh | None) -> Place:
    """Return this rank's place on dp and cp.

    Without a mesh, every rank takes its own samples. On a mesh, the axes with torch's names for data parallelism
    (``dp_replicate``, ``dp_shard``, ``fsdp``, ...) together form dp, and the first of them varies slowest.

    Raises:
        ConfigError: The mesh has no names, an axis with an unknown name, or other ranks than the job.
    """
    if mesh is None:
        return Place(dp_rank=launch.rank, dp_size=launch.world_size)
    names, at = mesh.mesh_dim_names, mesh.get_coordinate()
    if not names or at is None:
        raise ConfigError(
            f"the mesh names its axes {names!r} and has this rank at {at!r}; make it with mesh_dim_names, "
            "for example ('dp', 'cp'), and with this rank in it"
        )
    place = {"dp": (0, 1), "cp": (0, 1)}
    same, lines = 1, []
    for axis, (name, here) in enumerate(zip(names, at, strict=True)):
        size = mesh.size(axis)
        kind = "dp" if name in _DP_NAMES else name
        if kind in place:
            # The first axis varies slowest, because a mesh numbers its ranks in this order.
            before, extent = place[kind]
            place[kind] = (before * size + here, extent * size)
        elif kind in _SAME_DATA:
            same *= size
        # An axis with a single rank may have any name, because no data is dealt along it.
        elif size > 1:
            known = sorted(_DP_NAMES | _SAME_DATA | {"cp"})
            raise ConfigError(
                f"the mesh has {size} ranks along {name!r}; axes are called {known} here; rename it"
            )
        # All places along axes of the same data, and only this rank's own along the others: the product is its peers.
        lines.append(range(size) if kind in _SAME_DATA else range(here, here + 1))
    (dp_rank, dp_size), (cp_rank, cp_size) = place["dp"], place["cp"]
    if dp_size * cp_size * same != launch.world_size:
        raise ConfigError(
            f"the mesh has {dp_size * cp_size * same} ranks and the job {launch.world_size}, from {launch.found_in}; "
            "make the mesh of all ranks, or give rank and world_size"
        )
    points = list(product(*lines)) if same > 1 else []
    peers = tuple(int(mesh.mesh[point]) for point in points)
    pp = names.index("pp") if "pp" in names else None
    has_stages = pp is not None and mesh.size(pp) > 1
    _require_peers(launch, peers)
    return Place(
        dp_rank=dp_rank,
        dp_size=dp_size,
        cp_rank=cp_rank,
        cp_size=cp_size,
        peers=peers,
        along_pp=tuple(point[pp] for point in points) if pp is not None and has_stages else (),
        ranks=_ranks_by_place(mesh, names),
    )


def _ranks_by_place(mesh: DeviceMesh, names: tuple[str, ...]) -> tuple[int, ...]:
    """Return the number of the rank at each place; empty if the numbers rise.

    Raises:
        ConfigError: The numbers do not rise, and they are not the job's ranks, each once.
    """
    # Along dp first, then cp, then among peers. The sort is stable, so the axes of each of the three keep their order.
    rank_of = {**dict.fromkeys(_DP_NAMES, 0), "cp": 1, **dict.fromkeys(_SAME_DATA, 2)}
    order = sorted(range(len(names)), key=lambda axis: rank_of.get(names[axis], 3))
    numbers = np.asarray(mesh.mesh).transpose(order).reshape(-1)
    if (np.diff(numbers) > 0).all():
        return ()
    if not np.array_equal(np.sort(numbers), np.arange(len(numbers))):
        raise ConfigError(
            f"the mesh numbers its ranks {numbers.tolist()} by place, and the {len(numbers)} ranks of the job are 0 to "
            f"{len(numbers) - 1}; make the mesh of all ranks of this job, or number it in rising order"
        )
    return tuple(numbers.tolist())


def _require_peers(launch: Launch, peers: tuple[int, ...]) -> None:
    """Refuse a mesh that numbers the ranks in another way than the job."""
    if not peers:
        return
    if launch.rank not in peers:
        raise ConfigError(
            f"this is rank {launch.rank}, from {launch.found_in}, and the mesh has ranks {list(peers)} in its place; "
            "make the mesh of all ranks of this job"
        )
    if launch.rank == 0 and peers[0] != 0:
        raise ConfigError(
            f"the mesh has rank {peers[0]} before rank 0 along tp, pp and ep; rank 0 brings the data plane up, so it "
            "stands first: number the mesh as init_device_mesh does"
        )


def _launch_by(environment: Mapping[str, str], rank: str, size: str, attempt: str) -> Launch:
    """Return the launch that two variables describe."""
    found = []
    for name in (rank, size):
        text = environment.get(name, "")
        # ``isdigit`` alone accepts superscripts and digits of other scripts, some of which ``int`` refuses. No job has
        # ranks with more digits.
        if not (text.isascii() and text.isdigit()) or len(text) > 9:
            raise ConfigError(
                f"the variable {name} is {text!r}, not a whole number; start by torchrun, srun or mpirun, or give "
                "rank and world_size"
            )
        found.append(int(text))
    return _checked(found[0], found[1], attempt, f"the variables {rank} and {size}")


def _checked(rank: int, world_size: int, attempt: str, found_in: str) -> Launch:
    if isinstance(rank, bool) or isinstance(world_size, bool) or not 0 <= rank < world_size:
        raise ConfigError(
            f"rank is {rank!r} and world_size is {world_size!r}, from {found_in}; ranks are numbered from 0 to "
            "world_size - 1"
        )
    return Launch(rank=rank, world_size=world_size, attempt=attempt, found_in=found_in)
