"""Credentials and challenges: the user of a registry, and the form in which the registry asks."""

import base64
import binascii
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlencode, urlsplit

import orjson

from omniload.base.errors import ConfigError, IntegrityError
from omniload.base.reading import read_kept_file
from omniload.base.secrets import note_secret

__all__ = ["Challenge", "Credentials", "credentials_of", "parse_challenges", "token_url"]

_WORD = r"[!#$%&'*+.^_`|~0-9A-Za-z-]+"
_SCHEME = re.compile(rf"\s*,?\s*({_WORD})\s+(?={_WORD}\s*=)|\s*,?\s*({_WORD})\s*(?=,|$)")
_PARAMETER = re.compile(rf'\s*,?\s*({_WORD})\s*=\s*(?:"((?:[^"\\]|\\.)*)"|({_WORD}))')
_MAX_CHALLENGE = 8192
_MAX_FILE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Credentials:
    """A user and a password; neither is ever shown."""

    user: str
    password: str = field(repr=False)

    def __post_init__(self) -> None:
        # From now on, no log and no error shows the password, even in a quoted request.
        note_secret(self.password)

    @property
    def basic(self) -> str:
        """Value of an ``Authorization`` header."""
        joined = base64.b64encode(f"{self.user}:{self.password}".encode())
        return f"Basic {joined.decode('ascii')}"


@dataclass(frozen=True, slots=True)
class Challenge:
    """One form of authorization that a registry offers."""

    scheme: str
    """Scheme in lower case: ``bearer`` or ``basic``."""
    parameters: Mapping[str, str]


def parse_challenges(header: str) -> tuple[Challenge, ...]:
    """Read a ``WWW-Authenticate`` header; everything after a broken part is ignored.

    Source:
        RFC 9110, section 11.6.1.
    """
    # Cut it, so that a stranger's header does not cost more to read than to send.
    header, found, at = header[:_MAX_CHALLENGE], [], 0
    while (scheme := _SCHEME.match(header, at)) is not None:
        at = scheme.end()
        parameters: dict[str, str] = {}
        while scheme[1] and (pair := _PARAMETER.match(header, at)) is not None:
            quoted, plain = pair[2], pair[3]
            value = plain if quoted is None else re.sub(r"\\(.)", r"\1", quoted)
            parameters.setdefault(pair[1].lower(), value)
            at = pair.end()
        found.append(Challenge((scheme[1] or scheme[2]).lower(), parameters))
    return tuple(found)


def token_url(parameters: Mapping[str, str], scope: str, *, is_plain: bool) -> str:
    """Return the URL at which a challenge of a registry offers a token for ``scope``; the registry may lack TLS.

    Raises:
        ConfigError: It is not https, though the registry is: credentials would be sent unencrypted.
    """
    # Basic credentials go to the realm that the registry names, unencrypted only if the registry is so, too.
    realm = parameters.get("realm", "")
    try:
        scheme = urlsplit(realm).scheme
    except ValueError:
        scheme = ""
    if scheme != "https" and not (scheme == "http" and is_plain):
        raise ConfigError(f"the registry sends for tokens to {realm!r}, which is not https")
    asked = {"service": parameters.get("service", ""), "scope": scope}
    query = urlencode({key: value for key, value in asked.items() if value})
    return f"{realm}{'&' if '?' in realm else '?'}{query}"


def credentials_of(registry: str, files: tuple[Path, ...] | None = None) -> Credentials | None:
    """Return the credentials that ``podman login`` or ``docker login`` saved for a registry.

    Args:
        registry: Host, with a port if it has one.
        files: Files to search; the first that knows the registry wins. None for the usual places.

    Raises:
        ConfigError: A file exists and cannot be parsed.
    """
    for path in _usual_files() if files is None else files:
        try:
            text = read_kept_file(path, most_bytes=_MAX_FILE_BYTES, what="a file of credentials")
        except OSError:  # most of the usual places are empty, or belong to another user
            continue
        except IntegrityError as error:
            raise ConfigError(str(error)) from error
        try:
            entry = orjson.loads(text).get("auths", {}).get(registry, {})
            # A helper program may hold the entry instead; helper programs are not run here.
            if not entry.get("auth"):
                continue
            user, _, password = (
                base64.b64decode(entry["auth"], validate=True).decode().partition(":")
            )
        except (ValueError, TypeError, AttributeError, binascii.Error) as error:
            raise ConfigError(f"{path}: not a file of credentials: {error}; log in anew") from error
        return Credentials(user, password)
    return None


def _usual_files() -> Iterator[Path]:
    if named := os.environ.get("REGISTRY_AUTH_FILE"):
        yield Path(named)
    if runtime := os.environ.get("XDG_RUNTIME_DIR"):
        yield Path(runtime) / "containers" / "auth.json"
    docker = os.environ.get("DOCKER_CONFIG")
    with suppress(RuntimeError):  # a user without a home has not logged in
        yield (Path(docker) if docker else Path.home() / ".docker") / "config.json"
