"""The order of the keys of a mix file has no effect on samples, on their numbers or on a resume."""

from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import numpy as np
import orjson
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from omniload.actors.local.plane import LocalPlane
from omniload.actors.plane import PlaneSpec
from omniload.batch.digest import batch_digest
from omniload.client import Client
from omniload.mix.config import load_mix
from omniload.plan.place_tree import ClientPlaceTree
from tests.support.plane.corpora import write_tokens

STEPS = 6
NAMES = ("web", "code", "books", "wiki")

orders = st.permutations(NAMES)


def a_file(order, *, length):
    """Return the text of a mix whose mappings are all in ``order``."""
    stages = [
        {"from_step": 0, "weights": dict.fromkeys(order, 0.1)},
        {
            "from_step": 3,
            "ramp_steps": 2,
            "weights": {name: 0.7 if name == "web" else 0.1 for name in order},
        },
    ]
    content = {
        "version": 1,
        "seed": 7,
        "sources": {
            name: {"type": "parquet", "path": f"{length}/{name}.parquet", "tokens": "tokens"}
            for name in order
        },
        "mix": {"stages": stages},
        "pack": {"length": 32},
        "batch": {"tokens": 256, "micro_tokens": 64},
    }
    return yaml.safe_dump(content, sort_keys=False)


@cache
def corpus():
    """Write sources of documents of one length, as in data tokenised in advance, and of several lengths."""
    folder = Path(mkdtemp(prefix="omniload-test-order-"))
    for number, name in enumerate(NAMES):
        rng = np.random.default_rng(number)
        for length, lengths in (("one", [9] * 60), ("many", rng.integers(1, 80, 60).tolist())):
            documents = [rng.integers(0, 5000, n).astype(np.int32) for n in lengths]
            write_tokens(folder / length / f"{name}.parquet", documents)
    return folder


def steps_of(order, length, state=None, *, until=STEPS):
    """Run until a step; return the digests, the meaning of the sources' numbers, and the state."""
    (corpus() / "mix.yaml").write_text(a_file(order, length=length))
    mix, folder = load_mix(corpus() / "mix.yaml")
    spec = PlaneSpec(
        mix=mix, base_dir=folder, tree=ClientPlaceTree.of(), state=state, num_steps=until
    )
    with LocalPlane(spec) as plane, Client(plane.handle(0)) as client:
        digests = [batch_digest(batch) for batch in client]
        return digests, mix.names, orjson.loads(orjson.dumps(client.state_dict()))


@cache
def unbroken(length):
    return steps_of(NAMES, length)


@settings(max_examples=12)
@given(orders, orders, st.sampled_from(["one", "many"]), st.integers(1, STEPS - 1))
@example(("web", "code", "books", "wiki"), ("code", "web", "books", "wiki"), "one", 2)
def test_a_run_resumes_with_the_keys_of_its_file_in_any_order(first, second, length, at):
    before, _, state = steps_of(first, length, until=at)
    after, names, end = steps_of(second, length, state)

    digests, numbers, last = unbroken(length)
    assert before + after == digests
    assert names == numbers
    assert end == last
