"""Whom a move of sources waits for: every member that may take the loader's place."""

import threading
from types import SimpleNamespace

import pytest

pytest.importorskip("ray")

from omniload.actors.gate import Gate
from omniload.actors.ray.scaling import mover
from omniload.actors.ray.scaling.mover import Mover
from omniload.base.errors import UnavailableError
from omniload.machine.roster import Member

HOLDER, SHADOW = Member("loader-1"), Member("loader-1", 1)


class FakeLoader:
    def __init__(self, found):
        self.open_more = SimpleNamespace(remote=lambda *_: found)
        self.drop = SimpleNamespace(remote=lambda *_: None)


@pytest.mark.parametrize("ended", [False, True])
def test_a_shadow_is_passed_over_only_once_it_has_ended(monkeypatch, ended):
    silent = UnavailableError("loader-1+1 gave no answer")

    def answer_to(answer, name, **_):
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(mover, "answer_to", answer_to)
    monkeypatch.setattr(mover, "has_ended", lambda answer: ended and answer is silent)
    kept = []
    loaders = {HOLDER: FakeLoader({0: "found"}), SHADOW: FakeLoader(silent)}
    crew = SimpleNamespace(
        spec=SimpleNamespace(history=SimpleNamespace(latest=None)),
        facts={0: "found"},
        holders={"loader-1": HOLDER},
        sources_of={"loader-1": ()},
        serving={0: HOLDER},
        dp_ranks_of={},
        actors=loaders,
        changing=threading.Lock(),
        changed=threading.Condition(),
    )
    keeper = SimpleNamespace(move=lambda sources, role: kept.append((sources, role)))
    move = Mover(crew, keeper, Gate())

    if ended:
        move.move([0], "loader-1")
    else:
        with pytest.raises(UnavailableError, match="gave no answer"):
            move.move([0], "loader-1")

    assert kept == ([([0], "loader-1")] if ended else [])
    assert crew.coming == {}
