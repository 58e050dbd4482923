"""The link to a further reader on Ray: a loader's handling of a stopped reader, and the end of a reader."""

import time
from types import SimpleNamespace

import pytest

pytest.importorskip("ray")

from omniload.actors.ray.scaling import readers
from omniload.actors.ray.scaling.readers import RayReader
from omniload.mix.runtime import RuntimeConfig
from omniload.source.parts.reader import ReaderLostError


class Cluster:
    """A Ray with one reader; its calls are answered once the answers are in ``answers``."""

    def __init__(self):
        self.answers, self.ended_by_ray, self.now_s = {"process": "its process"}, 0, 100.0
        self.is_stopped, self.has_ended, self.killed, self.let_go = False, False, 0, 0
        self.looks = iter(())
        """Whether the reader is stopped, at each look of a caller that waits for an answer."""
        self.started_with, self.opened_with = (), ()

    def get_runtime_context(self):
        return SimpleNamespace(get_node_id=lambda: "0" * 56)

    def remote(self, **_):
        calls = {name: SimpleNamespace(remote=lambda *_, n=name: n) for name in ("process", "read")}
        calls["open"] = SimpleNamespace(remote=self._open)
        return lambda _: SimpleNamespace(remote=lambda *given: self._start(given, calls))

    def _start(self, given, calls):
        self.started_with = given
        return SimpleNamespace(**calls)

    def _open(self, *given):
        self.opened_with = given
        return "open"

    def wait(self, asked, timeout):
        if asked != ["read"]:
            assert timeout == 0, "nobody waits for a reader that opens its source"
        elif (look := next(self.looks, None)) is None:
            self.answers["read"] = "rows"
        else:
            self.now_s, self.is_stopped = self.now_s + timeout, look
        return [call for call in asked if call in self.answers], []

    def get(self, call):
        return self.answers[call]

    def kill(self, *_, **__):
        self.ended_by_ray += 1

    def held(self, process):
        assert process == "its process"
        return SimpleNamespace(
            is_stopped=lambda: self.is_stopped,
            has_ended=lambda: self.has_ended,
            kill=self._kill,
            close=self._close,
        )

    def _kill(self):
        self.killed += 1

    def _close(self):
        self.let_go += 1


@pytest.fixture
def cluster(monkeypatch):
    made = Cluster()
    monkeypatch.setattr(readers, "ray", made)
    monkeypatch.setattr(readers, "HeldProcess", made.held)
    monkeypatch.setattr(time, "monotonic", lambda: made.now_s)
    return made


def an_opening(**runtime):
    runtime = RuntimeConfig(stuck_after=60.0, **runtime)
    return SimpleNamespace(number=0, mix=SimpleNamespace(runtime=runtime))


def a_reader():
    return RayReader(an_opening(), 1, "loader-0", None)


def test_a_reader_has_the_variables_of_its_loader_past_what_ray_keeps_of_its_start(
    cluster, monkeypatch
):
    monkeypatch.setenv("A_SECRET", "hush")
    opening = an_opening(address="auto", env={"pass_on": ["A_SECRET"]})

    RayReader(opening, 1, "loader-0", None)

    assert cluster.started_with == ("loader-0-reader-0-1", None)
    assert cluster.opened_with == (opening, {"A_SECRET": "hush"})


def test_a_reader_that_is_stopped_as_it_opens_its_source_is_lost_and_not_waited_for(cluster):
    reader = a_reader()
    assert reader.facts() is None
    cluster.is_stopped = True
    assert reader.facts() is None  # seen for the first time: it may resume
    cluster.now_s += 0.6

    with pytest.raises(ReaderLostError, match="loader-0-reader-0-1 is stopped"):
        reader.facts()
    reader.close()

    assert (cluster.killed, cluster.ended_by_ray, cluster.let_go) == (1, 1, 1)


def test_a_reader_that_is_stopped_between_two_reads_is_lost_before_the_next_waits_for_it(cluster):
    reader = a_reader()
    cluster.answers["open"] = "facts"
    assert reader.facts() == "facts"
    cluster.is_stopped = True
    assert reader.facts() == "facts"
    cluster.now_s += 0.25

    with pytest.raises(ReaderLostError, match="loader-0-reader-0-1 is stopped"):
        reader.facts()


def test_a_reader_that_goes_on_opens_its_source_however_long_that_takes(cluster):
    reader = a_reader()
    for is_stopped in (False, True, False, True, False):
        cluster.is_stopped = is_stopped
        assert reader.facts() is None
        cluster.now_s += 600.0
    cluster.answers["open"] = "facts"

    assert reader.facts() == "facts"


def read_through(cluster, looks):
    """Return the result of a read for these looks (stopped or running), and the seconds until it comes."""
    cluster.answers = {"process": "its process", "open": "facts"}
    reader = a_reader()
    assert reader.facts() == "facts"
    cluster.looks, began_s = iter(looks), cluster.now_s
    try:
        return reader.read(0, 9, None)(), cluster.now_s - began_s
    except ReaderLostError as error:
        return str(error), cluster.now_s - began_s


def test_a_reader_that_is_stopped_under_a_read_is_lost_at_the_second_look(cluster):
    found, after_s = read_through(cluster, [False, False, True, True, True])

    assert found == "loader-0-reader-0-1 is stopped"
    assert after_s == pytest.approx(0.4)


def test_a_reader_that_goes_on_under_a_read_is_waited_for_until_it_takes_too_long(cluster):
    assert read_through(cluster, [True, False] * 100)[0] == "rows"

    found, after_s = read_through(cluster, [True, False] * 1_000)
    assert found == "loader-0-reader-0-1 gave no answer within 60 s"
    assert after_s == pytest.approx(60, abs=0.2)


def test_a_reader_that_has_ended_since_it_opened_its_source_is_lost_before_a_read_asks_it(cluster):
    cluster.answers["open"] = "facts"
    reader = a_reader()
    assert reader.facts() == "facts"
    cluster.has_ended = True

    with pytest.raises(ReaderLostError, match="loader-0-reader-0-1 has ended"):
        reader.facts()


def test_a_reader_that_runs_is_ended_by_ray_alone_which_says_nothing_of_it_then(cluster):
    cluster.answers["open"] = "facts"
    reader = a_reader()
    reader.facts()

    reader.close()

    assert (cluster.killed, cluster.ended_by_ray, cluster.let_go) == (0, 1, 1)
