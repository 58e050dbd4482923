"""HTTP to one registry: connections, authorization, redirects, retries, and errors by name."""

import ipaddress
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar
from urllib.parse import urljoin, urlsplit

import orjson
import urllib3
from urllib3.exceptions import HTTPError
from urllib3.response import BaseHTTPResponse

from omniload.base.clock import Clock, SystemClock
from omniload.base.errors import ConfigError, IntegrityError, UnavailableError
from omniload.base.log import get_logger
from omniload.base.retry import backoff_s, with_retries
from omniload.base.secrets import note_secret
from omniload.base.units import decimal_of
from snapshot.oci.auth import Challenge, Credentials, parse_challenges, token_url
from snapshot.oci.slow_servers import Pace, paced_pool
from snapshot.oci.store import Opened

__all__ = ["RegistrySettings", "Transport", "is_loopback"]

_log = get_logger(__name__)

_MAX_TOKEN_BYTES = 1 << 20
_LONGEST_RETRY_AFTER_S = 30.0
_REDIRECTS = 5

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class RegistrySettings:
    """Settings of the connections to a registry."""

    plain_http: bool | None = None
    """Whether to connect without TLS; None: only to this machine itself."""
    timeout_s: float = 30.0
    """Longest silence of a connection, and longest wait for the headers of an answer."""
    least_bytes_per_s: float = 16 << 10
    """Least rate of a body, over each ``timeout_s`` of waiting: 4 MiB, the largest range, take at most 4 minutes."""
    attempts: int = 5
    give_up_s: float = 90.0
    """Seconds after the first attempt from which no further one begins; then the next mirror or tier is asked."""
    connections: int = 16
    """Number of connections kept open."""


class Transport:
    """Requests to one registry. Safe in threads."""

    def __init__(
        self,
        registry: str,
        settings: RegistrySettings | None = None,
        credentials: Credentials | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._settings = settings or RegistrySettings()
        self._credentials = credentials
        self._clock = clock or SystemClock()
        plain = self._settings.plain_http
        self._is_plain = is_loopback(registry) if plain is None else plain
        self.base = f"{'http' if self._is_plain else 'https'}://{registry}"
        pace = Pace(
            silent_s=self._settings.timeout_s, least_bytes_per_s=self._settings.least_bytes_per_s
        )
        self._pool = paced_pool(
            pace,
            connect_s=min(10.0, self._settings.timeout_s),
            num_pools=4,
            maxsize=self._settings.connections,
        )
        self._lock = threading.Lock()
        self._authorization_of: dict[str, str] = {}

    def request(
        self,
        method: str,
        url: str,
        *,
        scope: str = "",
        headers: Mapping[str, str] | None = None,
        body: bytes | Opened | None = None,
    ) -> BaseHTTPResponse:
        """Send a request once and return the answer, with its body not yet read; release it when done.

        ``scope`` is the scope that a token must allow, such as ``repository:team/torch:pull``.

        Raises:
            FileNotFoundError: 404.
            ConfigError: Credentials are missing or refused, or another answer of 4xx.
            UnavailableError: No answer, or one of 5xx or 429.
            IntegrityError: A range that the blob does not hold.
        """
        url, given = self._whole(url), headers or {}
        # Only there, because a storage service that the registry redirects to must not get a token.
        known = self._authorization_of.get(scope) if self._is_ours(url) else None
        response = self._send(method, url, given, known, body)
        # Only once, because a second refusal has another reason.
        if response.status == 401 and self._is_ours(url):
            challenges = parse_challenges(response.headers.get("WWW-Authenticate", ""))
            response.drain_conn()
            authorization = self._answer_to(challenges, scope)
            with self._lock:
                self._authorization_of[scope] = authorization
            response = self._send(method, url, given, authorization, body)
        return self._checked(response, method, url)

    def repeated(self, attempt: Callable[[], Result]) -> Result:
        """Call ``attempt``, which sends a request and reads its answer, until the answer is complete.

        Raises:
            UnavailableError: The error of the last attempt, at the latest ``give_up_s`` after the first.
        """
        waits_s = tuple(backoff_s(attempts=self._settings.attempts))
        until_s = self._clock.now_s() + self._settings.give_up_s

        def log(error: UnavailableError, wait_s: float) -> None:
            if self._clock.now_s() + wait_s >= until_s:
                error.add_note(f"gave up after {self._settings.give_up_s:.0f} s")
                raise error
            _log.warning("%s; tried again in %.1f s", error, wait_s)

        return with_retries(attempt, waits_s, self._clock.sleep, log)

    def close(self) -> None:
        """Close the connections."""
        self._pool.clear()

    def _send(
        self,
        method: str,
        url: str,
        headers: Mapping[str, str],
        authorization: str | None,
        body: bytes | Opened | None,
    ) -> BaseHTTPResponse:
        sent = dict(headers)
        # If a registry redirects to a storage service, the library drops the header on the way.
        if authorization is not None:
            sent["Authorization"] = authorization
        opened = body() if callable(body) else None
        try:
            return self._pool.request(
                method,
                url,
                headers=sent,
                body=opened or (None if callable(body) else body),
                preload_content=False,
                # The library handles only redirects; this class decides whether and when to try again.
                retries=urllib3.Retry(
                    connect=0,
                    read=0,
                    status=0,
                    other=0,
                    # A body that was pushed has been read by then, and cannot be sent again.
                    redirect=_REDIRECTS if body is None else 0,
                    respect_retry_after_header=False,
                ),
            )
        # ValueError: a redirect to a malformed URL
        except (HTTPError, OSError, ValueError) as error:
            raise UnavailableError(
                f"{method} {url}: {_reason(error)}; is the registry up, and is its name right?"
            ) from error
        finally:
            if opened is not None:
                opened.close()

    def _checked(self, response: BaseHTTPResponse, method: str, url: str) -> BaseHTTPResponse:
        status = response.status
        if status < 400:
            return response
        said = _complaint(response)
        if status == 404:
            # Without an errno, unlike the error of a local file: ``wanted_by_manifest`` relies on that.
            raise FileNotFoundError(f"{method} {url}: not found{said}")
        if status == 416:
            raise IntegrityError(f"{method} {url}: the blob ends before that range{said}")
        if status == 429 or status >= 500:
            wait_s = _retry_after_s(response.headers.get("Retry-After", ""))
            if wait_s:
                self._clock.sleep(wait_s)
            raise UnavailableError(f"{method} {url}: answers {status}{said}")
        if status in {401, 403}:
            whose = "no credentials" if self._credentials is None else "those credentials"
            raise ConfigError(
                f"{method} {url}: answers {status} to {whose}{said}; log in with 'podman login' "
                "or 'docker login'"
            )
        raise ConfigError(f"{method} {url}: answers {status}{said}")

    def _answer_to(self, challenges: tuple[Challenge, ...], scope: str) -> str:
        by_scheme = {challenge.scheme: challenge for challenge in reversed(challenges)}
        if "bearer" in by_scheme:
            return f"Bearer {self._token(by_scheme['bearer'].parameters, scope)}"
        if "basic" in by_scheme and self._credentials is not None:
            return self._credentials.basic
        raise ConfigError(
            f"{self.base} wants {sorted(by_scheme) or 'credentials of no known kind'} and there are "
            "none for it; log in with 'podman login' or 'docker login'"
        )

    def _token(self, parameters: Mapping[str, str], scope: str) -> str:
        url, realm = token_url(parameters, scope, is_plain=self._is_plain), parameters["realm"]
        basic = self._credentials.basic if self._credentials is not None else None
        response = self._checked(self._send("GET", url, {}, basic, None), "GET", realm)
        try:
            value = orjson.loads(response.read(_MAX_TOKEN_BYTES))
            token = value.get("token") or value.get("access_token")
        except (ValueError, AttributeError, HTTPError) as error:
            raise UnavailableError(f"GET {realm}: is no token: {error}") from error
        finally:
            response.release_conn()
        if not isinstance(token, str) or not token.isascii() or not token.isprintable():
            raise UnavailableError(f"GET {realm}: the answer holds no token")
        note_secret(token)
        return token

    def _whole(self, url: str) -> str:
        try:
            return urljoin(self.base, url)
        except ValueError as error:  # the address that the registry itself sent
            raise UnavailableError(f"{self.base} sends to {url!r}: {error}") from error

    def _is_ours(self, url: str) -> bool:
        return urlsplit(url).netloc == urlsplit(self.base).netloc


def is_loopback(address: str) -> bool:
    """Return whether ``HOST``, or ``HOST:PORT``, is this machine itself."""
    host = urlsplit(f"//{address}").hostname or ""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False  # a name, though it may begin like an address


def _reason(error: Exception) -> str:
    inner = getattr(error, "reason", None) or error
    return f"{type(inner).__name__}: {inner}"[:300]


def _complaint(response: BaseHTTPResponse) -> str:
    """Return a registry's text about an error, shortened, and release the connection."""
    try:
        text = response.read(4096).decode("utf-8", "replace").strip()
    except HTTPError:
        text = ""
    # Do not return it to the pool, because the rest of an error may have no end.
    response.close()
    # The text may come from anybody, and must not move the cursor of a terminal.
    said = "".join(letter if letter.isprintable() else " " for letter in text[:300])
    return f": {said}" if text else ""


def _retry_after_s(text: str) -> float:
    return min(float(decimal_of(text) or 0), _LONGEST_RETRY_AFTER_S)
