"""What an error of Ray says about the called actor: it has ended, may live, or the error is passed on as it is.

::

    ENDED      ──▶ the actor's successor is called
    UNREACHED  ──▶ called again, or its successor if there is one by then: the roster decides whether it is replaced
    UNHEARD    ──▶ likewise: it may have carried out the call, and commands are safe to repeat
    REFUSED    ──▶ the caller receives an error with Ray's reason
    FAULT      ──▶ reported as a fault of omniload
"""

import re
from enum import Enum

from omniload.actors.ray.environment import RayActorError, RayError, RayTaskError

__all__ = ["VERDICTS", "Verdict", "is_lost", "may_live", "not_imported", "verdict_of"]


class Verdict(Enum):
    """State of an actor after a failed call, according to the call's error."""

    ENDED = "ended"
    """The process ended by itself, or with its host or its bundle, or it was never started there."""
    UNREACHED = "unreached"
    """The process may live, but is stopped or cut off."""
    UNHEARD = "unheard"
    """The answer is lost, on its way or with the node that held it; the process may live."""
    REFUSED = "refused"
    """Ray could not carry out the call, or not in time."""
    FAULT = "fault"
    """Only a call that omniload never makes raises this error."""


VERDICTS: dict[str, Verdict] = {
    # Errors are looked up by name because some of them exist only in the latest releases.
    "RayError": Verdict.REFUSED,
    "ActorDiedError": Verdict.ENDED,
    "RayActorError": Verdict.ENDED,
    "WorkerCrashedError": Verdict.ENDED,
    "NodeDiedError": Verdict.ENDED,
    # Workers end together with their host's raylet. Every rank watches the raylet of its own host.
    "LocalRayletDiedError": Verdict.ENDED,
    # A Ray that the user started ends actors when its host runs out of memory, and this error names no actor.
    "OutOfMemoryError": Verdict.ENDED,
    # The node chosen for the actor is gone; the next member is placed anew.
    "ActorUnschedulableError": Verdict.ENDED,
    "TaskUnschedulableError": Verdict.ENDED,
    "ActorPlacementGroupRemoved": Verdict.ENDED,
    "TaskPlacementGroupRemoved": Verdict.ENDED,
    "ActorUnavailableError": Verdict.UNREACHED,
    "RpcError": Verdict.UNREACHED,
    # An answer over 100 kB stays on the actor's node, and is lost with the node or when its memory runs out.
    "ObjectLostError": Verdict.UNHEARD,
    "ObjectFetchTimedOutError": Verdict.UNHEARD,
    "ObjectReconstructionFailedError": Verdict.UNHEARD,
    "OwnerDiedError": Verdict.UNHEARD,
    "ReferenceCountingAssertionError": Verdict.UNHEARD,
    # A signal that reached only the actor, such as SIGINT, ended the call but not the process.
    "TaskCancelledError": Verdict.UNHEARD,
    "GetTimeoutError": Verdict.REFUSED,
    "PlasmaObjectNotAvailable": Verdict.REFUSED,
    "ObjectStoreFullError": Verdict.REFUSED,
    "OutOfDiskError": Verdict.REFUSED,
    "RuntimeEnvSetupError": Verdict.REFUSED,
    "AuthenticationError": Verdict.REFUSED,
    # This error also covers an answer that could not be deserialised; its text has the reason.
    "RaySystemError": Verdict.REFUSED,
    # Raised after Ray was closed. A member may be ended later than its Ray.
    "ActorHandleNotFoundError": Verdict.REFUSED,
    "ActorAlreadyExistsError": Verdict.FAULT,
    "AsyncioActorExit": Verdict.FAULT,
    "CrossLanguageError": Verdict.FAULT,
    "ObjectFreedError": Verdict.FAULT,
    "ObjectRefStreamEndOfStreamError": Verdict.FAULT,
    "OufOfBandObjectRefSerializationException": Verdict.FAULT,
    "PendingCallsLimitExceeded": Verdict.FAULT,
    "RayCgraphCapacityExceeded": Verdict.FAULT,
    "RayChannelError": Verdict.FAULT,
    "RayChannelTimeoutError": Verdict.FAULT,
    "RayDirectTransportError": Verdict.FAULT,
    "StreamingGeneratorReplayInconsistentError": Verdict.FAULT,
    "UnserializableException": Verdict.FAULT,
    "UserCodeException": Verdict.FAULT,
}
"""Verdict by the name of an error. An error class of a later release gets the verdict of its base class."""

_NOT_IMPORTED = re.compile(
    r"^(?:ModuleNotFoundError: |ImportError: |AttributeError: Can't get attribute ).*", re.MULTILINE
)
"""Last line of a trace of Python whose import failed, or found a module without what the sender's has."""


def verdict_of(error: BaseException) -> Verdict | None:
    """Return what an error of Ray says; ``None`` if the actor's own code raised it, or if it is not Ray's."""
    while isinstance(error, RayTaskError):  # an actor may pass on the error of its own call
        error = error.cause
    if not isinstance(error, RayError):
        return None
    if isinstance(error, RayActorError) and getattr(error, "actor_init_failed", False):
        return Verdict.FAULT  # the actor's own code failed in its constructor
    names = (of.__name__ for of in type(error).__mro__)
    return next((VERDICTS[name] for name in names if name in VERDICTS), None)


def not_imported(error: BaseException) -> str:
    """Return what the worker of an actor could not import, so that none of the actor's code ran; empty if it could.

    A given Ray may have no omniload in its workers, or another release. Only Ray's text says so, with a trace in it.
    """
    if isinstance(error, RayError) and verdict_of(error) in {Verdict.FAULT, Verdict.REFUSED}:
        found = _NOT_IMPORTED.findall(str(error))
        return str(found[-1]) if found else ""
    return ""


def is_lost(error: BaseException) -> bool:
    """Return whether Ray accepted a call that was then not answered, so that the present holder must be asked.

    The process has ended or cannot be reached, or its answer was lost; see ``may_live``.
    """
    return verdict_of(error) is Verdict.ENDED or may_live(error)


def may_live(error: BaseException) -> bool:
    """Return whether a lost call's actor may still live, so that the same actor is asked again without a successor."""
    return verdict_of(error) in {Verdict.UNREACHED, Verdict.UNHEARD}
