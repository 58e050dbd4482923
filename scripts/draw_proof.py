"""Draw ``docs/pictures/proof.svg``: a run that is killed with SIGKILL and resumed, next to an unbroken run.

::

    python scripts/draw_proof.py

Both runs are real: the sample corpus, two processes, digests of the samples as the ranks received them.
"""

import json
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from omniload.actors.local.plane import LocalPlane
from omniload.actors.plane import PlaneSpec
from omniload.base.state import JsonObject
from omniload.batch.digest import batch_digest, combined
from omniload.client import Client
from omniload.mix.config import load_mix
from omniload.plan.place_tree import ClientPlaceTree
from omniload.source.sample_data.corpus import build_sample_corpus

__all__ = ["drawn", "main", "steps_of"]

PAGE = Path(__file__).parents[1] / "docs/pictures/proof.svg"
STEPS, KILLED = 8, 4
_MIX = """
version: 1
seed: 17
tokenizer: {type: bpe, path: corpus/tokenizer.json, end_of_document: "<eos>"}
sources:
  modules: {type: parquet, path: "corpus/modules/*.parquet", text: text}
  docstrings: {type: jsonl, path: "corpus/docstrings/*.jsonl"}
mix: {stages: [{from_step: 0, weights: {modules: 3, docstrings: 1}}]}
pack: {length: 256}
batch: {tokens: 2048, micro_tokens: 1024}
runtime: {kind: local}
"""


def steps_of(folder: Path, dp: int, state: JsonObject | None = None) -> None:
    """Print the digest of each step and the state after it, as a line of JSON."""
    mix, base = load_mix(folder / "mix.yaml")
    spec = PlaneSpec(mix=mix, base_dir=base, tree=ClientPlaceTree.of(dp=dp), state=state)
    with LocalPlane(spec) as plane:
        clients = [Client(plane.handle(rank)) for rank in range(dp)]
        while clients[0].next_step < STEPS:
            batches = [client.next_batch() for client in clients]
            digest = combined(batch_digest(batch) for batch in batches if batch is not None)
            line = {"digest": f"{digest:016x}" if isinstance(digest, int) else str(digest)}
            line["state"] = clients[0].state_dict()
            print(json.dumps(line), flush=True)  # noqa: T201 -- read by the process that started this one


def _run(folder: Path, dp: int, *, state: str = "null", most: int = STEPS) -> list[dict[str, Any]]:
    """Return the lines of a run in a separate process, which is killed after ``most`` of them."""
    words = [sys.executable, __file__, str(folder), str(dp), state]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)  # noqa: S603 -- this module
    assert process.stdout is not None
    with process.stdout:
        lines = [json.loads(process.stdout.readline()) for _ in range(most)]
        if most < STEPS and state == "null":
            process.send_signal(signal.SIGKILL)
    process.wait(60)
    return lines


def drawn(unbroken: list[str], killed: list[str], resumed: list[str]) -> str:
    """Return the picture: a row of digests for each run, a box for each step; equal digests have the same colour."""
    rows = [("unbroken, 2 ranks", 0, unbroken), ("killed (SIGKILL), 2 ranks", 0, killed)]
    rows.append(("resumed, 1 rank", len(killed), resumed))
    head = '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 960 250" font-size="15" role="img"'
    head += ' font-family="Helvetica, Arial, sans-serif">'
    parts = [head, "<title>A killed and resumed run has the digests of an unbroken one</title>"]
    parts.append('<rect width="960" height="250" fill="#ffffff"/>')
    parts.extend(
        f'<text x="{282 + 84 * step}" y="34" text-anchor="middle">step {step}</text>'
        for step in range(STEPS)
    )
    for at, (name, first, digests) in enumerate(rows):
        y = 50 + 58 * at
        parts.append(f'<text x="16" y="{y + 28}">{name}</text>')
        for step, digest in enumerate(digests, start=first):
            colour = "#d5f0dc" if digest == unbroken[step] else "#f5c6c0"
            x = 242 + 84 * step
            parts.append(
                f'<rect x="{x}" y="{y}" width="80" height="44" rx="6" fill="{colour}" stroke="#2e7d4f"/>'
            )
            parts.append(
                f'<text x="{x + 40}" y="{y + 28}" text-anchor="middle" font-family="monospace">{digest[-6:]}</text>'
            )
    verdict = "equal" if killed + resumed == unbroken else "NOT EQUAL"
    said = f"Last six digits of the digest of the samples that all ranks received: {verdict} in every step."
    parts.append(f'<text x="16" y="238">{said}</text></svg>')
    return "\n".join(parts) + "\n"


def main() -> None:
    """Run three times and write the picture."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        build_sample_corpus(folder / "corpus", size=120_000, vocab_size=512)
        (folder / "mix.yaml").write_text(_MIX, encoding="utf-8")
        unbroken = _run(folder, 2)
        killed = _run(folder, 2, most=KILLED)
        resumed = _run(folder, 1, state=json.dumps(killed[-1]["state"]), most=STEPS - KILLED)
    runs = ([line["digest"] for line in lines] for lines in (unbroken, killed, resumed))
    PAGE.write_text(drawn(*runs), encoding="utf-8")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        steps_of(Path(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3]))
    else:
        main()
