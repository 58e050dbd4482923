"""A rank of a plane that is served: ``omniload.join``."""

from collections.abc import Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from typing_extensions import override

from omniload.actors.address import PlaneAddress
from omniload.actors.opening import require_ray
from omniload.base.errors import ConfigError, ShownAtOnce
from omniload.base.linux.network import host_id
from omniload.base.state import Json
from omniload.client import Client
from omniload.front.arguments import check_choices, require_rank, timeout_from
from omniload.front.batches.rows import Labels
from omniload.front.loader import Loader, OpenClient
from omniload.front.opening import form_of
from omniload.front.plane_note import PlaneNote, note_of
from omniload.front.spec import MixFacts
from omniload.front.turn import take_turn_to_train
from omniload.machine.messages import ResizeAsked
from omniload.mix.journal.notes import RunNotes

__all__ = ["join"]


@ShownAtOnce()
def join(  # noqa: PLR0913 -- keywords of a call that users make
    address: str | Path,
    *,
    rank: int,
    world_size: int,
    step: int | None = None,
    generation: int | None = None,
    arrays: Literal["auto", "torch", "numpy"] = "auto",
    labels: Labels = "shifted",
    device: object = None,
    timeout: float = 120.0,
) -> Loader:
    """Join a plane that ``serve`` has brought up, or will bring up in time. The loader joins with its first batch.

    Args:
        address: Folder or ``HOST:PORT`` of the plane, as given to ``serve``.
        rank: Number of this rank among ``world_size``, from 0. Each rank gets different samples.
        world_size: Number of ranks from ``step`` on. Ranks that have joined already call ``Loader.resize`` with the
            same number.
        step: First step of these ranks, which no earlier rank has committed. ``None`` for the ranks that the plane was
            served for, from its first step on.
        generation: Number of these ranks, which rises with each change. ``None`` for the current ranks. ``None`` also
            joins the next ranks in the place of a lost rank, if both are on the plane's host; on another host, give the
            number.
        arrays: As for ``open``.
        labels: As for ``open``.
        device: As for ``open``.
        timeout: Seconds to wait for the plane to be served.

    Raises:
        ConfigError: An argument is refused, the plane belongs to another user, or it listens only on another host.
        UnavailableError: No plane is served there in time.
    """
    check_choices(labels=labels, arrays=arrays)
    timeout = timeout_from(timeout)
    require_rank(rank, world_size, step, generation)
    # Done now and not with the first batch, because the note has the names and sizes of the mix.
    note = note_of(address, timeout)
    asked = _asked_of(note.plane, world_size, step, generation)
    facts = MixFacts(
        names=note.names,
        vocab_size=note.vocab_size,
        num_steps=note.num_steps,
        first_step=note.first_step if step is None else step,
        repeats=note.repeats,
        num_ranks=world_size,
    )
    form = form_of(arrays, labels, device)
    notes = None if note.run_dir is None else RunNotes(note.run_dir, rank)
    return Loader(_JoinServed(note, rank, asked), form, facts, notes=notes)


@dataclass(frozen=True, slots=True)
class _JoinServed(OpenClient):
    """Joins a plane that continues to run without this rank."""

    note: PlaneNote
    rank: int
    asked: ResizeAsked | None

    @override
    def __call__(self, stack: ExitStack, state: Mapping[str, Json] | None) -> Client:
        if state is not None:
            raise ConfigError(
                "a rank that joins takes the step that comes next for all; give the state to omniload.serve"
            )
        require_ray()
        from omniload.actors.ray.rank.joining import handle_in, node_for_rank  # noqa: PLC0415 -- an extra
        from omniload.actors.ray.tokens import use_given_token, use_token  # noqa: PLC0415

        plane, here = self.note.plane, host_id()
        # First, because a process with another open plane must keep that plane's secret of Ray.
        if plane.terms is None or not plane.terms.is_given:
            take_turn_to_train(stack)
        if plane.host != here:
            node = stack.enter_context(closing(node_for_rank(plane, self.note.token)))
            plane = plane.with_node_on(here, node.place)
        elif self.note.token:
            use_token(self.note.token)
        else:
            use_given_token()
        is_connected = plane.host != here
        handle = handle_in(plane, self.rank, is_connected=is_connected, asked=self.asked)
        return stack.enter_context(Client(handle))


def _asked_of(
    plane: PlaneAddress, world_size: int, step: int | None, generation: int | None
) -> ResizeAsked | None:
    if step is None:
        if generation is not None or world_size != plane.sizes["dp"]:
            raise ConfigError(
                f"world_size is {world_size} and generation {generation}, of a plane that was served for "
                f"{plane.sizes['dp']} ranks; give step too, the first one that these ranks train on"
            )
        return None
    return ResizeAsked(dp=world_size, step=step, generation=generation)
