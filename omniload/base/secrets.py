"""Keeping secrets out of what is shown: one function for errors, logs, statistics and output.

Users write secrets into URLs (``s3://KEY:SECRET@bucket``, ``?sig=...``) and options, and the
libraries below quote them in their errors. ``OmniloadError`` and the log pass every message through
``without_secrets``; whatever else shows a URL does so itself. It takes out what looks
like a secret in any URL, and every secret that was noted when it was given, however it is quoted.
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
"""Characters of a secret that is looked for anywhere: a shorter one is a part of too many words."""
_MOST_NOTED = 1024
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]{0,30}://(?:(?!::)[^\s'\"<>])+")
"""Up to white space, quotes, or the ``::`` of a chained URL.

The name of the scheme has a limit: without one, a word of n letters is looked at n * n times.
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
        # The longest first: one may be a part of another.
        for secret in sorted(noted, key=len, reverse=True):
            text = text.replace(secret, HIDDEN)
    return text


def with_urls_hidden(text: str) -> str:
    """Return ``text`` without what looks like a secret in any URL in it: the same in every process."""
    if "://" not in text:
        return text
    return _URL.sub(lambda found: _QUERY.sub(rf"\1{HIDDEN}", _without_user(found[0])), text)


def names_secret(variable: str) -> bool:
    """Tell whether a variable of the environment holds a secret, by its name."""
    return _VARIABLE.fullmatch(variable) is not None


def note_secret(secret: str) -> None:
    """Have ``secret`` taken out of whatever is shown, wherever it stands."""
    # Libraries quote a secret as they were given it, or as it travelled.
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
        # The oldest go: each one that is noted is looked for in every line that is shown.
        while len(_noted) > _MOST_NOTED:
            del _noted[next(iter(_noted))]


def note_secrets_of(url: str, options: Mapping[str, object] | None = None) -> None:
    """Note the secrets of a URL and of options for its client."""
    head, mark, rest = url.partition("://")
    at, user = _user_in(rest) if mark and head else (0, "")
    if at and ":" in user:
        name, _, password = user.partition(":")
        note_secret(password)
        note_secret(f"{user}@")  # short passwords, and what no pattern of a URL takes for one
        # Of S3 the name is the id of an access key, which is nobody else's either.
        if head.lower() in {"s3", "s3a"}:
            note_secret(name)
    # Not ``urlsplit``: it refuses a URL whose host is none, and its secrets are as secret.
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
    """Return a URL without what stands ahead of its host, if that has a password, or may be a token."""
    head, _, rest = url.partition("://")
    at, user = _user_in(rest)
    is_secret = ":" in user or head.lower() in {"http", "https", "s3", "s3a"}
    return f"{head}://{HIDDEN}@{rest[at + 1 :]}" if at and is_secret else url


def _user_in(rest: str) -> tuple[int, str]:
    """Return where the ``@`` behind user and password stands in the rest of a URL, and what is ahead; 0 for none."""
    place, _, _ = rest.partition("/")
    if "@" not in place and ":" in place:
        # A password that is not quoted may hold a slash; a host has a number behind its colon.
        port = place.rpartition(":")[2].partition("?")[0]
        place = place if (port.isascii() and port.isdecimal()) or not port else rest
    at = place.rfind("@")
    return (at, place[:at]) if at > 0 else (0, "")
