"""Time limits for single requests of clients to S3, SFTP or WebHDFS, which must not repeat requests themselves.

By default, clients wait for minutes, and silently repeat a request. Here, a request ends within a third of the
time of its call (``deadlines.request_limit_s``). Only ``stores.retry``, which counts, decides on another attempt.
"""

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from fusefs.stores.deadlines import request_limit_s

if TYPE_CHECKING:
    # Lazy, so that a user of one of the two does not pay for the import of the other.
    import fsspec
    from pyarrow import fs as pafs

__all__ = ["limit_webhdfs", "limited_s3", "limits_of"]


def limited_s3(s3: "pafs.S3FileSystem", give_up_after_s: float) -> "pafs.S3FileSystem":
    """Return an Arrow client like ``s3`` that gives up one request in time, and makes it only once."""
    from pyarrow import fs as pafs  # noqa: PLC0415 -- stores of fsspec do without

    # A URL cannot set these, and the client accepts its options in no other way.
    _, (given,) = s3.__reduce__()
    limit_s = request_limit_s(give_up_after_s)
    return pafs.S3FileSystem(
        **{
            **{name: value or None for name, value in given.items()},
            "connect_timeout": limit_s,
            "request_timeout": limit_s,
            "retry_strategy": pafs.AwsStandardS3RetryStrategy(max_attempts=1),
        }
    )


def limits_of(scheme: str, give_up_after_s: float) -> Mapping[str, Any]:
    """Return options by which a client of fsspec gives up one request in time, if it has any."""
    limit_s = request_limit_s(give_up_after_s)
    if scheme in {"s3", "s3a"}:
        limits = {"connect_timeout": limit_s, "read_timeout": limit_s}
        return {"config_kwargs": {**limits, "retries": {"total_max_attempts": 1}}}
    if scheme in {"sftp", "ssh"}:
        return {"timeout": limit_s, "banner_timeout": limit_s, "auth_timeout": limit_s}
    return {}


def limit_webhdfs(webhdfs: "fsspec.AbstractFileSystem", give_up_after_s: float) -> None:
    """Give every request of a session a time limit, because it has none by default."""
    request = webhdfs.session.request
    webhdfs.session.request = partial(request, timeout=request_limit_s(give_up_after_s))
