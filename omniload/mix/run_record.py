"""The record of the starts of a run: the mix as it read at each start, and the ranks.

A run may be resumed with more ranks, another balance or another runtime, and its mix file may be edited afterwards.
Therefore the record holds one *life* for every start, each with the text of its mix, and a question about step 1234 is
answered from the life that trained it. The file ``run.json`` is always written as a whole::

    {"version": 1, "lives": [{"from_step": 0, "began_s": 1795947300.25, "mix": "../mix.yaml",
                              "mix_at": "/job/mix.yaml", "text": "...", "sizes": {"dp": 2}}]}

``mix`` is relative to the run's folder, so both can be moved together. ``mix_at`` is the absolute path of the file,
for a run folder that is moved alone. If the mix is not in a file, both name a file that does not exist, in the folder
that its relative paths start at; the data that the paths lead to shows which of the two applies. If the rows of a life
were dealt by another cost than its text gives, the life also has the ``balance`` that was used. Its ``placement``
identifies the method of dealing rows, which differs from those of earlier releases.
"""

import os
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import pairwise, takewhile
from pathlib import Path
from typing import Any

import orjson
from pydantic import ValidationError

from omniload.base.config import parse_yaml
from omniload.base.errors import IntegrityError, StateError, system_refusals
from omniload.base.reading import read_kept_file
from omniload.base.settings.include import read_settings
from omniload.base.state import require_version, shown, whole_number
from omniload.base.writing import write_whole
from omniload.mix.config import BalanceConfig, MixConfig

__all__ = [
    "NO_FILE_NAME",
    "PLACEMENT",
    "RUN_RECORD_NAME",
    "RUN_RECORD_VERSION",
    "MixText",
    "RunLife",
    "RunRecord",
    "latest_start_s",
    "mix_text",
    "no_run_in",
    "read_run_record",
    "write_run_record",
]

NO_FILE_NAME = "mix-given-in-python.yaml"
"""Name that stands for the file of a mix that is not in a file, in the folder that its relative paths start at."""
RUN_RECORD_NAME = "run.json"
"""Name of the record's file in the run's folder."""
RUN_RECORD_VERSION = 1
PLACEMENT = 1
"""Number of the method by which releases deal the rows of a step to ranks and microbatches. The digest of a step
covers only its samples, so a run may continue with another method. Raised with each change of a strategy of this
package."""
_RANKS_LIMIT = 1 << 31
_NAMED = 4
"""Number of runs that a message names."""
_MOST_BYTES = 1 << 30
"""Size limit: a thousand starts of the largest possible mix file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MixText:
    """A mix as it read when a run was started."""

    path: Path
    """The mix file; relative paths start at its folder."""
    text: str


def mix_text(path: str | Path) -> str:
    """Return self-contained YAML of a mix file, with its includes and environment variables filled in.

    Raises:
        ConfigError: As for ``load_mix``, except that the mix may be faulty.
    """
    return read_settings(Path(path)).text


@dataclass(frozen=True, slots=True, kw_only=True)
class RunLife:
    """One start of a run."""

    from_step: int
    """First step that it planned."""
    began_s: float = 0.0
    """Time at which it began, in seconds since 1970 on its host; 0 in records of releases that did not note it."""
    mix_path: Path
    """The mix file; its relative paths start at its folder."""
    text: str
    """The text of the file at that moment, with its includes and environment variables filled in."""
    sizes: Mapping[str, int]
    """Size of each axis of the mesh, outermost first."""
    balance: BalanceConfig | None = None
    """How rows were dealt, if the text alone does not show it: a trainer may balance by the cost of its model."""
    placement: int = PLACEMENT
    """Method by which rows were dealt; 0 if the release that planned the life did not note it."""

    def mix(self) -> MixConfig:
        """Return the mix of this life as it ran, whatever its file contains today.

        Raises:
            ConfigError: This release can no longer read the text.
        """
        # No further substitution, because includes and variables were filled in when the text was noted.
        mix = parse_yaml(self.text, MixConfig, name=str(self.mix_path))
        return mix if self.balance is None else mix.model_copy(update={"balance": self.balance})

    @property
    def base_dir(self) -> Path:
        """Folder that the mix's relative paths start at."""
        return self.mix_path.parent


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """Every start of a run, in order."""

    lives: tuple[RunLife, ...]
    """At least one life; ``from_step`` rises."""

    @property
    def last(self) -> RunLife:
        """The latest start."""
        return self.lives[-1]

    def life_at(self, step: int) -> RunLife:
        """Return the start that planned ``step``.

        Raises:
            StateError: The record begins after ``step``.
        """
        past = [life for life in self.lives if life.from_step <= step]
        if not past:
            raise StateError(
                f"the run's record begins at step {self.lives[0].from_step}, step {step} is before it; "
                "choose a later step"
            )
        return past[-1]


@system_refusals("the run's record")
def write_run_record(
    run_dir: Path,
    mix_path: Path,
    sizes: Mapping[str, int],
    *,
    from_step: int = 0,
    text: str | None = None,
    balance: BalanceConfig | None = None,
) -> None:
    """Note a start of the run in ``run_dir``.

    Earlier starts at ``from_step`` or later belong to lost work and are dropped, as the journal drops their steps.

    Args:
        run_dir: Folder of the run; created when needed.
        mix_path: The mix file.
        sizes: Size of each axis of the mesh, outermost first: ``{"dp": 2}``.
        from_step: First step that this start plans.
        text: The mix file as it read when the run was started; read now by default.
        balance: How rows are dealt, if it differs from the text.

    Raises:
        ConfigError: The mix file cannot be read.
        StateError: The existing record is damaged or of another version.
    """
    if text is None:
        text = mix_text(mix_path)
    run_dir.mkdir(parents=True, exist_ok=True)
    # A damaged record stops the start, because overwriting it would lose the mixes of earlier steps.
    earlier = read_run_record(run_dir).lives if (run_dir / RUN_RECORD_NAME).exists() else ()
    life = RunLife(
        from_step=from_step,
        began_s=round(time.time(), 3),
        mix_path=mix_path.resolve(),
        text=text,
        sizes=dict(sizes),
        balance=balance,
    )
    kept = [old for old in earlier if old.from_step < from_step]
    content = {
        "version": RUN_RECORD_VERSION,
        "lives": [_to_json(each, run_dir) for each in (*kept, life)],
    }
    data = orjson.dumps(content, option=orjson.OPT_INDENT_2)
    write_whole(run_dir / RUN_RECORD_NAME, data, durable=True)


def no_run_in(folder: Path, lacks: str = RUN_RECORD_NAME) -> StateError:
    """Return an error for a folder that was given as a run's but does not exist or lacks a file of every run."""
    found = f"no run was opened there, it has no {lacks}" if folder.exists() else "no such folder"
    # If several runs have one parent folder, users easily give that folder instead.
    if below := sorted(str(each.parent) for each in folder.glob(f"*/{RUN_RECORD_NAME}"))[:_NAMED]:
        found += f"; there are runs in {', '.join(below)}"
    return StateError(
        f"{folder}: {found}; give the folder of a run: run_dir= of omniload.open, or run_dir of a training file"
    )


def read_run_record(run_dir: Path) -> RunRecord:
    """Read the record that ``write_run_record`` wrote.

    Raises:
        StateError: There is no record, or it is damaged or of another version.
    """
    path = run_dir / RUN_RECORD_NAME
    try:
        content = orjson.loads(
            read_kept_file(path, most_bytes=_MOST_BYTES, what="the record of a run")
        )
        require_version(content, RUN_RECORD_VERSION, of="run")
        lives = tuple(_from_json(life, run_dir) for life in content["lives"])
    except FileNotFoundError:
        raise no_run_in(run_dir) from None
    except NotADirectoryError:
        raise StateError(
            f"{run_dir} is a file; expected the folder of a run, which holds {RUN_RECORD_NAME}"
        ) from None
    except IntegrityError as error:
        raise StateError(f"{error}, or give another run_dir") from error
    except ValidationError as error:
        raise _damaged(path, f"balance: {error.errors()[0]['msg']}") from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise _damaged(path, repr(error)) from error
    if not lives:
        raise _damaged(path, "it holds no start")
    starts = [life.from_step for life in lives]
    # Otherwise a step would be attributed to a start other than the one that trained it.
    if any(later <= earlier for earlier, later in pairwise(starts)):
        raise _damaged(path, f"its starts are at steps {starts}, which do not rise")
    return RunRecord(lives=lives)


def latest_start_s(run_dir: Path) -> float:
    """Return when the latest start of a run began, as ``RunLife`` has it; 0 if the run has no record.

    Raises:
        StateError: The record is damaged or of another version.
    """
    if not (run_dir / RUN_RECORD_NAME).exists():
        return 0.0
    return read_run_record(run_dir).last.began_s


def _damaged(path: Path, reason: str) -> StateError:
    return StateError(
        f"{path}: not the record of a run, or a damaged one ({reason}); expected what a launch writes "
        "into the folder of its run: give that folder, or another run_dir"
    )


def _from_json(life: dict[str, Any], run_dir: Path) -> RunLife:
    return RunLife(
        from_step=whole_number(life["from_step"], below=1 << 63),
        began_s=_began_in(life.get("began_s", 0)),
        mix_path=_mix_path_in(life, run_dir),
        text=_text_in(life["text"]),
        sizes={
            axis: whole_number(size, least=1, below=_RANKS_LIMIT)
            for axis, size in life["sizes"].items()
        },
        balance=BalanceConfig.model_validate(life["balance"]) if "balance" in life else None,
        placement=whole_number(life.get("placement", 0), below=1 << 31),
    )


def _mix_path_in(life: dict[str, Any], run_dir: Path) -> Path:
    """Return the path of the mix file: relative to the run's folder, or else its former absolute path."""
    path = Path(run_dir.resolve() / life["mix"]).resolve()
    at = Path(_text_in(life.get("mix_at", str(path))))
    if at == path or not at.is_absolute():
        return path
    # A folder without access permission counts as having no such file.
    for each in (path, at):
        if os.path.isfile(each):  # noqa: PTH113 -- refuses nothing
            return each
    if at.name != NO_FILE_NAME:
        return path
    patterns = _relative_paths_in(life["text"])
    # Prefer the folder in which more of the data exists; if equal, the one relative to the run's folder.
    return max((path, at), key=lambda each: sum(_leads_on(each.parent, p) for p in patterns))


def _relative_paths_in(text: object) -> list[str]:
    """Return the relative paths of a mix that is not in a file, whose text is JSON; empty for any other text."""
    try:
        content = orjson.loads(_text_in(text))
        places = [*content["sources"].values(), content.get("tokenizer") or {}]
        listed = [each.get("path") or [] for each in places]
    except (ValueError, KeyError, AttributeError):
        return []
    paths = [path for each in listed for path in ([each] if isinstance(each, str) else each)]
    return [path for path in paths if "://" not in path and not path.startswith("/")]


def _leads_on(folder: Path, pattern: str) -> bool:
    """Whether a folder has an entry that matches the start of a pattern, up to its first part with wildcards."""
    if os.path.lexists(folder / pattern):
        return True
    parts = pattern.split("/")
    plain = list(takewhile(lambda part: not re.search(r"[*?\[{]", part), parts))
    if len(plain) == len(parts):
        return False
    # Alternatives in braces match any name.
    wanted = re.sub(r"\{.*\}", "*", parts[len(plain)])
    try:
        return any(fnmatchcase(each.name, wanted) for each in folder.joinpath(*plain).iterdir())
    except OSError:
        return False


def _began_in(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"began_s is {shown(value)}, not a time")
    return float(value)


def _text_in(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{shown(value)} is not a text")
    return value


def _to_json(life: RunLife, run_dir: Path) -> dict[str, object]:
    content: dict[str, object] = {
        "from_step": life.from_step,
        "began_s": life.began_s,
        # Relative to the resolved folder, as it is read back: relative to a symbolic link the path would differ.
        "mix": os.path.relpath(life.mix_path, run_dir.resolve()),
        "mix_at": str(life.mix_path),
        "text": life.text,
        "sizes": dict(life.sizes),
    }
    if life.balance is not None:
        content["balance"] = life.balance.model_dump(mode="json")
    if life.placement:
        content["placement"] = life.placement
    return content
