"""The secret that a process asks a Ray with: one that it made up, one that another process gave it, or its user's."""

import os
import secrets
from typing import Any

from omniload.actors.ray.environment import (
    GIVEN_MODE,
    GIVEN_TOKEN,
    AuthenticationTokenLoader,
    Config,
    RayError,
    ray,
)
from omniload.actors.ray.given.namespaces import require_unconnected

__all__ = ["own_token", "token", "use_given_token", "use_token"]


def token() -> str:
    """Return the secret that processes of this job need to join its Ray; empty where Ray asks for none."""
    asked = os.environ.get("RAY_AUTH_MODE") == "token"
    return os.environ.get("RAY_AUTH_TOKEN", "") if asked else ""


def own_token() -> None:
    """Have the Ray that this process starts ask for a secret, also where Ray was imported before.

    A mode that the program has set itself stays; one that is left of a Ray of somebody else does not.

    Raises:
        StateError: As for ``use_token``.
    """
    if not token() and (GIVEN_MODE or "token").lower() == "token":
        use_token(secrets.token_hex(32))


def use_given_token() -> str:
    """Ask for the secret of a Ray that somebody else started, where Ray itself would look for it.

    Returns:
        What is asked with, for messages.

    Raises:
        StateError: As for ``use_token``.
    """
    if ray.is_initialized():
        return "as this process is connected already"
    if GIVEN_MODE is not None and GIVEN_MODE.lower() != "token":
        use_token("")
        return f"without a token, as RAY_AUTH_MODE is {GIVEN_MODE!r}"
    if GIVEN_TOKEN:
        use_token(GIVEN_TOKEN)
        return "with the token in RAY_AUTH_TOKEN"
    require_unconnected()
    os.environ.pop("RAY_AUTH_TOKEN", None)
    loader = AuthenticationTokenLoader.instance()
    loader.reset_cache()
    # Without a mode Ray asks for a token where there is one, as any ``ray.init()`` leaves it in its user's home.
    if GIVEN_MODE is None and not _is_there(loader):
        _ask_with("")
        return "without a token, as there is none in RAY_AUTH_TOKEN or ~/.ray/auth_token"
    os.environ["RAY_AUTH_MODE"] = "token"
    Config.initialize("")  # as in ``_ask_with``
    loader.reset_cache()
    return "with the token in RAY_AUTH_TOKEN_PATH or ~/.ray/auth_token"


def _is_there(loader: Any) -> bool:  # noqa: ANN401 -- Ray's loader has no static type
    try:
        there: bool = loader.has_token(ignore_auth_mode=True)
    except RayError:
        return True  # a file that cannot be read: Ray says so as it is joined
    return there


def use_token(secret: str) -> None:
    """Take another process's secret, also where Ray was imported before; an empty one asks for none.

    Raises:
        StateError: This process is connected to a Ray of another secret.
    """
    if secret != token():
        require_unconnected()
        _ask_with(secret)


def _ask_with(secret: str) -> None:
    os.environ["RAY_AUTH_MODE"] = "token" if secret else "disabled"
    os.environ["RAY_AUTH_TOKEN"] = secret
    # Ray keeps what it read from the environment when it was imported; Ray itself reads anew like this.
    Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()
