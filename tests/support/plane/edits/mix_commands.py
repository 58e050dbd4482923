"""Running ``omniload mix`` in this process, on small corpora."""

from pathlib import Path

import orjson
import yaml
from click.testing import CliRunner, Result

from omniload.actors.local.plane import LocalPlane
from omniload.actors.plane import PlaneSpec
from omniload.base.state import JsonObject
from omniload.cli import command
from omniload.client import Client
from omniload.mix.config import load_mix
from omniload.mix.run_record import write_run_record
from omniload.plan.place_tree import ClientPlaceTree
from tests.support.plane.corpora import a_mixed_corpus

__all__ = ["a_mix_file", "a_run", "json_of", "run_mix"]


def run_mix(*arguments: object) -> Result:
    """Run ``omniload mix`` with ``arguments``; an error of ours is in ``exception``."""
    return CliRunner().invoke(command, [str(argument) for argument in arguments])


def json_of(*arguments: object) -> dict:
    """Run a command with ``--json`` and return its parsed output.

    Raises:
        BaseException: The exception that the command raised.
    """
    result = run_mix(*arguments, "--json")
    if result.exception is not None:
        raise result.exception
    return orjson.loads(result.stdout)


def a_mix_file(folder: Path, **changes: object) -> Path:
    """Write a small corpus and its mix file; return the file."""
    mix = a_mixed_corpus(folder, **changes)
    path = folder / "mix.yaml"
    path.write_text(yaml.safe_dump(mix.model_dump(mode="json")), encoding="utf-8")
    return path


def a_run(
    run_dir: Path, mix_path: Path, *, dp: int = 2, steps: int = 12, state: JsonObject | None = None
) -> dict[int, list]:
    """Take the steps of a run below ``steps``, from 0 or a state; return the batches of every rank by step."""
    mix, base_dir = load_mix(mix_path)
    first = 0 if state is None else int(str(state["step"]))
    write_run_record(run_dir, mix_path, {"dp": dp}, from_step=first)
    spec = PlaneSpec(
        mix=mix,
        base_dir=base_dir,
        tree=ClientPlaceTree.of(dp=dp),
        run_dir=run_dir,
        state=state,
        num_steps=steps,
    )
    with LocalPlane(spec) as plane:
        clients = [Client(plane.handle(rank)) for rank in range(dp)]
        return {step: [client.next_batch() for client in clients] for step in range(first, steps)}
