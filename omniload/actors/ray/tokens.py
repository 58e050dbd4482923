"""The token by which a process joins a Ray: generated, received from another process, or the user's own."""

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
    """Return the token that processes of this job need to join its Ray; empty if Ray requires none."""
    asked = os.environ.get("RAY_AUTH_MODE") == "token"
    return os.environ.get("RAY_AUTH_TOKEN", "") if asked else ""


def own_token() -> None:
    """Let the Ray that this process starts require a token, even if Ray was imported before.

    A mode that the program has set itself stays; a mode left over from a given Ray does not.

    Raises:
        StateError: As for ``use_token``.
    """
    if not token() and (GIVEN_MODE or "token").lower() == "token":
        use_token(secrets.token_hex(32))


def use_given_token() -> str:
    """Use the token of a given Ray from where Ray itself would look for it.

    Returns:
        The origin of the token, for messages.

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
    # Without a mode Ray uses a token if there is one, and any ``ray.init()`` leaves one in the user's home.
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
        return True  # an unreadable file, which Ray reports when it is joined
    return there


def use_token(secret: str) -> None:
    """Use another process's token, even if Ray was imported before; an empty one means none.

    Raises:
        StateError: This process is connected to a Ray with another token.
    """
    if secret != token():
        require_unconnected()
        _ask_with(secret)


def _ask_with(secret: str) -> None:
    os.environ["RAY_AUTH_MODE"] = "token" if secret else "disabled"
    os.environ["RAY_AUTH_TOKEN"] = secret
    # Ray caches what it read from the environment at its import; this is how Ray itself reads it anew.
    Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()
