"""One repository of a registry over HTTP: OCI distribution 1.1, and older versions."""

import re
from collections.abc import Iterator, Mapping
from functools import partial
from urllib.parse import urlencode

from typing_extensions import override
from urllib3.exceptions import HTTPError
from urllib3.response import BaseHTTPResponse

from omniload.base.errors import IntegrityError, UnavailableError
from snapshot.oci.digest import check_digest, digest_of, verified
from snapshot.oci.manifest import ACCEPTED, MAX_MANIFEST_BYTES, Descriptor, parse_manifest
from snapshot.oci.reference import check_tag
from snapshot.oci.store import ImageStore, Opened, StoredManifest, after, checked_chunks
from snapshot.oci.transport import Transport

__all__ = ["Registry"]

_CHUNK_BYTES = 1 << 20
_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(?:\d+|\*)\Z")


class Registry(ImageStore):
    """A repository. Manifests are compared with their digest; ranges of blobs cannot be compared here."""

    def __init__(self, transport: Transport, repository: str) -> None:
        self._transport = transport
        self._repository = repository
        self._root = f"/v2/{repository}"
        self._pull = f"repository:{repository}:pull"
        self._push = f"repository:{repository}:pull,push"

    @property
    @override
    def location(self) -> str:
        return f"{self._transport.base}/{self._repository}"

    @override
    def manifest(self, name: str) -> StoredManifest:
        digest = name if name.startswith(("sha256:", "sha512:")) else None
        shown = check_digest(name) if digest else check_tag(name)

        def attempt() -> StoredManifest:
            response = self._transport.request(
                "GET",
                f"{self._root}/manifests/{shown}",
                scope=self._pull,
                headers={"Accept": ", ".join(ACCEPTED)},
            )
            kind = response.headers.get("Content-Type", "").partition(";")[0].strip()
            # Read one byte more than allowed, to detect a longer document.
            data = _body(response, MAX_MANIFEST_BYTES + 1)
            return StoredManifest(data, kind, digest_of(data))

        found = self._transport.repeated(attempt)
        if len(found.data) > MAX_MANIFEST_BYTES:
            raise IntegrityError(
                f"{self.location}: manifest {name} has more than {MAX_MANIFEST_BYTES} bytes"
            )
        if digest is None:
            return found
        verified(found.data, digest, name=f"{self.location}: manifest {name}")
        return StoredManifest(found.data, found.media_type, digest)

    @override
    def blob_range(self, digest: str, offset: int, size_bytes: int) -> bytes:
        if size_bytes == 0:
            return b""
        url = f"{self._root}/blobs/{check_digest(digest)}"

        def attempt() -> bytes:
            response = self._transport.request(
                "GET",
                url,
                scope=self._pull,
                headers={
                    "Range": f"bytes={offset}-{offset + size_bytes - 1}",
                    # The stored bytes, because offsets would differ behind a proxy that compresses.
                    "Accept-Encoding": "identity",
                },
            )
            if response.status == 206:
                _check_range(response, offset, size_bytes, url)
                return _body(response, size_bytes + 1)
            # A registry or proxy without ranges sends the whole blob, whose beginning is then discarded.
            return _body(response, size_bytes, skip_bytes=offset)

        data = self._transport.repeated(attempt)
        if len(data) != size_bytes:
            raise IntegrityError(
                f"{self.location}: blob {digest} gives {len(data)} of the {size_bytes} bytes "
                f"wanted at offset {offset}; it was cut short, or the registry miscounts"
            )
        return data

    @override
    def blob_chunks(self, blob: Descriptor) -> Iterator[bytes]:
        return checked_chunks(blob, self._resumed(blob), name=self.location)

    @override
    def has_blob(self, digest: str) -> bool:
        try:
            self._sent("HEAD", f"{self._root}/blobs/{check_digest(digest)}", scope=self._pull)
        except FileNotFoundError:
            return False
        return True

    @override
    def push_blob(self, blob: Descriptor, opened: Opened) -> None:
        if self.has_blob(blob.digest):
            return
        # Compare before sending, because a registry would only report that the digest does not match.
        with opened() as source:
            chunks = iter(lambda: source.read(_CHUNK_BYTES), b"")
            for _ in checked_chunks(blob, chunks, name="what is pushed"):
                pass

        def attempt() -> None:
            started = self._transport.request(
                "POST", f"{self._root}/blobs/uploads/", scope=self._push, body=b""
            )
            # Read it to its end, so that the connection can be used for the upload, too.
            started.drain_conn()
            location = started.headers.get("Location", "")
            # The location may have a query of its own, such as a token.
            url = f"{location}{'&' if '?' in location else '?'}{urlencode({'digest': blob.digest})}"
            headers = {
                # Without a length the client would send chunks, and the registry would learn the size only at the end.
                "Content-Type": "application/octet-stream",
                "Content-Length": str(blob.size),
            }
            self._transport.request(
                "PUT", url, scope=self._push, headers=headers, body=opened
            ).drain_conn()

        self._transport.repeated(attempt)

    @override
    def push_manifest(self, data: bytes, media_type: str, tag: str) -> str:
        parse_manifest(data, media_type, name=f"{self.location}: new manifest")
        self._sent(
            "PUT",
            f"{self._root}/manifests/{check_tag(tag)}",
            scope=self._push,
            headers={"Content-Type": media_type},
            body=data,
        )
        return digest_of(data)

    @override
    def close(self) -> None:
        self._transport.close()

    def _resumed(self, blob: Descriptor) -> Iterator[bytes]:
        """Yield a blob's bytes; a broken connection is replaced by one that continues from there."""
        at = 0
        while at < blob.size:
            headers = {"Accept-Encoding": "identity"}
            if at:
                headers["Range"] = f"bytes={at}-{blob.size - 1}"
            url = f"{self._root}/blobs/{blob.digest}"
            ask = partial(self._transport.request, "GET", url, scope=self._pull, headers=headers)
            response = self._transport.repeated(ask)
            before, is_rest = at, response.status == 206
            if is_rest:
                _check_range(response, at, blob.size - at, url)
            came = response.stream(_CHUNK_BYTES, decode_content=False)
            try:
                for chunk in after(0 if is_rest else at, came):
                    at += len(chunk)
                    yield chunk
            # The received bytes are kept; the check below decides whether they are enough to continue.
            except (HTTPError, OSError):
                pass
            finally:
                # A response that was read to its end is in the pool already; the connection of another one is useless.
                response.close()
            # Every connection must bring 1 MiB, or the rest. If it brings less, a range request of that size follows,
            # which counts attempts and gives up.
            if at < min(before + _CHUNK_BYTES, blob.size):
                size = min(_CHUNK_BYTES, blob.size - at)
                chunk = self.blob_range(blob.digest, at, size)
                at += len(chunk)
                yield chunk

    def _sent(
        self,
        method: str,
        url: str,
        *,
        scope: str = "",
        headers: Mapping[str, str] | None = None,
        body: bytes | None = None,
    ) -> BaseHTTPResponse:
        """Send a request whose answer has no needed body; repeat it while there is no answer."""

        def attempt() -> BaseHTTPResponse:
            response = self._transport.request(method, url, scope=scope, headers=headers, body=body)
            response.drain_conn()
            return response

        return self._transport.repeated(attempt)


def _check_range(response: BaseHTTPResponse, offset: int, size_bytes: int, url: str) -> None:
    """Raise unless exactly the requested range follows."""
    # Nothing else would show it, because a part of a blob has no digest of its own.
    said = response.headers.get("Content-Range", "")
    match = _CONTENT_RANGE.match(said)
    if match is None or (int(match[1]), int(match[2])) != (offset, offset + size_bytes - 1):
        response.close()
        raise IntegrityError(
            f"GET {url}: answers with range {said!r} where bytes {offset}-{offset + size_bytes - 1} "
            "were asked; the registry or a proxy before it is broken"
        )


def _body(response: BaseHTTPResponse, size_bytes: int, *, skip_bytes: int = 0) -> bytes:
    """Return up to ``size_bytes`` of a body after ``skip_bytes``, and release its connection.

    Raises:
        UnavailableError: The connection broke.
    """
    parts: list[bytes] = []
    wanted = size_bytes
    try:
        while wanted > 0:
            part = response.read(min(_CHUNK_BYTES, skip_bytes or wanted), decode_content=False)
            if not part:
                break
            if skip_bytes:
                skip_bytes -= len(part)
                continue
            parts.append(part)
            wanted -= len(part)
    except (HTTPError, OSError) as error:
        raise UnavailableError(f"{response.url}: the answer broke off: {error}") from error
    finally:
        if wanted > 0:
            response.release_conn()
        else:
            response.close()  # more may follow, and is not wanted
    return b"".join(parts)
