"""Sources whose reads wait, more of them than a loader has reading threads: its held samples are served meanwhile."""

import os

import pytest

from omniload.actors.opening import open_plane
from omniload.actors.plane import PlaneSpec
from omniload.base.errors import UnavailableError
from omniload.base.settings import registry
from omniload.client import Client
from omniload.plan.place_tree import ClientPlaceTree
from tests.support.plane.corpora import a_corpus

pytest.importorskip("ray")

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("leaves_nothing_behind")]

SLOW = [f"slow{n}" for n in range(6)]
FROM = 24
"""Step from which on these sources are drawn."""
LAB = """
import os, time

def waits(tokens, *, until):
    while not os.path.exists(until):
        time.sleep(0.02)
    return tokens
"""


@pytest.fixture
def lab(tmp_path, monkeypatch):
    """A user's transform that every process of a plane knows, and that waits for a file."""
    registered = tmp_path / "code" / "lab-1.0.dist-info"
    registered.mkdir(parents=True)
    (registered / "METADATA").write_text("Metadata-Version: 2.1\nName: lab\nVersion: 1.0\n")
    names = "[omniload.transforms]\nwaits = lab_that_waits:waits\n"
    (registered / "entry_points.txt").write_text(names)
    (registered.parent / "lab_that_waits.py").write_text(LAB)
    paths = [str(registered.parent), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
    monkeypatch.syspath_prepend(registered.parent)
    registry.registered.cache_clear()
    yield tmp_path / "go"
    registry.registered.cache_clear()


@pytest.mark.timeout(600)  # processes, each started in up to a minute on a busy machine
def test_steps_that_draw_nothing_of_sources_whose_reads_wait_are_given_while_they_do(tmp_path, lab):
    stages = [
        {"from_step": 0, "weights": {"web": 1, **dict.fromkeys(SLOW, 0)}},
        {"from_step": FROM, "weights": dict.fromkeys(("web", *SLOW), 1)},
    ]
    mix = a_corpus(tmp_path, ("web", *SLOW), mix={"stages": stages})
    waits = {"type": "map", "function": "waits", "of": "tokens", "options": {"until": str(lab)}}
    content = mix.model_dump(mode="json")
    for name in SLOW:
        content["sources"][name]["transforms"] = [waits]
    content["runtime"] = {"kind": "ray", "loaders": 1, "prefetch_steps": 4}
    mix = type(mix).model_validate(content)
    spec = PlaneSpec(mix=mix, base_dir=tmp_path, tree=ClientPlaceTree.of(dp=1))

    with open_plane(spec) as plane, Client(plane.handle(0)) as client:
        given = [client.next_batch(120.0) for _ in range(FROM)]
        with pytest.raises(UnavailableError):
            client.next_batch(1.0)
        lab.touch()
        drawn = client.next_batch(120.0)

    assert all(given)
    assert drawn is not None
