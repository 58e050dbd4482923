"""The rank of a process, from arguments, launchers' variables and meshes; and refusals."""

import math
from dataclasses import dataclass

import numpy as np
import pytest

from omniload.base.errors import ConfigError
from omniload.front.launch import Launch, Place, launch_of, place_of
from omniload.mix.config import PipelineConfig

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "8",
    "TORCHELASTIC_RUN_ID": "job",
    "TORCHELASTIC_RESTART_COUNT": "2",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "PMIX_NAMESPACE": "prterun-host-16446@1",
}
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "2"}
SLURM = {"SLURM_PROCID": "1", "SLURM_NTASKS": "4", "SLURM_JOB_ID": "77", "SLURM_STEP_ID": "0"}


@dataclass
class Mesh:
    mesh_dim_names: tuple[str, ...] | None
    sizes: tuple[int, ...]
    at: tuple[int, ...] | None

    @property
    def mesh(self):
        return np.arange(math.prod(self.sizes)).reshape(self.sizes)

    def size(self, mesh_dim=None):
        return self.sizes[mesh_dim]

    def get_coordinate(self):
        return self.at


def a_launch(rank=0, world_size=1):
    return Launch(rank=rank, world_size=world_size, attempt="", found_in="the test")


def test_a_process_without_a_launcher_is_a_job_of_its_own():
    launch = launch_of({})

    assert (launch.rank, launch.world_size) == (0, 1)


def test_torchruns_variables_are_read_with_the_attempt():
    launch = launch_of(TORCHRUN)

    assert (launch.rank, launch.world_size, launch.attempt) == (3, 8, "job/2")


def test_the_variables_of_a_slurm_step_are_read():
    launch = launch_of(SLURM)

    assert (launch.rank, launch.world_size) == (1, 4)
    assert (launch.attempt, launch.restarts) == ("77/0/", 0)
    assert launch_of(SLURM | {"SLURM_RESTART_COUNT": "2"}).restarts == 2


def test_a_slurm_batch_script_outside_a_step_is_a_job_of_its_own():
    """sbatch sets the number of tasks in the script too, which runs once."""
    outside = {name: text for name, text in SLURM.items() if name != "SLURM_STEP_ID"}

    assert launch_of(outside).world_size == 1


def test_torchrun_inside_a_slurm_step_counts():
    assert launch_of(SLURM | TORCHRUN).world_size == 8


def test_a_process_group_speaks_where_launchers_say_nothing_of_other_ranks():
    spawned = launch_of({}, group=(1, 2))

    assert (spawned.rank, spawned.world_size) == (1, 2)
    assert spawned.found_in == "torch's process group"
    assert launch_of({"RANK": "0", "WORLD_SIZE": "1"}, group=(1, 2)).world_size == 2
    assert launch_of(TORCHRUN, group=(1, 2)).world_size == 8
    assert launch_of({}, rank=0, world_size=1, group=(1, 2)).world_size == 1
    assert launch_of({}, group=(0, 1)).found_in == "no launcher's variables"


def test_arguments_win_over_variables():
    launch = launch_of(TORCHRUN, rank=0, world_size=2)

    assert (launch.rank, launch.world_size) == (0, 2)


@pytest.mark.parametrize("given", [{"rank": 1}, {"world_size": 2}])
def test_one_number_without_the_other_is_refused(given):
    with pytest.raises(ConfigError, match="give both"):
        launch_of({}, **given)


@pytest.mark.parametrize(("rank", "world_size"), [(2, 2), (-1, 2), (0, 0), (True, 2)])
def test_a_rank_outside_the_job_is_refused(rank, world_size):
    with pytest.raises(ConfigError, match="ranks are numbered from 0"):
        launch_of({}, rank=rank, world_size=world_size)


@pytest.mark.parametrize("text", ["", "one", "-1", "1.0", "9" * 10, "٣"])
def test_a_variable_that_holds_no_number_is_refused_by_name(text):
    with pytest.raises(ConfigError, match="the variable RANK is"):
        launch_of(TORCHRUN | {"RANK": text})


def test_without_a_mesh_every_rank_takes_its_own_samples():
    assert place_of(a_launch(1, 4), None) == Place(dp_rank=1, dp_size=4)


def test_axes_that_share_parameters_are_one_dp_axis():
    mesh = Mesh(("dp_replicate", "dp_shard", "cp"), (2, 3, 2), (1, 2, 1))

    assert place_of(a_launch(11, 12), mesh) == Place(dp_rank=5, dp_size=6, cp_rank=1, cp_size=2)


def test_an_axis_of_one_rank_is_nothing():
    mesh = Mesh(("pp", "dp", "tp"), (1, 2, 1), (0, 1, 0))

    assert place_of(a_launch(1, 2), mesh) == Place(dp_rank=1, dp_size=2)


@pytest.mark.parametrize(
    ("axes", "sizes", "at", "rank", "peers"),
    [
        (("dp", "tp"), (2, 2), (1, 1), 3, (2, 3)),
        (("pp", "dp", "tp"), (2, 2, 2), (1, 0, 1), 5, (0, 1, 4, 5)),
        (("dp", "ep", "cp"), (1, 3, 2), (0, 2, 1), 5, (1, 3, 5)),
    ],
)
def test_ranks_along_tp_pp_and_ep_are_peers_of_which_the_first_fetches(
    axes, sizes, at, rank, peers
):
    place = place_of(a_launch(rank, math.prod(sizes)), Mesh(axes, sizes, at))

    assert place.peers == peers
    assert place.along_pp == ((0, 0, 1, 1) if "pp" in axes else ())
    assert not place.fetches(rank)
    assert place.fetches(peers[0])


@pytest.mark.parametrize(
    ("axes", "sizes", "leads"),
    [
        (("dp", "tp"), (2, 2), [0, 2]),
        (("dp", "pp", "tp"), (2, 2, 2), [2, 6]),
        (("pp", "dp"), (3, 2), [4, 5]),
    ],
)
def test_the_first_of_the_peers_with_labels_speaks_for_all(axes, sizes, leads):
    found = []
    for at in np.ndindex(*sizes):
        rank = int(np.ravel_multi_index(at, sizes))
        place = place_of(a_launch(rank, math.prod(sizes)), Mesh(axes, sizes, at))
        assert place.peers_in(math.prod(sizes))[rank] == place.peers.index(rank)
        if place.leads(rank, PipelineConfig()):
            found.append(rank)

    assert found == leads


@pytest.mark.parametrize(
    ("axes", "sizes", "ranks"),
    [
        (("dp", "cp", "tp"), (2, 2, 2), ()),
        (("pp", "dp", "tp"), (2, 2, 2), (0, 1, 4, 5, 2, 3, 6, 7)),
        (("cp", "dp_replicate", "dp_shard"), (2, 1, 2), (0, 2, 1, 3)),
        (("tp", "fsdp"), (2, 3), (0, 3, 1, 4, 2, 5)),
    ],
)
def test_the_numbers_of_all_ranks_are_known_by_place(axes, sizes, ranks):
    size, found = math.prod(sizes), {}
    for at in np.ndindex(*sizes):
        rank = int(np.ravel_multi_index(at, sizes))
        place = place_of(a_launch(rank, size), Mesh(axes, sizes, at))
        found[rank] = place.dp_rank * place.cp_size + place.cp_rank

    assert place.ranks == ranks
    assert place.places_of(size) == [found[rank] for rank in range(size)]


def test_a_mesh_that_numbers_another_rank_before_rank_0_is_refused():
    mesh = Mesh(("dp", "tp"), (1, 2), (0, 1))
    backwards = type("Backwards", (Mesh,), {"mesh": np.array([[1, 0]])})

    with pytest.raises(ConfigError, match="rank 1 before rank 0"):
        place_of(a_launch(0, 2), backwards(mesh.mesh_dim_names, mesh.sizes, mesh.at))


@pytest.mark.parametrize("numbers", [[[0, 5], [4, 1]], [[0, 3], [1, 1]]])
def test_numbers_that_do_not_rise_and_are_not_those_of_the_job_are_refused(numbers):
    mesh = type("Numbered", (Mesh,), {"mesh": np.array(numbers)})(("cp", "dp"), (2, 2), (0, 0))

    with pytest.raises(ConfigError, match="ranks of the job are 0 to 3; make the mesh of all"):
        place_of(a_launch(0, 4), mesh)


@pytest.mark.parametrize(
    ("mesh", "world_size", "reason"),
    [
        (Mesh(None, (2,), (0,)), 2, "with mesh_dim_names"),
        (Mesh(("dp",), (2,), None), 2, "with this rank in it"),
        (Mesh(("dp", "tp"), (2, 2), (0, 0)), 2, "the mesh has 4 ranks and the job 2"),
        (
            Mesh(("dp", "tp"), (2, 2), (1, 1)),
            4,
            r"this is rank 0, .* has ranks \[2, 3\] in its place",
        ),
        (Mesh(("dp", "shiny"), (2, 2), (0, 0)), 4, "rename it"),
        (Mesh(("dp",), (2,), (0,)), 4, "the mesh has 2 ranks and the job 4"),
    ],
)
def test_a_mesh_that_cannot_be_served_is_refused(mesh, world_size, reason):
    with pytest.raises(ConfigError, match=reason):
        place_of(a_launch(0, world_size), mesh)


@pytest.mark.parametrize(
    ("variables", "attempt"), [(OPEN_MPI, "prterun-host-16446@1"), (MPICH, "")]
)
def test_a_process_that_mpirun_starts_is_one_of_its_ranks(variables, attempt):
    launch = launch_of(variables)

    assert (launch.rank, launch.world_size, launch.attempt) == (1, 2, attempt)
    assert launch.starts_ranks
    assert launch_of(variables | TORCHRUN).world_size == 8, "torchrun under mpirun starts the ranks"
    assert launch_of(variables, group=(5, 6)).world_size == 2


@pytest.mark.parametrize(
    ("variables", "starts"),
    [
        ({}, False),
        (MPICH | {"PMI_RANK": "0", "PMI_SIZE": "1"}, False),
        (TORCHRUN | {"RANK": "0", "WORLD_SIZE": "1"}, True),
        (SLURM, True),
        (SLURM | {"SLURM_PROCID": "0", "SLURM_NTASKS": "1"}, False),
    ],
)
def test_one_task_of_slurm_may_start_ranks_and_a_rank_of_torchrun_may_not(variables, starts):
    assert launch_of(variables).starts_ranks is starts
