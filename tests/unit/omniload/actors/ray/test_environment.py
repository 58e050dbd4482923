"""Whose Ray a process is connected to that wants to open a data plane, and with which token it asks for another's."""

from types import SimpleNamespace

import pytest

pytest.importorskip("ray")
from ray._raylet import (
    AuthenticationMode,
    AuthenticationTokenLoader,
    Config,
    get_authentication_mode,
)

from omniload.actors.ray import environment
from omniload.actors.ray.environment import new_namespace, require_unconnected, use_given_token
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


@pytest.fixture
def a_home(tmp_path, monkeypatch):
    """Return the folder of a user who has set nothing; Ray is told afterwards what holds again."""
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.setenv(name, "")  # noted, whatever becomes of it
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(environment, "_AUTH_MODE", None)
    monkeypatch.setattr(environment, "_AUTH_TOKEN", None)
    yield tmp_path
    monkeypatch.undo()
    Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()


def set_by_the_user(monkeypatch, mode, token):
    for name, value in (("_AUTH_MODE", mode), ("_AUTH_TOKEN", token)):
        monkeypatch.setattr(environment, name, value)
        if value is not None:
            monkeypatch.setenv(f"RAY{name}", value)
    Config.initialize("")


@pytest.mark.parametrize(
    ("mode", "token", "in_home", "asks", "told"),
    [
        (None, None, True, True, "with the token in RAY_AUTH_TOKEN_PATH or ~/.ray/auth_token"),
        ("token", None, True, True, "with the token in RAY_AUTH_TOKEN_PATH or ~/.ray/auth_token"),
        (None, None, False, False, "without a token, as there is none"),
        (None, "5e" * 32, False, True, "with the token in RAY_AUTH_TOKEN"),
        ("disabled", "5e" * 32, True, False, "without a token, as RAY_AUTH_MODE is 'disabled'"),
    ],
)
def test_a_ray_of_others_is_asked_with_the_token_that_ray_itself_would_find(
    a_home, monkeypatch, mode, token, in_home, asks, told
):
    set_by_the_user(monkeypatch, mode, token)
    if in_home:
        (a_home / ".ray").mkdir()
        (a_home / ".ray" / "auth_token").write_text("5e" * 32)

    assert use_given_token().startswith(told)

    assert (get_authentication_mode() == AuthenticationMode.TOKEN) is asks
    assert AuthenticationTokenLoader.instance().has_token() is asks
