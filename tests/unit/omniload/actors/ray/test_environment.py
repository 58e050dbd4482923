"""Whose Ray a process is connected to that wants to open a data plane."""

from types import SimpleNamespace

import pytest

pytest.importorskip("ray")

from omniload.actors.ray import environment
from omniload.actors.ray.environment import new_namespace, require_unconnected
from omniload.base.errors import StateError


def connected(monkeypatch, namespace):
    context = SimpleNamespace(namespace=namespace, gcs_address="10.0.0.7:6379")
    fake = SimpleNamespace(
        is_initialized=lambda: namespace is not None, get_runtime_context=lambda: context
    )
    monkeypatch.setattr(environment, "ray", fake)


@pytest.mark.parametrize(
    ("namespace", "told"),
    [
        (
            new_namespace(),
            r"another data plane open, in the Ray at 10\.0\.0\.7:6379, .* close that",
        ),
        ("", r"connected to a Ray cluster already; close it \(ray\.shutdown\(\)\)"),
        (
            "my-omniload-study",
            r"connected to a Ray cluster already; close it \(ray\.shutdown\(\)\)",
        ),
    ],
)
def test_a_process_that_uses_ray_is_told_what_for(monkeypatch, namespace, told):
    connected(monkeypatch, namespace)

    with pytest.raises(StateError, match=told):
        require_unconnected()


def test_a_process_that_uses_no_ray_may_open_a_plane(monkeypatch):
    connected(monkeypatch, None)

    require_unconnected()
