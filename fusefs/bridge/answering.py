"""Every handler ends in an answer or an errno: any other exception would end the mount."""

import errno
import functools
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, ParamSpec, TypeVar

import pyfuse3
import trio

from fusefs.cache import Data
from fusefs.errnos import errno_of
from omniload.base.errors import OmniloadError
from omniload.base.log import get_logger

__all__ = ["all_done", "answered"]

_LOG = get_logger(__name__)
Result = TypeVar("Result")
Arguments = ParamSpec("Arguments")


def answered(
    handler: Callable[Arguments, Coroutine[Any, Any, Result]],
) -> Callable[Arguments, Coroutine[Any, Any, Result]]:
    """Turn every exception of a handler into an errno: any other would end the mount."""

    @functools.wraps(handler)
    async def answer(*arguments: Arguments.args, **named: Arguments.kwargs) -> Result:
        try:
            return await handler(*arguments, **named)
        except pyfuse3.FUSEError:
            raise
        except (OSError, OmniloadError, ValueError) as error:
            number = errno_of(error)
            level = _LOG.error if isinstance(error, OmniloadError) else _LOG.debug
            level("%s: %s (%s)", handler.__name__, error, errno.errorcode.get(number, number))
            raise pyfuse3.FUSEError(number) from error
        # The outermost loop: the mount must outlive a defect of ours.
        except Exception as error:
            _LOG.exception("%s met a defect", handler.__name__)
            raise pyfuse3.FUSEError(errno.EIO) from error

    return answer


async def all_done(futures: list[Future[Data]]) -> None:
    """Suspend until every future is done; their errors are left in them."""
    left = sum(not future.done() for future in futures)
    if not left:
        return
    done = trio.Event()
    token = trio.lowlevel.current_trio_token()

    def count() -> None:
        nonlocal left
        left -= 1
        if left == 0:
            done.set()

    def on_done(_: Future[Data]) -> None:
        # Pool threads report; counting happens on the loop, so it needs no lock.
        token.run_sync_soon(count)

    left = len(futures)
    for future in futures:
        future.add_done_callback(on_done)
    await done.wait()
