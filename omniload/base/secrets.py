"""Removing secrets from what is shown: one function for errors, logs, statistics and output.

Users write secrets into URLs (``s3://KEY:SECRET@bucket``, ``?sig=...``) and options, and the libraries below quote
them in their errors. ``OmniloadError`` and the log pass every message through ``without_secrets``; other code that
shows a URL calls it too. The function removes what looks like a secret in any URL, and every secret that was
registered when it was given, however it is quoted.
"""

import re
import threading
from collections.abc import Mapping
from urllib.parse import parse_qsl, quote, quote_plus, unquote

__all__ = [
    "HIDDEN",
    "names_secret",
    "note_secret",
    "note_secrets_of",
    "with_urls_hidden",
    "without_secrets",
]

HIDDEN = "***"
_SHORTEST = 6
"""Shortest secret that is searched for anywhere: a shorter one is part of too many words."""
_MOST_NOTED = 1024
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]{0,30}://(?:(?!::)[^\s'\"<>])+")
"""A URL up to white space, quotes, or the ``::`` of a chained URL.

The name of the scheme has a limit, because otherwise a word of n letters would take n * n steps.
"""
_WORDS = (
    r"secret|passw|token|credential|signature|access_?key|account_?key|api_?key|sas|\bsig|\bauth"
)
_NAMES = rf"[\w.\-%]*(?:{_WORDS})[\w.\-%]*"
_QUERY = re.compile(rf"(?i)([?&;]{_NAMES}=)[^&;#\s'\"]*")
_IS_SECRET = re.compile(rf"(?i)^{_NAMES}$|^key$|^pat$|^passphrase$")
_VARIABLE = re.compile(
    r"(?i)(?:.*_)?(?:secret|passw(?:or)?d|passphrase|token|credentials?|signature|sas|sig|pat|(?:api|access)?_?key)(?:_.*)?"
)
_lock = threading.Lock()
_noted: dict[str, None] = {}


def without_secrets(text: str) -> str:
    """Return ``text`` with every secret in it replaced by ``***``."""
    text = with_urls_hidden(text)
    if _noted:
        with _lock:
            noted = list(_noted)
        # The longest first, because one secret may be part of another.
        for secret in sorted(noted, key=len, reverse=True):
            text = text.replace(secret, HIDDEN)
    return text


def with_urls_hidden(text: str) -> str:
    """Return ``text`` without what looks like a secret in any URL in it; the result is the same in every process."""
    if "://" not in text:
        return text
    return _URL.sub(lambda found: _QUERY.sub(rf"\1{HIDDEN}", _without_user(found[0])), text)


def names_secret(variable: str) -> bool:
    """Return whether an environment variable holds a secret, judged by its name."""
    return _VARIABLE.fullmatch(variable) is not None


def note_secret(secret: str) -> None:
    """Register ``secret``, so that it is removed from everything that is shown."""
    # Libraries quote a secret either as it was given or as it was encoded for sending.
    forms = {
        secret,
        unquote(secret),
        quote(secret, safe=""),
        quote_plus(secret),
        repr(secret)[1:-1],
    }
    with _lock:
        for form in forms:
            if len(form) >= _SHORTEST:
                _noted[form] = None
        # The oldest are dropped, because each registered secret is searched for in every line that is shown.
        while len(_noted) > _MOST_NOTED:
            del _noted[next(iter(_noted))]


def note_secrets_of(url: str, options: Mapping[str, object] | None = None) -> None:
    """Register the secrets of a URL and of options for its client."""
    head, mark, rest = url.partition("://")
    at, user = _user_in(rest) if mark and head else (0, "")
    if at and ":" in user:
        name, _, password = user.partition(":")
        note_secret(password)
        note_secret(f"{user}@")  # short passwords, and text that the pattern of URLs does not match
        # In a URL of S3 the name is the id of an access key, which must not be shown either.
        if head.lower() in {"s3", "s3a"}:
            note_secret(name)
    # Not ``urlsplit``, because it refuses URLs with an invalid host, whose secrets must be hidden too.
    query = rest.partition("?")[2].partition("#")[0]
    for name, value in parse_qsl(query, keep_blank_values=True):
        if _IS_SECRET.match(name):
            note_secret(value)
    for name, given in (options or {}).items():
        if isinstance(given, Mapping):
            note_secrets_of("", given)
        elif isinstance(given, str) and _IS_SECRET.match(name):
            note_secret(given)


def _without_user(url: str) -> str:
    """Return a URL without user and password, if it has a password or the user may be a token."""
    head, _, rest = url.partition("://")
    at, user = _user_in(rest)
    is_secret = ":" in user or head.lower() in {"http", "https", "s3", "s3a"}
    return f"{head}://{HIDDEN}@{rest[at + 1 :]}" if at and is_secret else url


def _user_in(rest: str) -> tuple[int, str]:
    """Return the place of the ``@`` after user and password in the rest of a URL, and the text before it; 0 if none."""
    place, _, _ = rest.partition("/")
    if "@" not in place and ":" in place:
        # An unquoted password may contain a slash, while a host has a number after its colon.
        port = place.rpartition(":")[2].partition("?")[0]
        place = place if (port.isascii() and port.isdecimal()) or not port else rest
    at = place.rfind("@")
    return (at, place[:at]) if at > 0 else (0, "")
