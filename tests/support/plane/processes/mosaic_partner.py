"""The batches and states of Mosaic Streaming itself, as JSON that tests compare with.

Run it with ``mosaicml-streaming`` installed (which pins an older numpy and transformers than the tests use)::

    python tests/support/plane/processes/mosaic_partner.py > tests/unit/omniload/importing/mosaic_streaming.json
"""

import importlib.metadata
import json
import sys
import tempfile
from pathlib import Path

import numpy as np
from streaming import MDSWriter, Stream, StreamingDataLoader, StreamingDataset
from streaming.base.partition import get_partitions
from streaming.base.shuffle import get_shuffle
from streaming.base.util import clean_stale_shared_memory

RUNS = [
    ("one stream, as is", {"web": {}}, {}, 0, 5),
    ("shuffled", {"web": {}}, {"shuffle": True}, 1, 7),
    *(
        (
            f"{rule} over two streams",
            {"web": {}, "code": {}},
            {"shuffle": True, "shuffle_algo": rule},
            1,
            9,
        )
        for rule in ("naive", "py1br", "py1e", "py1s", "py2s")
    ),
    ("the end of an epoch", {"web": {}}, {"shuffle": True}, 0, 33),
    ("proportions", {"web": {"proportion": 3}, "code": {"proportion": 1}}, {"shuffle": True}, 2, 8),
    (
        "proportions of an epoch's size",
        {"web": {"proportion": 1}, "code": {"proportion": 1}},
        {"shuffle": True, "epoch_size": 80, "sampling_granularity": 4},
        1,
        6,
    ),
    (
        "fixed samples",
        {"web": {"choose": 60}, "code": {"repeat": 2.5}},
        {"shuffle": True, "sampling_method": "fixed", "shuffle_algo": "py1br"},
        2,
        11,
    ),
    ("an epoch's size", {"web": {}, "code": {}}, {"epoch_size": 90}, 1, 6),
]
"""Name, streams, settings of the dataset, whole epochs, and batches of the next one."""
SIZES = {"web": 132, "code": 48}
"""Samples of each stream: even numbers, so that Mosaic repeats none at the end of an epoch to even out the ranks."""
NODES = [(1, 1), (2, 2), (8, 2), (64, 4), (2, 8), (3, 6)]
"""Canonical and physical nodes."""
BATCH = 4


def written(folder):
    """Write a stream for each source, in shards of a few samples."""
    for name, samples in SIZES.items():
        with MDSWriter(
            out=str(folder / name), columns={"text": "str", "id": "int"}, size_limit=600
        ) as out:
            for number in range(samples):
                out.write({"text": f"{name}-{number} " * (1 + number % 3), "id": number})
    return {
        name: [
            s["samples"] for s in json.loads((folder / name / "index.json").read_text())["shards"]
        ]
        for name in SIZES
    }


def run(folder, streams, settings, epochs, batches):
    """Train for some epochs and batches; return the state, and the samples of every epoch."""
    clean_stale_shared_memory()
    dataset = StreamingDataset(
        streams=[Stream(local=str(folder / name), **share) for name, share in streams.items()],
        batch_size=BATCH,
        num_canonical_nodes=2,
        shuffle_block_size=48,
        **settings,
    )
    loader = StreamingDataLoader(dataset, batch_size=BATCH)
    seen = []
    for epoch in range(epochs + 1):
        seen.append([])
        for number, batch in enumerate(loader):
            names = [text.partition("-")[0] for text in batch["text"]]
            seen[-1] += [
                [name, int(sample)] for name, sample in zip(names, batch["id"], strict=True)
            ]
            if epoch == epochs and number + 1 == batches:
                break
    state = loader.state_dict()
    del loader, dataset
    return state, seen


def left(canonical, physical, drawn):
    """Return the samples that remain in an epoch over many nodes, of shuffled shards."""
    shards = np.array([37, 5, 64, 12, 1, 80, 33, 9])
    found = {}
    for rule in ("naive", "py1br", "py1e", "py1s", "py2s"):
        places = get_partitions(
            "relaxed", int(shards.sum()), canonical, physical, 2, 1, BATCH, drawn, physical
        )
        order = get_shuffle(rule, shards, canonical, 77, 3, 40)
        found[rule] = sorted(set(order[places[places >= 0]].tolist()))
    return {"shards": shards.tolist(), "left": found}


def main():
    """Print everything."""
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        shards = written(folder)
        runs = []
        for name, streams, settings, epochs, batches in RUNS:
            state, seen = run(folder, streams, settings, epochs, batches)
            runs.append(
                {
                    "name": name,
                    "streams": streams,
                    "settings": settings,
                    "state": state,
                    "seen": seen,
                }
            )
    over_nodes = [
        {
            "canonical": canonical,
            "physical": physical,
            "drawn": drawn,
            **left(canonical, physical, drawn),
        }
        for canonical, physical in NODES
        for drawn in (0, 2 * physical * BATCH, 4 * physical * BATCH)
    ]
    json.dump(
        {
            "version": importlib.metadata.version("mosaicml-streaming"),
            "shuffle_block_size": 48,
            "shards": shards,
            "runs": runs,
            "over_nodes": over_nodes,
        },
        sys.stdout,
        separators=(",", ":"),
    )


if __name__ == "__main__":
    main()
