"""What the Ray plug-in accepts, and what it tells a worker."""

import pytest

from snapshot.env.node.tree import TreeHead
from tests.support.snapshot.env_builders import an_environment

pytest.importorskip("ray")
from snapshot.env.flow.ray_plugin import NAME, EnvironmentPlugin, worker_variables

KEY = "ab" * 32


class ATree:
    """A tree that is only named."""

    def __init__(self, used):
        self.head = TreeHead(KEY, {}, [], used, 0)

    def layer(self, number):
        return f"/cache/{number}"


def test_a_store_and_a_key_are_accepted():
    declared = {NAME: {"store": "hdfs://n/envs", "key": KEY}}

    EnvironmentPlugin.validate(declared)

    assert EnvironmentPlugin().get_uris(declared) == [f"omniload-env://{KEY}"]


@pytest.mark.parametrize(
    "given",
    [
        None,
        "key",
        {},
        {"key": KEY},
        {"store": "s", "key": "short"},
        {"store": 1, "key": KEY},
        {"store": "s", "key": KEY, "more": 1},
        {"store": "s", "key": None},
    ],
)
def test_anything_else_is_refused(given):
    with pytest.raises(ValueError, match=NAME):
        EnvironmentPlugin.validate({NAME: given})


def test_a_worker_finds_modules_and_programs_of_the_tree_first(tmp_path):
    environment = an_environment(tmp_path)

    found = worker_variables(
        environment, ATree([0, 1]), {"PATH": "/usr/bin", "PYTHONPATH": "/mine"}
    )

    assert found == {"PATH": "/cache/0:/usr/bin", "PYTHONPATH": "/cache/1:/mine"}


def test_a_target_without_entries_is_not_named(tmp_path):
    environment = an_environment(tmp_path)

    assert worker_variables(environment, ATree([1]), {}) == {"PYTHONPATH": "/cache/1"}
    assert worker_variables(environment, ATree([]), {"PATH": "/x"}) == {}


def test_the_tree_stays_when_ray_forgets_it():
    assert EnvironmentPlugin().delete_uri(f"omniload-env://{KEY}", None) == 0.0
