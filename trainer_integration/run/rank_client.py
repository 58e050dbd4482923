"""How a rank gets its batches: it joins the launcher's data plane, or one of all ranks, or runs one itself."""

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from omniload.actors.address import PlaneAddress
from omniload.actors.plane import PlaneSpec, RankHandle
from omniload.client import Client
from omniload.front.launch import Place, launch_of
from omniload.plan.place_tree import ClientPlaceTree
from snapshot.startup.events import restarted, stage
from trainer_integration.run.rank_spec import RankSpec

__all__ = ["rank_client"]

_JOIN_S = 300.0
"""Longest wait of another launcher's ranks for each other, because hosts start at their own pace."""


@contextmanager
def rank_client(spec: RankSpec) -> Iterator[Client]:
    """Connect to the job's data plane; if the launcher has opened none, open it here."""
    with ExitStack() as stack:
        with stage("data_plane", restarted(spec.attempt)):
            client = _opened(spec, stack)
        yield client


def _opened(spec: RankSpec, stack: ExitStack) -> Client:
    tree = spec.train.place_tree
    if spec.plane is not None:
        return stack.enter_context(Client(_handle(spec.plane, tree, spec.rank)))
    plane_spec = PlaneSpec(
        mix=spec.mix,
        base_dir=spec.base_dir,
        tree=tree,
        run_dir=spec.train.run_folder(spec.folder),
        state=spec.loader_state,
        num_steps=spec.train.steps,
        restarts=spec.attempt,
        cache_dir=spec.cache_dir,
    )
    # Imports for reading data, which a rank whose plane is open elsewhere does not need.
    if spec.train.parallel.num_ranks > 1:
        from omniload.front.openers import OpenTogether  # noqa: PLC0415

        # Rank 0 opens the plane, as it does for any loop that calls omniload.open.
        launch, place = launch_of(os.environ), _place(tree, spec.rank)
        open_client = OpenTogether(plane_spec, place, launch, None, _JOIN_S)
        return open_client(stack, spec.loader_state)
    from omniload.actors.local.plane import LocalPlane  # noqa: PLC0415

    plane = stack.enter_context(LocalPlane(plane_spec))
    return stack.enter_context(Client(plane.handle(spec.rank)))


def _place(tree: ClientPlaceTree, rank: int) -> Place:
    return Place(
        dp_rank=tree.coordinates_of(rank)["dp"],
        dp_size=tree.size_of("dp"),
        cp_rank=tree.slice_of(rank)[0],
        cp_size=tree.size_of("cp"),
    )


def _handle(plane: PlaneAddress, tree: ClientPlaceTree, rank: int) -> RankHandle:
    from omniload.actors.ray.rank.joining import handle_in  # noqa: PLC0415 -- an extra, absent for local users

    return handle_in(plane, tree.coordinates_of(rank)["dp"], tree.slice_of(rank)[0])
