"""Answers of Ray actors, with the errors that were raised in them."""

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from functools import partial
from typing import Any, TypeVar

from omniload import __version__
from omniload.actors.gate import CLOSED
from omniload.actors.ray.environment import RayError, RayTaskError, ray
from omniload.actors.ray.errors.verdict import Verdict, is_lost, may_live, not_imported, verdict_of
from omniload.base.clock import Deadline
from omniload.base.concurrency.held_signals import let_signals_in
from omniload.base.concurrency.threads import DaemonPool
from omniload.base.errors import (
    ConfigError,
    DefectError,
    OmniloadError,
    UnavailableError,
    project_error,
)
from omniload.base.log import get_logger, place_of_lines

__all__ = [
    "answer_to",
    "ask_head",
    "call_in_thread",
    "error_of",
    "future_of",
    "has_ended",
    "log_failure",
    "loss_of",
    "plain_error",
    "value_of",
    "wait_for_future",
    "wait_for_head",
    "wait_for_ref",
    "why_ended",
]

T = TypeVar("T")
_TURN_S = 0.2
"""Ray must not be shut down under a call, so waits check this often whether to leave, for example after Ctrl-C."""
_ASKED_HEAD: "set[Future[Any]]" = set()
"""Unanswered questions to Ray's head."""
_LOG = get_logger(__name__)


def ask_head(ask: Callable[[], T], until: threading.Event | None = None) -> "Future[T]":
    """Ask Ray's head something in a thread of its own; return the future answer.

    If the head is unreachable, the call returns after a minute or never; the thread lets a caller on another host limit
    its wait.

    Args:
        ask: The call.
        until: Set once the processes that Ray starts in that call may end; Linux ends them with their thread.
    """
    answer: Future[T] = Future()
    _ASKED_HEAD.add(answer)
    answer.add_done_callback(_ASKED_HEAD.discard)

    def run() -> None:
        try:
            answer.set_result(ask())
        except Exception as error:  # noqa: BLE001 -- passed on to the caller
            answer.set_exception(error)
        if until is not None:
            until.wait()

    threading.Thread(target=run, name="omniload-head", daemon=True).start()
    return answer


def wait_for_head(within_s: float) -> bool:
    """Wait for the calls of ``ask_head``, because Ray must not be shut down under one; return whether all ended."""
    return not wait(tuple(_ASKED_HEAD), within_s).not_done


def answer_to(
    ref: Any,  # noqa: ANN401 -- Ray's references have no static type
    role: str,
    *,
    limit_s: float = 60.0,
    check: Callable[[], None] = lambda: None,
) -> Any:  # noqa: ANN401 -- whatever the actor's method returns
    """Wait for an answer.

    Args:
        ref: Reference of the future answer.
        role: The role that was asked, for messages.
        limit_s: Longest wait.
        check: Called several times a second; an error that it raises ends the wait.

    Raises:
        OmniloadError: The actor raised it; ``UnavailableError`` naming ``role`` if the actor has died
            or gave no answer in time.
    """
    if not wait_for_ref(ref, limit_s, check):
        raise UnavailableError(
            f"{role} gave no answer within {limit_s:.0f} s; it is stopped or stuck, "
            f"end the job and start again from the last checkpoint{place_of_lines(role)}"
        )
    try:
        return value_of(ref)
    except RayError as error:
        raise plain_error(error, role) from None


def wait_for_ref(ref: Any, timeout_s: float, check: Callable[[], None]) -> bool:  # noqa: ANN401 -- as above
    """Wait for an actor's answer in short turns, calling ``check`` before each; return whether it came in time.

    Raises:
        UnavailableError: Ray has ended on this host.
    """
    deadline = Deadline(timeout_s)
    while True:
        check()
        let_signals_in()
        try:
            # Look at least once, even if no time is left.
            if deadline.wait(lambda turn_s: ray.wait([ref], timeout=turn_s)[0], _TURN_S):
                return True
        except OSError as error:
            raise _of_ended_ray(error) from None
        if deadline.left_s() <= 0:
            return False


def wait_for_future(answer: "Future[Any]", timeout_s: float, check: Callable[[], None]) -> bool:
    """Wait for a future in short turns, calling ``check`` before each; return whether it was done in time."""
    deadline = Deadline(timeout_s)
    while not answer.done():
        check()
        let_signals_in()
        deadline.wait(partial(wait, [answer]), _TURN_S)
        if deadline.left_s() <= 0:
            break
    return answer.done()


def value_of(ref: Any) -> Any:  # noqa: ANN401 -- as above
    """Return an answer that has come.

    Raises:
        RayError: The actor raised an error, in Ray's wrapping.
        UnavailableError: Ray has ended on this host.
    """
    try:
        return ray.get(ref)
    except RayError:  # an actor's own OSError is one as well
        raise
    except OSError as error:
        raise _of_ended_ray(error) from None


def _of_ended_ray(error: OSError) -> UnavailableError:
    # "Broken pipe" and the like, from the connection to the raylet, which ends with the opener of the plane.
    return UnavailableError(
        f"Ray has ended on this host ({error}), as it does with the process that opened the data plane; start again "
        "from the last checkpoint"
    )


def future_of(ref: Any, role: str) -> "Future[Any]":  # noqa: ANN401 -- as above
    """Return a future of the answer; its error is the original one of the actor."""
    answer: Future[Any] = Future()

    def settle(done: "Future[Any]") -> None:
        if (error := done.exception()) is None:
            answer.set_result(done.result())
        else:
            answer.set_exception(plain_error(error, role))

    ref.future().add_done_callback(settle)
    return answer


def call_in_thread(call: Callable[[], T], pool: DaemonPool) -> "Future[T]":
    """Let a thread call an actor and wait for the answer, which is then ready when it is needed.

    ``error_of`` returns the error of the call or of the actor.
    """
    return pool.submit(partial(_called, call))


def _called(call: Callable[[], T]) -> T:
    try:
        return call()
    except RayError:  # an actor's own OSError is one as well
        raise
    except OSError as error:
        raise _of_ended_ray(error) from None


def error_of(answer: "Future[Any]") -> BaseException | None:
    """Return the error of a finished answer, if any; a call that a closed plane has never begun has one too."""
    return UnavailableError(CLOSED) if answer.cancelled() else answer.exception()


def loss_of(ref: Any) -> BaseException | None:  # noqa: ANN401 -- as above
    """Return the error by which a call was lost; ``None`` if it is slow, was answered, or failed in the actor."""
    if not wait_for_ref(ref, 0.0, lambda: None):
        return None
    try:
        value_of(ref)
    except RayError as error:
        return error if is_lost(error) else None
    return None


def has_ended(ref: Any) -> bool:  # noqa: ANN401 -- as above
    """Return whether a call ended because its actor's process ended."""
    loss = loss_of(ref)
    return loss is not None and not may_live(loss)


def why_ended(error: BaseException | None) -> str:
    """Return what has become of an actor, by the error of a call that fails only if its process ends or is cut off."""
    name = type(error).__name__
    # Compared by name, because only recent releases of Ray have this class.
    if name == "ActorUnschedulableError":
        return f"the host that was chosen for it is gone, or cut off ({name})"
    if error is not None and may_live(error):
        return f"its process cannot be reached ({name})"
    return f"its process has ended ({name})"


def log_failure(ref: Any, role: str, task: str) -> None:  # noqa: ANN401 -- as above
    """Log the error of a call that nobody waits for; for a lost role without a remedy, because it is replaced."""

    def report(done: "Future[Any]") -> None:
        if not done.cancelled() and (error := done.exception()) is not None:
            why = "it was lost meanwhile" if is_lost(error) else plain_error(error, role)
            _LOG.warning("%s did not %s: %s", role, task, why)

    ref.future().add_done_callback(report)


def plain_error(error: BaseException, role: str) -> OmniloadError:
    """Unwrap Ray's error; a dead actor becomes an ``UnavailableError``, an unforeseen error a ``DefectError``.

    A worker without this release of omniload becomes a ``ConfigError``.
    """
    if isinstance(error, RayTaskError):
        return _raised_in(error, role)
    if lacking := not_imported(error):
        return ConfigError(
            f"{role} cannot run in the workers of this Ray ({lacking}): they need omniload {__version__} as this "
            "process has it, with the same extras; install it where the nodes of the Ray are started, or have the "
            "runtime_env of the job bring it"
        )
    name = type(error).__name__
    match verdict_of(error):
        case None:
            return project_error(error, role)
        case Verdict.FAULT:
            return _defect(role, error)
        case Verdict.ENDED:
            what = f"{role} has died ({name})"
        case Verdict.UNREACHED:
            what = f"{role} cannot be reached ({name}): it is stopped, or its host is cut off"
        case Verdict.UNHEARD:
            what = f"the answer of {role} was lost ({name})"
        case _:
            what = f"{role} gave no answer: {name}: {error}"
    return UnavailableError(f"{what}; start again from the last checkpoint{place_of_lines(role)}")


def _raised_in(error: RayTaskError, role: str) -> OmniloadError:
    """Return the error that an actor's method raised."""
    cause = error.cause
    if isinstance(cause, OmniloadError):
        return cause
    # Ray's base class itself means that the error could not be pickled.
    if isinstance(cause, RayError) and type(cause) is not RayError:
        return plain_error(cause, role)
    # Only the text has crossed the process boundary, with the place in the actor.
    _LOG.error("%s failed: %s", role, error)
    if isinstance(cause, RayError) or not isinstance(cause, BaseException):
        return _defect(role, error)
    return project_error(cause, role)


def _defect(role: str, error: BaseException) -> DefectError:
    return DefectError(
        f"a fault of omniload itself in {role}: {error}; please report it with the log{place_of_lines(role)}"
    )
