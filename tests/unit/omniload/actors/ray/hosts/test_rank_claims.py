"""Claims of ranks, and ranks that never report to a planner that took over: by locks and heartbeats."""

import fcntl
import threading
from contextlib import ExitStack, closing

import pytest

pytest.importorskip("ray")
from omniload.actors import rank_locks
from omniload.actors.heartbeat_board import Activity, FolderBoard
from omniload.actors.rank_locks import forget_generations, lock_of, rank_has_ended
from omniload.actors.ray.hosts.rank_claims import (
    LostRanks,
    claim_for_guest,
    claim_rank,
    was_claimed,
    watch_unheard,
)
from omniload.base.errors import StateError
from omniload.base.linux.file_lock import FileLock, locked
from omniload.machine.progress import Progress, reason_of
from omniload.plan.place_tree import ClientPlaceTree
from omniload.plan.world import World

WORLD = World(tree=ClientPlaceTree.of(dp=2), generation=3, step=7)
RANKS = [(0, 0), (1, 0)]
LIMIT_S = 60.0


@pytest.fixture
def board(tmp_path):
    return FolderBoard(tmp_path)


def looked(lost, *at_s, world=WORLD, ranks=RANKS):
    return [lost.look(world, ranks, now_s) for now_s in at_s]


def test_a_rank_whose_process_is_gone_is_lost_at_once_and_one_that_lives_never(board):
    held, gone = (claim_rank(board.folder, f"rank dp={n} of 3") for n in range(2))
    lost = LostRanks(board.folder, board, silent_s=None)
    board.note(Activity("rank dp=0").progress())

    assert looked(lost, 0.0) == [{}]
    gone.close()
    assert looked(lost, *map(float, range(60)))[-1] == {(1, 0): "rank dp=1 has ended"}
    held.close()


def test_a_rank_is_taken_however_long_another_process_takes_to_ask_whether_it_is(
    board, monkeypatch
):
    name, tries, asking = "rank dp=0", [], ExitStack()
    asking.enter_context(locked(lock_of(board.folder, name), shared=True))

    class Counted(FileLock):
        def __init__(self, path):
            tries.append(path)
            if len(tries) == 4:
                asking.close()
            super().__init__(path)

    monkeypatch.setattr(rank_locks, "FileLock", Counted)

    with closing(claim_rank(board.folder, name)):
        assert len(tries) == 4
        with pytest.raises(StateError, match="has a handle already, in process"):
            claim_rank(board.folder, name)


def test_a_rank_that_nobody_has_taken_yet_may_come(board):
    claim_rank(board.folder, "rank dp=0 of 2").close()  # of the previous world

    board.note(Progress(name="rank dp=0", pid=7, beat_s=-1e6, tasks=()))  # its last heartbeat

    assert looked(LostRanks(board.folder, board, silent_s=1.0), 0.0, 1.0, 2.0) == [{}] * 3


def test_one_without_heartbeats_is_lost_where_another_may_come_in_its_place(board):
    claim_for_guest(board.folder, "rank dp=0 of 3", "process 7 on B (aa)")
    held = claim_rank(board.folder, "rank dp=1 of 3")
    beating = Activity("rank dp=1")
    board.note(Activity("rank dp=0").progress())
    lost, found = LostRanks(board.folder, board, silent_s=3.0), []

    for now_s in range(5):
        board.note(beating.progress())
        found += looked(lost, float(now_s))

    told = [{(0, 0): f"rank dp=0 has given no heartbeat for {n} s"} for n in (3, 4)]
    assert found == [{}, {}, {}, *told]
    held.close()


class TwoHosts:
    """Heartbeats of this host, and those that are relayed from another."""

    def __init__(self, board):
        self._board, self.told = board, {}

    def read(self):
        return self.told | self._board.read()


@pytest.mark.parametrize("has_ended", [False, True])
def test_a_rank_of_another_host_is_lost_once_that_host_tells_that_it_has_ended(board, has_ended):
    held, hosts = claim_rank(board.folder, "rank dp=0 of 3"), TwoHosts(board)
    lost = LostRanks(board.folder, hosts, silent_s=None)
    assert looked(lost, 0.0) == [{}]

    silent = Progress(name="rank dp=1", pid=7, beat_s=-1e6, tasks=(), has_ended=has_ended)
    hosts.told = {silent.name: silent}

    assert looked(lost, 1.0) == [{(1, 0): "rank dp=1 has ended"} if has_ended else {}]
    held.close()


def test_time_in_which_this_process_did_not_run_says_nothing_of_others(board):
    claim_for_guest(board.folder, "rank dp=0 of 3", "process 7 on B (aa)")

    assert looked(LostRanks(board.folder, board, silent_s=3.0), 0.0, 100.0, 101.0) == [{}] * 3


class Shell:
    """A planner that hears of one rank while another rank is lost."""

    def __init__(self):
        self.unheard_now, self.lost, self.told = [*RANKS], [], threading.Event()

    def unheard(self):
        return WORLD, [*self.unheard_now]

    def lose(self, ranks, generation):
        self.lost.append((ranks, generation))
        self.unheard_now.remove((0, 0))
        self.told.set()


def test_each_lost_rank_is_told_of_once_with_what_to_do_until_none_is_left(board, caplog):
    claim_rank(board.folder, "rank dp=1 of 3").close()
    shell, left = Shell(), threading.Event()

    watch_unheard(shell.unheard, shell.lose, LostRanks(board.folder, board, silent_s=None), left)

    assert shell.told.wait(LIMIT_S)
    left.set()
    assert shell.lost == [([(1, 0)], 3)]
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith(
        "rank dp=1 has ended, and has reported nothing to the planner that took over"
    )
    assert "resize to the ranks that are left" in line
    assert "start again from the last checkpoint" in line


def test_who_waits_for_a_rank_that_is_gone_is_told_so_and_not_that_it_is_stopped(board):
    held = claim_rank(board.folder, "rank dp=1 of 3")
    board.note(Progress(name="rank dp=1", pid=7, beat_s=-1e6, tasks=()))

    def said():
        return reason_of("rank dp=1", board.read(), -1e6 + 30)

    assert "process 7, last heartbeat 30 s ago) is stopped, or its machine is too busy" in said()
    held.close()
    assert "last heartbeat 30 s ago) has ended, or has closed its loader" in said()
    assert "resize to the ranks that are left" in said()


def test_a_rank_is_gone_only_where_it_was_taken_here_and_is_held_in_no_generation(tmp_path):
    assert not rank_has_ended(tmp_path, "rank dp=1")

    claim_rank(tmp_path, "rank dp=1").close()
    now = claim_rank(tmp_path, "rank dp=1 of 2")
    claim_rank(tmp_path, "rank dp=10").close()
    assert not rank_has_ended(tmp_path, "rank dp=1")

    now.close()
    assert rank_has_ended(tmp_path, "rank dp=1")
    claim_for_guest(tmp_path, "rank dp=1 of 4", "process 7 on B (aa)")
    assert not rank_has_ended(tmp_path, "rank dp=1")

    # Ranks change on: it is a process of this host again.
    here = claim_rank(tmp_path, "rank dp=1 of 11")
    assert not rank_has_ended(tmp_path, "rank dp=1")
    here.close()
    assert rank_has_ended(tmp_path, "rank dp=1")


def test_a_rank_that_a_process_of_another_host_has_is_refused_to_all_others_and_not_to_it(tmp_path):
    claim_for_guest(tmp_path, "rank dp=1", "process 7 on B (aa)")
    claim_for_guest(tmp_path, "rank dp=1", "process 7 on B (aa)")

    for other in (
        lambda: claim_for_guest(tmp_path, "rank dp=1", "process 7 on B (bb)"),
        lambda: claim_rank(tmp_path, "rank dp=1"),
    ):
        with pytest.raises(StateError, match=r"taken by process 7 on B \(aa\); .* next generation"):
            other()
    claim_rank(tmp_path, "rank dp=1 of 1").close()
    assert was_claimed(tmp_path, "rank dp=1")


def test_a_rank_that_a_process_of_this_host_has_is_refused_to_those_of_others(tmp_path):
    held = claim_rank(tmp_path, "rank dp=1")
    with pytest.raises(StateError, match="has a handle already"):
        claim_for_guest(tmp_path, "rank dp=1", "process 7 on B (aa)")
    held.close()

    claim_for_guest(tmp_path, "rank dp=1", "process 7 on B (aa)")


def test_of_worlds_before_the_last_two_no_file_stays_but_those_of_ranks_that_live(tmp_path):
    stopped = claim_rank(tmp_path, "rank dp=0 of 1")
    for generation in ("", " of 1", " of 3", " of 10", " of 17"):  # numbers may leap
        claim_rank(tmp_path, f"rank dp=1{generation}").close()
        claim_for_guest(tmp_path, f"rank dp=2{generation}", "process 7 on B (aa)")
    (tmp_path / "rank-dp=1.json").touch()

    of_last = [f"rank-dp={n}-of-{g}" for g in (10, 17) for n in (1, 2)]
    kept = {f"{name}.lock" for name in (*of_last, "rank-dp=0-of-1")}
    kept |= {f"{name}.guest" for name in of_last if "=2" in name}
    assert {path.name for path in tmp_path.iterdir()} == kept | {"rank-dp=1.json"}
    stopped.close()
    claim_rank(tmp_path, "rank dp=1 of 18").close()
    assert not was_claimed(tmp_path, "rank dp=0 of 1")


def test_a_rank_whose_file_is_removed_as_it_is_taken_is_taken_by_the_next_one(
    tmp_path, monkeypatch
):
    class Removed(FileLock):
        def __init__(self, path):
            super().__init__(path)
            if not removed:
                removed.append(path.unlink())

    removed = []
    monkeypatch.setattr(rank_locks, "FileLock", Removed)

    with closing(claim_rank(tmp_path, "rank dp=0")), pytest.raises(StateError):
        claim_rank(tmp_path, "rank dp=0")
    assert removed


def test_a_rank_whose_file_is_removed_and_taken_by_another_thread_is_refused(tmp_path, monkeypatch):
    class Removed(FileLock):
        def __init__(self, path):
            super().__init__(path)
            if not others:
                path.unlink()
                others.append(FileLock(path))

    others = []
    monkeypatch.setattr(rank_locks, "FileLock", Removed)

    with pytest.raises(StateError, match="has a handle already"):
        claim_rank(tmp_path, "rank dp=0")
    others[0].close()
    claim_rank(tmp_path, "rank dp=0").close()


def test_a_file_that_another_planner_has_removed_and_a_rank_has_taken_anew_stays(
    tmp_path, monkeypatch
):
    def meanwhile(descriptor, how):
        if not taken:
            taken.append(None)
            oldest.unlink()
            taken[0] = claim_rank(tmp_path, "rank dp=0")
        flock(descriptor, how)

    for generation in ("", " of 1", " of 2"):
        lock_of(tmp_path, f"rank dp=0{generation}").touch()
    flock, oldest, taken = fcntl.flock, lock_of(tmp_path, "rank dp=0"), []
    monkeypatch.setattr(fcntl, "flock", meanwhile)

    forget_generations(tmp_path)

    assert taken[0].is_at(oldest)
