"""Options of a raylet's start."""

from pathlib import Path

import pytest

from omniload.actors.ray.hosts import node_plan, worker
from omniload.actors.ray.hosts.node_plan import NodePlan, places_of, ports_of, without_agents
from omniload.base.errors import ConfigError


def test_agents_that_no_plane_asks_are_not_begun_and_one_comes_with_the_first_who_asks():
    command = [
        *("raylet", "--node_ip_address=127.0.0.1", "--runtime_env_agent_port=4711"),
        "--python_worker_command=python worker.py --node-ip-address=127.0.0.2",
        "--dashboard_agent_command=python agent.py --head",
        "--runtime_env_agent_command=python main.py --node-id=1",
    ]

    changed = without_agents(command)

    assert changed[:4] == command[:4]
    assert changed[4].endswith("/cat")
    option, _, late = changed[5].partition("=")
    assert option == "--runtime_env_agent_command"
    assert late.endswith("/late_agent.py 127.0.0.1 4711 python main.py --node-id=1")


def test_agents_of_a_raylet_that_does_not_say_where_it_listens_stay_as_they_are():
    command = ["raylet", "--runtime_env_agent_command=python main.py"]

    assert without_agents(command) == command


@pytest.mark.parametrize(
    ("head", "workers", "why"), [("10.0.0.1:1", 0, "4 a rank, and one besides"), (None, 2, "")]
)
def test_too_few_ports_for_a_rank_that_joins_are_told_with_what_a_rank_takes(
    monkeypatch, head, workers, why
):
    plan = NodePlan(
        folder="",
        address="127.0.0.1",
        workers=workers,
        object_store_bytes=1,
        ports=range(9, 99),
        head=head,
    )
    told = []

    def free(_address, ports, count, *, setting, why):
        told.append((count, why))
        return list(ports[:count])

    monkeypatch.setattr(node_plan, "free_ports", free)

    ports_of(plan)

    ((count, said),) = told
    assert said.endswith(why)
    assert (count, bool(said)) == (4 if head else 7, bool(head))


def in_folder(above_bytes):
    above = "/" + "t" * (above_bytes - 1)
    return NodePlan(
        folder=f"{above}/omniload-ray-00000000/r", address="", workers=1, object_store_bytes=0
    )


def test_sockets_lie_in_the_nodes_folder_itself_where_a_long_path_of_temporary_files_leaves_room():
    plan = in_folder(70)

    places = places_of(plan)

    assert places.pop("temp_dir") == plan.folder
    assert sorted(places) == ["plasma_store_socket_name", "raylet_socket_name"]
    assert {str(Path(path).parent) for path in places.values()} == {plan.folder}
    assert len(worker.place_of(places["raylet_socket_name"])) == 107


def test_a_folder_of_temporary_files_whose_path_is_too_long_for_sockets_is_refused_with_the_limit():
    with pytest.raises(ConfigError, match=r"has a path of 75 bytes, .* at most 70; set TMPDIR"):
        places_of(in_folder(75))
