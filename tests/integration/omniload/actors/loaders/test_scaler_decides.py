"""The scaler of a running plane decides by itself: a loader is ready before a stage of slow sources begins.

Times are a twentieth of those in a run. The decisions, and the loads that cause them, are the machine's own.
"""

import time
from itertools import islice

import pytest

from omniload.actors.local.plane import LocalPlane
from omniload.actors.opening import open_plane
from omniload.actors.plane import PlaneSpec
from omniload.batch.digest import batch_digest, combined
from omniload.client import Client
from omniload.plan.place_tree import ClientPlaceTree
from tests.support.plane.builders import a_mix
from tests.support.plane.corpora import a_corpus
from tests.support.plane.sources import slow_transform

pytest.importorskip("ray")

from omniload.actors.ray.scaling import shell
from omniload.machine import scaler

pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.usefixtures("leaves_nothing_behind"),
]

QUICK, SLOW = ("code", "web"), ("pdf", "scan", "talk", "wiki")
STEP_S, RISES, LIMIT_S = 0.05, 160, 240.0


def a_slow_mix(folder, milliseconds, falls):
    """Two sources without delay, and four that wait for each document: first a tenth of the mix, then most of it."""
    few = dict.fromkeys(QUICK, 0.45) | dict.fromkeys(SLOW, 0.025)
    many = dict.fromkeys(QUICK, 0.05) | dict.fromkeys(SLOW, 0.225)
    slowly = {"type": "map", "function": "slowly", "of": "tokens"}
    slowly["options"] = {"milliseconds": milliseconds}
    sources = {
        name: {"type": "parquet", "path": f"{name}/*.parquet", "tokens": "tokens"}
        | ({"transforms": [slowly]} if name in SLOW else {})
        for name in (*QUICK, *SLOW)
    }
    stages = [{"from_step": 0, "weights": few}, {"from_step": RISES, "weights": many}]
    if falls is not None:
        stages.append({"from_step": falls, "weights": few})
    return a_mix(
        version=2,
        sources=sources,
        rows=4,
        length=32,
        micro_rows=2,
        mix={"stages": stages},
        runtime={"loaders": 1, "prefetch_steps": 4, "scaling": {"mode": "auto", "most": 2}},
    )


@pytest.fixture
def hurried(monkeypatch):
    """Shorten the times after which the scaler adds a loader; return a function that shortens another time."""

    def hurry(name, module=scaler):
        monkeypatch.setattr(module, name, getattr(module, name) / 20)

    # The time before it removes a loader stays: a busy machine and the wait for the other loader slow the pace.
    for name in ("_AVERAGE_S", "_OVER_S", "_SETTLE_S"):
        hurry(name)
    hurry("_LOOK_S", shell)
    return hurry


class Trainer:
    """Two ranks that take steps at their pace, and the loaders that existed at each step."""

    def __init__(self, plane):
        self.plane, self.digests, self.loaders = plane, [], []
        self.clients = [Client(plane.handle(rank)) for rank in range(2)]

    def train(self, to, *, until=None):
        """Take steps up to one; wait before it until the plane has ``until`` loaders, if given."""
        ends_s = time.monotonic() + LIMIT_S
        while len(self.digests) < to:
            while until not in {None, self.num_loaders()} and len(self.digests) >= to - 40:
                assert time.monotonic() < ends_s, f"loaders were {self.loaders}"
                time.sleep(1.0)
                if len(self.digests) < to - 1:
                    break  # the pace falls, and the stage stays as near in steps
            began_s = time.monotonic()
            self.digests.append(combined(batch_digest(c.next_batch()) for c in self.clients))
            self.loaders.append(self.num_loaders())
            if self.loaders[-1] != until:
                time.sleep(max(0.0, began_s + STEP_S - time.monotonic()))

    def num_loaders(self):
        return sum(role.startswith("loader-") for role in self.plane.pids())


def unscaled(folder, steps, falls=None):
    mix = a_slow_mix(folder, 0.0, falls)
    spec = PlaneSpec(mix=mix, base_dir=folder, tree=ClientPlaceTree.of(dp=1))
    with LocalPlane(spec) as plane, Client(plane.handle(0)) as client:
        return [combined([batch_digest(batch)]) for batch in islice(client, steps)]


def a_spec(folder, monkeypatch, falls=None):
    slow_transform.install(folder, monkeypatch)
    a_corpus(folder, (*QUICK, *SLOW), records=3_000)
    return PlaneSpec(
        mix=a_slow_mix(folder, 25.0, falls),
        base_dir=folder,
        tree=ClientPlaceTree.of(dp=2),
        run_dir=folder / "run",
    )


@pytest.mark.timeout(600)  # seven processes, each started in up to a minute on a busy machine
def test_a_loader_is_there_before_the_stage_that_needs_it_and_samples_stay(
    tmp_path, monkeypatch, hurried
):
    with open_plane(a_spec(tmp_path, monkeypatch)) as plane:
        trainer = Trainer(plane)
        trainer.train(RISES, until=2)
        trainer.train(RISES + 10)
    said = (tmp_path / "run/logs/scaler.log").read_text()

    assert trainer.loaders[0] == 1
    assert trainer.loaders[RISES - 1] == 2
    assert "loader-1 was added for" in said
    assert "by what the mix draws soon" in said
    assert trainer.digests == unscaled(tmp_path, RISES + 10)


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_loaders_come_before_the_stage_and_go_after_it_and_samples_stay(
    tmp_path, monkeypatch, hurried
):
    hurried("_UNDER_S")
    falls = RISES + 120
    with open_plane(a_spec(tmp_path, monkeypatch, falls)) as plane:
        trainer = Trainer(plane)
        trainer.train(RISES, until=2)
        trainer.train(falls)
        trainer.train(falls + 400, until=1)
    said = (tmp_path / "run/logs/scaler.log").read_text()

    assert trainer.loaders[RISES - 1 : falls] == [2] * (falls - RISES + 1)
    assert trainer.loaders[-1] == 1
    assert "which has ended: " in said
    assert trainer.digests == unscaled(tmp_path, falls + 400, falls)
