"""The Ray to which a process is connected before it opens a data plane, and the place of crash traces."""

import faulthandler
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("ray")

from omniload.actors.ray.environment import place_traces
from omniload.actors.ray.given import namespaces
from omniload.actors.ray.given.namespaces import new_namespace, require_unconnected
from omniload.base.errors import StateError


def connected(monkeypatch, namespace):
    context = SimpleNamespace(namespace=namespace, gcs_address="10.0.0.7:6379")
    fake = SimpleNamespace(
        is_initialized=lambda: namespace is not None, get_runtime_context=lambda: context
    )
    monkeypatch.setattr(namespaces, "ray", fake)


@pytest.mark.parametrize(
    ("namespace", "told"),
    [
        (
            new_namespace(),
            r"another data plane open, in the Ray at 10\.0\.0\.7:6379 \(omniload-.*close that",
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


class Tee:
    """A script's replacement of ``sys.stderr`` that keeps a log: it can be written to, and nothing else."""

    def write(self, text):
        return len(text)


@pytest.fixture
def no_traces(monkeypatch):
    """A process that traces no crashes yet; returns how it is asked to, by the descriptor."""
    asked = []
    monkeypatch.setattr(faulthandler, "is_enabled", lambda: bool(asked))
    monkeypatch.setattr(faulthandler, "enable", lambda file, **_: asked.append(file))
    return asked


def test_crashes_are_traced_to_the_first_standard_error_where_a_script_has_put_another_in_its_place(
    monkeypatch, no_traces, tmp_path
):
    with (tmp_path / "stderr").open("w") as first:
        monkeypatch.setattr(sys, "stderr", Tee())
        monkeypatch.setattr(sys, "__stderr__", first)

        place_traces()
        place_traces()

        assert no_traces == [first.fileno()]


def test_crashes_of_a_process_without_standard_error_are_traced_nowhere(monkeypatch, no_traces):
    monkeypatch.setattr(sys, "stderr", None)
    monkeypatch.setattr(sys, "__stderr__", None)

    place_traces()

    (descriptor,) = no_traces
    assert str(Path(f"/proc/self/fd/{descriptor}").readlink()) == os.devnull
    os.close(descriptor)


def test_where_standard_error_has_a_descriptor_ray_is_left_to_choose(
    monkeypatch, no_traces, tmp_path
):
    with (tmp_path / "stderr").open("w") as file:
        monkeypatch.setattr(sys, "stderr", file)

        place_traces()

    assert no_traces == []


def test_ray_kills_no_role_for_the_memory_that_others_of_its_host_take():
    assert os.environ["RAY_memory_monitor_refresh_ms"] == "0"  # noqa: SIM112 -- as Ray spells it
