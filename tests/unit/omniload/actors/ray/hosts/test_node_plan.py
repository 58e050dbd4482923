"""What a raylet is told to start."""

from omniload.actors.ray.hosts.node_plan import without_agents


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
