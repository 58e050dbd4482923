"""The opener of a detached plane: its answers while it opens, its end, and a look that fails."""

import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest

pytest.importorskip("ray")

from omniload.actors.plane import PlaneSpec
from omniload.actors.ray.given import detached
from omniload.actors.ray.given.detached import PlaneOpener
from omniload.actors.ray.given.tenancy import Attaching, opener_of
from omniload.base.errors import StateError
from omniload.plan.place_tree import ClientPlaceTree
from tests.support.locks import HeardLock
from tests.support.plane.builders import a_mix

LIMIT_S = 60


class Address:
    def __init__(self, board):
        self.board = board

    def model_copy(self, *, update):
        return update["generation"]


class Plane:
    """A plane in whose place nothing runs; ``opening`` is called with each that is opened."""

    looks, fails_at = 0, None
    opened, board, opening, closing = (
        0,
        None,
        staticmethod(lambda: None),
        staticmethod(lambda: None),
    )

    def __init__(self, spec):
        self.opening()
        type(self).opened += 1

    @property
    def address(self):
        type(self).looks += 1
        if self.looks == self.fails_at:
            raise OSError(5, "Input/output error")
        return Address(self.board)

    def failure(self):
        return None

    def planner(self):
        raise StateError("it is being replaced")

    def close(self):
        self.closing()


@pytest.fixture
def killed(monkeypatch, tmp_path):
    """Set once an opener has ended itself; its planes are in no Ray."""
    killed = threading.Event()
    fake = SimpleNamespace(
        get_runtime_context=lambda: SimpleNamespace(current_actor="itself"),
        kill=lambda actor, no_restart: killed.set(),
    )
    monkeypatch.setattr(detached, "ray", fake)
    monkeypatch.setattr(detached, "end_by_sigterm", lambda: None)
    logs = SimpleNamespace(of=lambda role: SimpleNamespace(path=tmp_path / role))
    monkeypatch.setattr(detached, "RoleLogs", lambda folder: logs)
    monkeypatch.setattr(detached, "speak_for", lambda log: None)
    monkeypatch.setattr(detached, "host_here", lambda: None)
    monkeypatch.setattr(detached, "_LOOK_S", 0.01)
    board = tmp_path / "board"
    board.mkdir()
    monkeypatch.setattr(detached, "RayPlane", type("Fake", (Plane,), {"board": board}))
    return killed


@pytest.fixture
def comes(monkeypatch):
    """Set when a caller reaches the lock of an opener that is made from here on."""
    comes = threading.Event()
    fake = SimpleNamespace(
        Lock=lambda: HeardLock(comes), Event=threading.Event, Thread=threading.Thread
    )
    monkeypatch.setattr(detached, "threading", fake)
    return comes


@pytest.fixture
def opener(killed, monkeypatch):
    opener = PlaneOpener()
    yield opener
    if not killed.is_set():
        monkeypatch.setattr(detached, "_ATTACHING_S", -1.0)
        opener.stop()
        assert killed.wait(LIMIT_S)


@pytest.fixture
def asked(tmp_path):
    mix = a_mix()
    runtime = mix.runtime.model_copy(update={"keep": 1000.0})
    spec = PlaneSpec(
        mix=mix.model_copy(update={"runtime": runtime}),
        base_dir=tmp_path,
        tree=ClientPlaceTree.of(),
        run_dir=tmp_path / "run",
    )
    return Attaching(
        spec=spec,
        identity={"seed": "7"},
        driver="process 1 on a",
        opener=opener_of(spec.run_dir, is_new=True),
        ticket="1",
    )


def test_drivers_that_come_while_a_plane_opens_wait_outside_and_are_then_told_whose_it_is(
    opener, asked
):
    opens, may_go_on = threading.Event(), threading.Event()

    def opening():
        opens.set()
        assert may_go_on.wait(LIMIT_S)

    detached.RayPlane.opening = staticmethod(opening)
    other = replace(asked, driver="process 2 on b", ticket="2")
    first = threading.Thread(target=opener.attach, args=(asked, 0.0))
    first.start()
    assert opens.wait(LIMIT_S)

    assert opener.attach(other, 0.0) == "the plane to be there for process 1 on a"
    may_go_on.set()
    first.join(LIMIT_S)
    assert "ranks of process 1 on a, which has attached" in opener.attach(other, 0.0)
    with pytest.raises(StateError, match="seed is 7, here 77"):
        opener.attach(replace(other, identity={"seed": "77"}), 0.0)
    assert detached.RayPlane.opened == 1


def test_a_driver_that_comes_while_ranks_are_looked_at_is_told_of_them_not_of_the_look(
    comes, opener, asked, monkeypatch
):
    looks, main = threading.Event(), threading.current_thread()

    def address(plane):
        if threading.current_thread() is not main and not looks.is_set():
            comes.clear()
            looks.set()
            assert comes.wait(LIMIT_S)
        return Address(plane.board)

    opener.attach(asked, 0.0)
    monkeypatch.setattr(detached.RayPlane, "address", property(address))
    assert looks.wait(LIMIT_S)

    other = replace(asked, driver="process 2 on b", ticket="2")
    assert "ranks of process 1 on a, which has attached" in opener.attach(other, 0.0)


def test_a_driver_waits_no_longer_for_ranks_of_one_that_has_ended_than_ray_takes_to_tell(
    opener, asked, monkeypatch
):
    ended = []
    monkeypatch.setattr(detached.ray, "wait", lambda refs, timeout: (ended, refs), raising=False)
    second, third = (replace(asked, driver=f"process {n} on b", ticket=str(n)) for n in (2, 3))
    opener.attach(asked, 0.0, ["what the first waits for"])

    assert "ranks of process 1 on a, which has attached" in opener.attach(second, 0.0, ["of 2"])
    ended.append("what the first waits for")
    assert opener.attach(second, 0.5, ["of 2"]) == 0
    ended.clear()
    assert "ranks of process 2 on b" in opener.attach(third, 0.0, ["of 3"])


def test_a_plane_that_did_not_open_leaves_it_to_drivers_of_any_mix(opener, asked):
    def opening():
        raise StateError("it does not fit")

    detached.RayPlane.opening = staticmethod(opening)
    with pytest.raises(StateError, match="does not fit"):
        opener.attach(asked, 0.0)

    detached.RayPlane.opening = staticmethod(lambda: None)
    assert opener.attach(replace(asked, identity={"seed": "77"}, ticket="2"), 0.0) == 0


def test_a_plane_whose_roles_were_handed_other_values_or_whose_planner_is_lost_is_opened_anew(
    opener, asked, caplog, monkeypatch
):
    monkeypatch.setenv("AWS_SESSION_TOKEN", "before")
    for n, value in enumerate(("before", "after", "after")):
        again = replace(asked, environment={"AWS_SESSION_TOKEN": value}, ticket=asked.ticket)
        assert opener.attach(again, 0.0) == 0
        assert detached.RayPlane.opened == n + 1

    assert "opened again: variables of runtime.env.pass_on have other values" in caplog.text
    assert "opened again: it is being replaced" in caplog.text


def test_an_opener_whose_look_fails_looks_again_and_ends_itself_though_its_plane_does_not_close(
    opener, killed, asked, caplog
):
    def closing():
        raise OSError(28, "No space left on device")

    detached.RayPlane.closing = staticmethod(closing)
    runtime = asked.spec.mix.runtime.model_copy(update={"keep": 0.0})
    mix = asked.spec.mix.model_copy(update={"runtime": runtime})
    detached.RayPlane.fails_at = 3  # after the look of the opening
    opener.attach(replace(asked, spec=replace(asked.spec, mix=mix)), 0.0)

    assert killed.wait(LIMIT_S)
    assert "could not look at its ranks" in caplog.text
    assert "did not end as it should" in caplog.text


def test_an_opener_that_has_another_folder_of_that_path_opens_nothing(opener, asked):
    with pytest.raises(StateError, match=r"run is a different folder for the opener .*one path"):
        opener.attach(replace(asked, opener="of the folder of another host"), 0.0)

    assert detached.RayPlane.opened == 0
