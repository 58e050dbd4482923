"""What a raylet is told to start."""

import pytest

from omniload.actors.ray.hosts import node_plan
from omniload.actors.ray.hosts.node_plan import NodePlan, ports_of, without_agents


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
