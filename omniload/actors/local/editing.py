"""Changing the mix of a plane of threads."""

from typing import TYPE_CHECKING

from omniload.actors.edits import taken_within
from omniload.machine.messages import ChangeAsked
from omniload.mix.edits.answers import EditRequest, EditTaken
from omniload.mix.edits.edit import AddSource, SkipShard
from omniload.mix.edits.shards import shard_meant

if TYPE_CHECKING:
    from omniload.actors.local.plane import LocalPlane

__all__ = ["changed_by"]


def changed_by(plane: "LocalPlane", request: EditRequest) -> EditTaken:
    """Have the planner take a change up; a source that is added is opened first, a shard looked for.

    Raises:
        OmniloadError: It is refused, and nothing has changed.
    """
    facts, change = None, request.change
    if isinstance(change, SkipShard):
        names = plane.planner.history().latest.names
        change = shard_meant(change, names, [plane.loader.look_for_shard(change)])
    if isinstance(change, AddSource):
        history = plane.planner.history()
        mix = history.edited(change, request.at or history.edited_to).latest
        facts = plane.loader.open_also(len(mix.names) - 1, mix)
        plane.constructor.know(mix)
    asked = ChangeAsked(change=change, at=request.at, facts=facts)
    return taken_within(plane.planner.change(asked))
