"""How long one request of a client to S3, SFTP or WebHDFS may take, and that the client does not repeat it.

Clients wait minutes by themselves, and repeat a request in silence. A request here ends within a third of what its
call may take (``deadlines.request_limit_s``); whether it is made again is for ``stores.retry`` to say, which counts.
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
    """Return a client of Arrow's like ``s3`` that gives one request up in time, and makes it once."""
    from pyarrow import fs as pafs  # noqa: PLC0415 -- stores of fsspec do without

    # A URL cannot say it, and the client takes its options in no other way.
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
    """Return options by which a client of fsspec gives one request up in time, where it has any."""
    limit_s = request_limit_s(give_up_after_s)
    if scheme in {"s3", "s3a"}:
        limits = {"connect_timeout": limit_s, "read_timeout": limit_s}
        return {"config_kwargs": {**limits, "retries": {"total_max_attempts": 1}}}
    if scheme in {"sftp", "ssh"}:
        return {"timeout": limit_s, "banner_timeout": limit_s, "auth_timeout": limit_s}
    return {}


def limit_webhdfs(webhdfs: "fsspec.AbstractFileSystem", give_up_after_s: float) -> None:
    """Give every request of a session a time limit: it has none by itself."""
    request = webhdfs.session.request
    webhdfs.session.request = partial(request, timeout=request_limit_s(give_up_after_s))
