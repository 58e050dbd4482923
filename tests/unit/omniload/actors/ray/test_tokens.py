"""The token with which a process connects to a Ray of another user, and that its own Ray asks for a secret."""

import pytest

pytest.importorskip("ray")
from ray._raylet import (
    AuthenticationMode,
    AuthenticationTokenLoader,
    Config,
    get_authentication_mode,
)

from omniload.actors.ray import tokens
from omniload.actors.ray.tokens import own_token, token, use_given_token


@pytest.fixture
def a_home(tmp_path, monkeypatch):
    """Return the folder of a user who has set nothing; afterwards Ray reads its present settings again."""
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.setenv(name, "")  # noted, whatever becomes of it
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(tokens, "GIVEN_MODE", None)
    monkeypatch.setattr(tokens, "GIVEN_TOKEN", None)
    yield tmp_path
    monkeypatch.undo()
    Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()


def set_by_the_user(monkeypatch, mode, secret):
    for name, value in (("MODE", mode), ("TOKEN", secret)):
        monkeypatch.setattr(tokens, f"GIVEN_{name}", value)
        if value is not None:
            monkeypatch.setenv(f"RAY_AUTH_{name}", value)
    Config.initialize("")


@pytest.mark.parametrize(
    ("mode", "secret", "in_home", "asks", "told"),
    [
        (None, None, True, True, "with the token in RAY_AUTH_TOKEN_PATH or ~/.ray/auth_token"),
        ("token", None, True, True, "with the token in RAY_AUTH_TOKEN_PATH or ~/.ray/auth_token"),
        (None, None, False, False, "without a token, as there is none"),
        (None, "5e" * 32, False, True, "with the token in RAY_AUTH_TOKEN"),
        ("disabled", "5e" * 32, True, False, "without a token, as RAY_AUTH_MODE is 'disabled'"),
    ],
)
def test_a_ray_of_others_is_asked_with_the_token_that_ray_itself_would_find(
    a_home, monkeypatch, mode, secret, in_home, asks, told
):
    set_by_the_user(monkeypatch, mode, secret)
    if in_home:
        (a_home / ".ray").mkdir()
        (a_home / ".ray" / "auth_token").write_text("5e" * 32)

    assert use_given_token().startswith(told)

    assert (get_authentication_mode() == AuthenticationMode.TOKEN) is asks
    assert AuthenticationTokenLoader.instance().has_token() is asks


@pytest.mark.parametrize("in_home", [False, True])
def test_a_ray_of_its_own_lets_no_outsider_in_after_one_of_others_was_asked_without_a_secret(
    a_home, in_home
):
    if in_home:
        (a_home / ".ray").mkdir()
        (a_home / ".ray" / "auth_token").write_text("5e" * 32)
    use_given_token()
    assert token() == ""

    own_token()

    assert get_authentication_mode() == AuthenticationMode.TOKEN
    assert len(token()) == 64


def test_a_mode_that_the_program_has_set_stays_also_for_a_ray_of_its_own(a_home, monkeypatch):
    set_by_the_user(monkeypatch, "disabled", None)

    own_token()

    assert token() == ""


def test_a_token_that_cannot_be_read_is_told_of_by_ray_as_it_is_joined(a_home, monkeypatch):
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(a_home / "nowhere"))

    assert "RAY_AUTH_TOKEN_PATH" in use_given_token()
