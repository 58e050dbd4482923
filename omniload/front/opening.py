"""``omniload.open``: a mix in, batches of this rank out, in one process or many."""

import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, Unpack

from omniload.actors.plane import PlaneSpec
from omniload.base.errors import ConfigError, ShownAtOnce
from omniload.base.extras import refuse_namesake
from omniload.base.linux.folders import whole_path
from omniload.base.log import get_logger
from omniload.base.state import Json
from omniload.batch.arrays import Arrays, NumpyArrays
from omniload.front.arguments import check_choices, steps_of, timeout_from
from omniload.front.batches.rows import Labels
from omniload.front.delivery import BatchForm
from omniload.front.detached.attaching import as_detached
from omniload.front.launch import DeviceMesh, Launch, Place, group_of_torch, launch_of, place_of
from omniload.front.loader import Loader, OpenClient
from omniload.front.openers import OpenAlone, OpenTogether, torch_part
from omniload.front.settings import Settings
from omniload.front.spec import MixFacts, Runtime, kept_in, spec_of
from omniload.mix.config import MixConfig
from omniload.mix.journal.notes import RunNotes
from omniload.mix.run_record import RUN_RECORD_NAME
from omniload.mix.schema.splits import TRAIN
from omniload.mix.sources import tags_of, values_per_patch_of
from omniload.plan.strategies import deals_images
from omniload.source.tokenize import open_tokenizer

__all__ = [
    "form_at",
    "form_of",
    "open_mix",
    "vocab_size_of",
]

_LOG = get_logger(__name__)


@ShownAtOnce()
def open_mix(  # noqa: PLR0913 -- keywords of the one call that users make
    mix: str | Path | Mapping[str, object] | MixConfig,
    *,
    mesh: DeviceMesh | None = None,
    rank: int | None = None,
    world_size: int | None = None,
    state: Mapping[str, Json] | None = None,
    split: str | None = None,
    runtime: Runtime = "auto",
    timeout: float = 120.0,
    address: str | Path | None = None,
    run_dir: str | Path | None = None,
    steps: int | None = None,
    arrays: Literal["auto", "torch", "numpy"] = "auto",
    labels: Labels = "shifted",
    device: object = None,
    **settings: Unpack[Settings],
) -> Loader:
    """Open a mix for this rank.

    With one process, the plane runs as threads. With several, rank 0 brings it up, and the others join with their first
    batch; they meet through torch's process group, ``MASTER_ADDR`` and ``MASTER_PORT``, or a folder that all see.
    If ``run_dir`` holds a run and no ``state`` is given, one process opens with its first batch, too.

    Args:
        mix: The mix file, its contents as a mapping, or its model.
        mesh: torch's ``DeviceMesh``. Ranks along dp get different samples, along cp different slices; others share.
        rank: Number of this process. By default from the variables of torchrun or Slurm, or torch's process group.
        world_size: Number of processes of the job; defaults as for ``rank``.
        state: Result of ``state_dict``, to continue from.
        split: A split that the mix holds out, to read once, as for evaluation.
        runtime: ``local`` for threads (one process), ``ray`` for actors, ``auto`` for whichever fits.
        timeout: Seconds that ranks wait for each other to join.
        address: A folder that all ranks see, in place of torch's store.
        run_dir: Folder for journal and mix of the run, read by ``omniload mix show`` and others; none by default.
        steps: The step after the last; by default, the run ends with the data.
        arrays: ``torch`` for tensors, ``numpy`` for arrays, ``auto`` for torch if it is installed.
        labels: ``shifted`` (the next token), or ``unshifted`` for models that shift labels themselves.
        device: Device of a batch's tensors, by default the CPU. For a GPU, the next batch is copied ahead.
        **settings: Settings of the mix to override, such as ``prefetch_steps=8`` or ``pack_length=4096``.

    Raises:
        ConfigError: The mix, a setting, the rank or the mesh is refused.
        StateError: ``state`` does not fit the mix or the data.
        UnavailableError: A rank has not joined in time.
    """
    _refuse_misuse(split, run_dir)
    check_choices(runtime=runtime, labels=labels, arrays=arrays)
    timeout = timeout_from(timeout)
    launch = launch_of(os.environ, rank=rank, world_size=world_size, group=group_of_torch())
    place = place_of(launch, mesh)
    spec = spec_of(mix, split, settings, runtime, place, launch.restarts)
    spec = as_detached(replace(kept_in(run_dir, mix, spec), num_steps=steps_of(steps)))
    form = form_at(form_of(arrays, labels, device), place, launch.rank, spec.mix)
    notes = _notes_in(spec, launch)
    if launch.world_size == 1:
        loader = _loader_of(OpenAlone(spec), form, spec, state, notes, assumed_alone=rank is None)
        return _started(loader, spec, state)
    meet = None if address is None else whole_path(address)
    return _loader_of(OpenTogether(spec, place, launch, meet, timeout), form, spec, state, notes)


def _started(loader: Loader, spec: PlaneSpec, state: Mapping[str, Json] | None) -> Loader:
    """Return the loader of one rank, started, so that faults are raised here: there is no other rank to wait for."""
    # A run that was begun may get its state later, by ``load_state_dict``. If it were started at step 0 meanwhile, it
    # would record its steps anew, and lose the notes in its folder, or a store, about steps before that state.
    was_begun = spec.run_dir is not None and (
        bool(spec.mix.runtime.journal) or (spec.run_dir / RUN_RECORD_NAME).exists()
    )
    if state is not None or not was_begun:
        try:
            loader.start()
        except BaseException:  # Ctrl-C arrived just after the opening, and no caller has the loader
            loader.close()
            raise
    return loader


def _notes_in(spec: PlaneSpec, launch: Launch) -> RunNotes | None:
    """Return the notes of this rank in its run's folder; ``None`` without a folder, whose lack is logged."""
    if spec.run_dir is None:
        if spec.mix.balance.fit_every:
            _LOG.warning(
                "balance.fit_every needs the folder of a run, in which ranks report times; give run_dir="
            )
        return None
    return RunNotes(spec.run_dir, launch.rank)


def _refuse_misuse(split: str | None, run_dir: str | Path | None) -> None:
    """Refuse another distribution's omniload, a worker of torch's DataLoader, and the run of a split."""
    refuse_namesake()
    # Looked up and not imported: a worker of torch has the module loaded, and a loop without torch does not need it.
    torch_data = sys.modules.get("torch.utils.data")
    worker = None if torch_data is None else torch_data.get_worker_info()
    if worker is not None:
        raise ConfigError(
            f"the mix is opened in worker {worker.id} of {worker.num_workers} of torch's DataLoader; every worker "
            "would hand out the same batches: open it in the trainer's process, it prefetches by itself"
        )
    if split is not None and run_dir is not None:
        raise ConfigError(
            f"split is {split!r} and run_dir is {str(run_dir)!r}, but the folder of a run is for training, not for a "
            "held-out split; leave one of them out"
        )


def vocab_size_of(spec: PlaneSpec) -> int | None:
    """Return the number of tokens of the tokenizer; ``None`` for a mix of token columns alone."""
    config = spec.mix.tokenizer
    return None if config is None else open_tokenizer(config, spec.base_dir).vocab_size


def _loader_of(
    open_client: OpenClient,
    form: BatchForm,
    spec: PlaneSpec,
    state: Mapping[str, Json] | None,
    notes: RunNotes | None,
    *,
    assumed_alone: bool = False,
) -> Loader:
    together = open_client if isinstance(open_client, OpenTogether) else None
    facts = MixFacts(
        names=spec.mix.names,
        tags=tags_of(spec.mix.sources),
        vocab_size=vocab_size_of(spec),
        num_steps=spec.num_steps,
        repeats=spec.mix.mix.stop == "never",
        num_ranks=spec.tree.size_of("dp"),
        peers=() if together is None else together.place.peers,
        leads=together is None
        or together.place.leads(together.launch.rank, spec.mix.batch.pipeline),
        gives_way=together is not None and spec.mix.split != TRAIN,
        is_alone=together is None,
        assumed_alone=assumed_alone,
    )
    return Loader(open_client, form, facts, state=state, notes=notes)


def form_of(arrays: str, labels: Labels, device: object) -> BatchForm:
    """Return the form in which batches are handed out.

    Raises:
        ConfigError: See ``open_mix``.
    """
    form = BatchForm(arrays=_arrays(arrays), labels=labels, device=device)
    if device is not None:
        form.arrays.check(device)
    return form


def form_at(form: BatchForm, place: Place, rank: int, mix: MixConfig) -> BatchForm:
    """Return the form in which batches are handed to a rank: with the columns of its stage, and its own images.

    Raises:
        ConfigError: Labels would belong to tokens of other cp peers, or be placed differently from a labels column.
    """
    if form.labels == "unshifted" and place.cp_size > 1:
        raise ConfigError(
            f"labels='unshifted' with {place.cp_size} cp peers: a slice ends where its last label belongs to "
            "another peer; use labels='shifted'"
        )
    own = {n: c for source in mix.sources.values() for n, c in source.own_columns.items()}
    of_labels = [n for n in mix.batch.columns if n in own and own[n].of == "labels"]
    if form.labels == "unshifted" and of_labels:
        raise ConfigError(
            f"labels='unshifted' with columns.{of_labels[0]} of labels: such a label stands at its own token; say of: "
            "tokens"
        )
    peer = place.peers.index(rank) if place.peers else 0
    form = replace(
        form,
        stage=place.stages(mix.batch.pipeline)[peer],
        values_per_patch=values_per_patch_of(mix.sources),
    )
    if not deals_images(mix.balance.strategy):
        return form
    return replace(form, peer=peer, ranks=place.ranks)


def _arrays(kind: str) -> Arrays:
    if kind == "numpy" or (kind == "auto" and find_spec("torch") is None):
        return NumpyArrays()
    return torch_part("TorchArrays")()  # type: ignore[no-any-return]
