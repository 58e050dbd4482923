"""The run that a loop asks for: a mix with settings by keyword, the folder that keeps it, and its ranks.

``omniload.open("mix.yaml", prefetch_steps=8)`` changes one setting of the file. The folder of a run keeps the mix as it
runs, including changed settings; ``omniload mix show`` and ``audit`` read it there.
"""

import difflib
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ValidationError

from omniload.actors.plane import PlaneSpec
from omniload.base.config import checked, parse_yaml
from omniload.base.errors import ConfigError
from omniload.base.linux.folders import whole_path, working_folder
from omniload.base.log import get_logger
from omniload.base.secrets import without_secrets
from omniload.base.settings.faults import said_of_fault
from omniload.base.settings.paths import unnamed, why_no_text
from omniload.front.launch import Place
from omniload.mix.config import MixConfig, load_mix
from omniload.mix.held_out import held_out
from omniload.mix.run_record import NO_FILE_NAME, MixText, mix_text
from omniload.plan.place_tree import ClientPlaceTree
from omniload.source.access.index_folders import index_folder

__all__ = ["MixFacts", "kept_in", "spec_of", "text_as_run", "with_settings"]

Runtime = Literal["auto", "local", "ray"]
_LOG = get_logger(__name__)
_IN_ITS_PLACE = {
    "collate_fn": "pack in the mix file says how rows are made, labels= and arrays= what a batch holds",
    "drop_last": "mix.stop in the mix file says how a run ends",
    "epochs": "steps= limits a run; mix.amounts in the mix file gives each source its epochs",
    "num_workers": "loaders= and readers= set how many processes read",
    "pin_memory": "device='cuda' copies batches from pinned memory",
    "prefetch_factor": "prefetch_steps= sets how many steps are built ahead",
    "sampler": "each rank gets samples of its own, by the weights in the mix file",
    "shuffle": "shuffle in the mix file sets the order of each source",
    **dict.fromkeys(
        ("seq_len", "seq_length", "sequence_length", "max_seq_len", "max_length", "block_size"),
        "length= sets the tokens of a row (pack.length in the mix file)",
    ),
    **dict.fromkeys(
        ("batch_size", "global_batch_size", "micro_batch_size", "gradient_accumulation_steps"),
        "batch_tokens= sets the tokens of a step over all ranks, batch_micro_tokens= the most of a microbatch; to "
        "accumulate gradients, loop over batch.microbatches",
    ),
    **dict.fromkeys(
        ("resume", "resume_from", "resume_from_checkpoint", "state_dict"),
        "state= takes what state_dict() returned",
    ),
    **dict.fromkeys(
        ("weights", "probabilities", "proportions"),
        "weights are set in mix.stages of the mix file",
    ),
}
"""What to use in place of keywords that other loaders and trainers have, by keyword."""
_OF_OPEN = (
    "mesh",
    "rank",
    "world_size",
    "state",
    "split",
    "runtime",
    "timeout",
    "address",
    "run_dir",
    "steps",
    "arrays",
    "labels",
    "device",
)
"""Keywords of ``omniload.open`` that are not settings, to suggest for a misspelt name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MixFacts:
    """Facts about the mix and the ranks of a loader that are known before its plane is open."""

    names: tuple[str, ...] = ()
    """Names of the sources, in the order of their numbers."""
    tags: Mapping[str, Mapping[str, str]] | None = None
    """Tags of the sources that have tags, by name; ``None`` if they arrive with the first batch."""
    vocab_size: int | None = None
    """Number of tokens that the tokeniser may give; ``None`` for a mix of token columns alone."""
    num_steps: int | None = None
    """The step after the last; ``None`` for the end of the data."""
    repeats: bool = False
    """Whether sources repeat forever, so that the data does not end before ``num_steps``."""
    first_step: int = 0
    """First step without a state."""
    num_ranks: int = 1
    """Ranks along dp."""
    peers: tuple[int, ...] = ()
    """Numbers of the ranks that take the same batch, this one among them; none where it has no peers."""
    leads: bool = True
    """Whether this rank reports for its peers: it is the first of them that has labels."""
    gives_way: bool = False
    """Whether it is an evaluation over several ranks, whose plane ends when a training opens its own."""
    is_alone: bool = False
    """Whether the plane serves this process alone, so that it ends when the loader is garbage-collected."""
    assumed_alone: bool = False
    """Whether this process counts as the only rank by default, because no argument, launcher or process group named
    other ranks."""


def spec_of(
    mix: str | Path | Mapping[str, object] | MixConfig,
    split: str | None,
    settings: Mapping[str, object],
    runtime: Runtime,
    place: Place,
    restarts: int,
) -> PlaneSpec:
    """Return the run that a job opens: a mix with its settings, and its ranks.

    Raises:
        ConfigError: See ``open_mix``.
    """
    model, base_dir, cache_dir = _mix_of(mix)
    model = with_settings(model, settings)
    model = model if split is None else held_out(model, split)
    if runtime != "auto":
        model = with_settings(model, {"runtime_kind": runtime})
    if model.runtime.kind == "local" and place.dp_size * place.cp_size > 1:
        raise ConfigError(
            f"runtime 'local' serves one process, and this job has {place.dp_size * place.cp_size}; "
            "use runtime 'auto' or 'ray'"
        )
    return PlaneSpec(
        mix=model,
        base_dir=base_dir,
        # This applies whatever the axes are called: ranks that take the same batch differ only in the images they
        # encode.
        tree=ClientPlaceTree.of(dp=place.dp_size, cp=place.cp_size, tp=max(1, len(place.peers))),
        restarts=restarts,
        cache_dir=cache_dir,
    )


def kept_in(
    run_dir: str | Path | None, mix: str | Path | Mapping[str, object] | MixConfig, spec: PlaneSpec
) -> PlaneSpec:
    """Return the run with the folder that keeps its journal and its mix, if there is one.

    Raises:
        ConfigError: The folder is not a path, or is an empty path, which would mean the process's present folder; or
            its name is not valid text, which the files in it must be able to contain.
    """
    if run_dir is None:
        return spec
    try:
        folder = None if run_dir == "" else Path(run_dir)
    except TypeError:
        folder = None
    if folder is None:
        raise ConfigError(
            f"run_dir is {run_dir!r}; give the path of a folder, such as 'runs/a', or None to keep nothing of the run"
        )
    whole = str(whole_path(folder))
    try:
        os.fsencode(whole)
        whole.encode()
    except UnicodeEncodeError as error:
        remedy = "rename what is not, or name another folder"
        why = unnamed(error) or f"{whole!r} {why_no_text(whole, remedy)}"
        raise ConfigError(
            f"run_dir is {str(folder)!r}, and what is kept in a run's folder names it and those above it as text: {why}"
        ) from error
    # An absolute path, because a loop may change its folder while the run is written.
    return replace(spec, run_dir=Path(whole), mix_text=text_as_run(mix, spec.mix))


def _mix_of(
    mix: str | Path | Mapping[str, object] | MixConfig,
) -> tuple[MixConfig, Path, Path | None]:
    """Return the model, the folder that relative paths start at, and the folder of the indexes."""
    if isinstance(mix, MixConfig):
        return mix, working_folder(), None
    if isinstance(mix, Mapping):
        return checked(mix, MixConfig, name="the mix"), working_folder(), None
    model, folder = load_mix(mix)
    return model, folder, index_folder(Path(mix))


def with_settings(mix: MixConfig, settings: Mapping[str, object]) -> MixConfig:
    """Return ``mix`` with some of its settings changed, checked like the file.

    A setting is named by its key if only one section has that key (``prefetch_steps``), or by section and key
    (``pack_method``, ``balance_method``). Sources and weights are not settings: they stay in the file.

    Raises:
        ConfigError: No setting has that name, two sections have it, or a value is refused.
    """
    if not settings:
        return mix
    places = _places(mix)
    # The stages as declared: if batch.tokens changes, stages that count tokens begin at other steps.
    changed = mix.declared()
    for name, value in settings.items():
        found = places.get(name, [])
        if len(found) != 1:
            raise ConfigError(_unknown(name, found, places))
        section, key = found[0]
        (changed if section is None else changed[section])[key] = value
    try:
        # The whole mix is checked, because a setting may contradict one in another section.
        return MixConfig.model_validate(changed)
    except ValidationError as error:
        faults = "; ".join(
            # The error has no place if it comes from a rule between keys; the rule names them and the value found.
            f"{'.'.join(map(str, fault['loc']))}{': ' if fault['loc'] else ''}{said_of_fault(fault)}"
            for fault in error.errors()
        )
        raise ConfigError(f"the settings {sorted(settings)} are refused: {faults}") from error


def _places(mix: MixConfig) -> dict[str, list[tuple[str | None, str]]]:
    """Return the places of each setting, by every name that it has."""
    places: dict[str, list[tuple[str | None, str]]] = {"seed": [(None, "seed")]}
    for section in ("pack", "batch", "balance", "loader", "runtime"):
        part = getattr(mix, section)
        assert isinstance(part, BaseModel)
        for key in type(part).model_fields:
            # A short name stands for every section with the key; if two sections have it, the name is refused.
            for name in (key, f"{section}_{key}"):
                places.setdefault(name, []).append((section, key))
    return places


def _unknown(
    name: str, found: list[tuple[str | None, str]], places: Mapping[str, list[Any]]
) -> str:
    if found:
        return f"the setting {name!r} may be {' or '.join(f'{s}_{k}' for s, k in found)}; name one of them"
    if name in _IN_ITS_PLACE:
        return f"no setting is called {name!r}; {_IN_ITS_PLACE[name]}"
    near = difflib.get_close_matches(name, [*places, *_OF_OPEN], n=1)
    meant = f"did you mean {near[0]!r}? " if near else ""
    short = {n: p for n, p in places.items() if p[0][1] == n}
    # A short name that two sections have is refused, so the long ones stand for it.
    usable = [n if len(p) == 1 else f"{s}_{n}" for n, p in short.items() for s, _ in p]
    return (
        f"no setting is called {name!r}; {meant}keywords are {', '.join(sorted(_OF_OPEN))}, and settings of the mix: "
        f"{', '.join(sorted(usable))}"
    )


def text_as_run(
    given: str | Path | Mapping[str, object] | MixConfig, model: MixConfig
) -> MixText | None:
    """Return the text of a mix as it runs: its file, or an equivalent text with the changed settings.

    Args:
        given: Argument that ``omniload.open`` was given.
        model: The resulting model, with all settings.

    Returns:
        ``None`` for a mix that contains credentials, which must not be written to the run's folder.
    """
    if isinstance(given, str | Path):
        path, text = Path(given), mix_text(given)
    else:
        path, text = working_folder() / NO_FILE_NAME, ""
    # The file itself if it is still equivalent, because it has the author's comments.
    if not _says(text, model):
        text = model.model_dump_json(indent=2)  # this is also YAML, and quotes every text
    if without_secrets(text) != text:
        _LOG.warning(
            "the mix holds credentials, so the run's folder keeps no record of it, and omniload mix show and audit "
            "cannot read the run; give them by the environment of the store's client and leave them out of the mix"
        )
        return None
    return MixText(path=path, text=text)


def _says(text: str, model: MixConfig) -> bool:
    try:
        return parse_yaml(text, MixConfig, name="the mix") == model
    except ConfigError:
        return False  # the file was changed since it was read
