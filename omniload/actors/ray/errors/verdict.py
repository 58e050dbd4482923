"""What an error of Ray says of the actor that was asked: whether it has ended, may live, or is told as it is.

::

    ENDED      ──▶ whoever takes its place is asked
    UNREACHED  ──▶ asked again, or whoever takes its place by then: the roster decides whether it is replaced
    UNHEARD    ──▶ likewise: it may have done what it was asked, and commands are safe to repeat
    REFUSED    ──▶ whoever asked is told, with what Ray says
    FAULT      ──▶ told as a fault of omniload
"""

from enum import Enum

from omniload.actors.ray.environment import RayActorError, RayError, RayTaskError

__all__ = ["VERDICTS", "Verdict", "is_lost", "may_live", "verdict_of"]


class Verdict(Enum):
    """What has become of an actor, by the error of a call to it."""

    ENDED = "ended"
    """Its process is gone with itself, its host or its bundle, or was never started there."""
    UNREACHED = "unreached"
    """Its process may live, stopped or cut off."""
    UNHEARD = "unheard"
    """Its answer is lost, with the node that held it or on the way; its process may live."""
    REFUSED = "refused"
    """Ray could not do it, or not in time."""
    FAULT = "fault"
    """A call that omniload never makes would raise it."""


VERDICTS: dict[str, Verdict] = {
    # Some are of the latest releases only, so all are known by name.
    "RayError": Verdict.REFUSED,
    "ActorDiedError": Verdict.ENDED,
    "RayActorError": Verdict.ENDED,
    "WorkerCrashedError": Verdict.ENDED,
    "NodeDiedError": Verdict.ENDED,
    # Workers end with the raylet of their host; the one of this host is watched by every rank.
    "LocalRayletDiedError": Verdict.ENDED,
    # A Ray that is given ends actors as its host's memory runs out, and names no actor where it tells so.
    "OutOfMemoryError": Verdict.ENDED,
    # The node that it is to be on is gone: the next member is placed anew.
    "ActorUnschedulableError": Verdict.ENDED,
    "TaskUnschedulableError": Verdict.ENDED,
    "ActorPlacementGroupRemoved": Verdict.ENDED,
    "TaskPlacementGroupRemoved": Verdict.ENDED,
    "ActorUnavailableError": Verdict.UNREACHED,
    "RpcError": Verdict.UNREACHED,
    # Answers over 100 kB lie on the actor's node, and are lost with it, or with what is left of its memory.
    "ObjectLostError": Verdict.UNHEARD,
    "ObjectFetchTimedOutError": Verdict.UNHEARD,
    "ObjectReconstructionFailedError": Verdict.UNHEARD,
    "OwnerDiedError": Verdict.UNHEARD,
    "ReferenceCountingAssertionError": Verdict.UNHEARD,
    # A signal that reached the actor alone, such as SIGINT, ended the call and not the process.
    "TaskCancelledError": Verdict.UNHEARD,
    "GetTimeoutError": Verdict.REFUSED,
    "PlasmaObjectNotAvailable": Verdict.REFUSED,
    "ObjectStoreFullError": Verdict.REFUSED,
    "OutOfDiskError": Verdict.REFUSED,
    "RuntimeEnvSetupError": Verdict.REFUSED,
    "AuthenticationError": Verdict.REFUSED,
    # Also what could not be read as it came, for which the text has the reason.
    "RaySystemError": Verdict.REFUSED,
    # Of a closed Ray: a member is ended behind it.
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
"""By the name of an error; one of a release to come counts as the class that it is made from."""


def verdict_of(error: BaseException) -> Verdict | None:
    """Return what an error of Ray says; ``None`` for one that was raised in the actor's code, or is not Ray's."""
    while isinstance(error, RayTaskError):  # an actor tells of what one that it asked has told
        error = error.cause
    if not isinstance(error, RayError):
        return None
    if isinstance(error, RayActorError) and getattr(error, "actor_init_failed", False):
        return Verdict.FAULT  # its own code failed as it was made
    names = (of.__name__ for of in type(error).__mro__)
    return next((VERDICTS[name] for name in names if name in VERDICTS), None)


def is_lost(error: BaseException) -> bool:
    """Tell whether a call was not answered though Ray took it: whoever has the actor's place by then is to be asked.

    Its process has ended, cannot be reached, or its answer was lost; see ``may_live``.
    """
    return verdict_of(error) is Verdict.ENDED or may_live(error)


def may_live(error: BaseException) -> bool:
    """Tell whether a call is lost whose actor may live: nobody need take its place, so the same one is asked again."""
    return verdict_of(error) in {Verdict.UNREACHED, Verdict.UNHEARD}
