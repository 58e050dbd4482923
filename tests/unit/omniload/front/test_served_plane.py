"""Serving and joining a plane: refusals before anything starts."""

import json
import os
import socket
from contextlib import ExitStack

import pytest

import omniload
from omniload.actors.local.plane import LocalPlane
from omniload.actors.plane import PlaneSpec
from omniload.base.errors import ConfigError, IntegrityError, StateError, UnavailableError
from omniload.base.linux.file_lock import FileLock, locked
from omniload.base.linux.network import host_id
from omniload.client import Client
from omniload.front import plane_note, served_plane, served_rank
from omniload.mix.journal.times import times_since
from omniload.plan.place_tree import ClientPlaceTree
from tests.support.plane.corpora import a_corpus
from tests.support.plane.edits.mix_commands import a_mix_file

_SERVERS = ExitStack()
TERMS = {"is_given": False, "bind": "eth0", "ports": "", "store_bytes": 1}


@pytest.fixture(autouse=True)
def _servers_end():
    yield
    _SERVERS.close()


def a_note(folder, *, served=True, **changes):
    """Write the note that a plane for four ranks leaves for joining ranks, locked as by the serving process."""
    plane = {
        "cluster": "127.0.0.1:1",
        "namespace": "omniload-0",
        "dp_ranks_of": {"constructor-0": [0, 1, 2, 3]},
        "board": str(folder),
        "host": host_id(),
        "batch_timeout_s": 1.0,
    }
    note = {
        "version": 2,
        "plane": plane | changes.pop("plane", {}),
        "token": "secret",
        "names": ["docs"],
        "vocab_size": 256,
        "num_steps": None,
        "first_step": 0,
        "repeats": True,
        "run_dir": None,
    }
    folder.mkdir(exist_ok=True)
    (folder / "plane.json").write_text(json.dumps(note | changes))
    if served:
        _SERVERS.enter_context(locked(folder / "plane.json"))
    return folder


def test_a_rank_knows_the_sources_of_a_plane_before_it_is_part_of_it(tmp_path):
    loader = omniload.join(a_note(tmp_path), rank=0, world_size=4, arrays="numpy")

    assert (loader.source_names, loader.vocab_size) == (("docs",), 256)
    loader.close()


@pytest.mark.parametrize(("step", "first_step", "batches"), [(None, 0, 9), (None, 2, 7), (5, 2, 4)])
def test_the_length_of_a_rank_that_joins_is_the_batches_from_its_first_step_on(
    tmp_path, step, first_step, batches
):
    note = a_note(tmp_path, num_steps=9, first_step=first_step)

    loader = omniload.join(note, rank=0, world_size=4, step=step, arrays="numpy")

    assert len(loader) == batches


@pytest.mark.parametrize("changes", [{"repeats": False, "num_steps": 9}, {"repeats": True}])
def test_a_rank_that_joins_a_plane_that_may_end_with_its_data_has_no_length(tmp_path, changes):
    loader = omniload.join(a_note(tmp_path, **changes), rank=0, world_size=4, arrays="numpy")

    with pytest.raises(TypeError, match="steps= gives it one"):
        len(loader)


def test_losses_that_a_rank_reports_are_kept_in_the_folder_of_the_run_that_is_served(
    tmp_path, monkeypatch
):
    mix = a_corpus(tmp_path)
    spec = PlaneSpec(mix=mix, base_dir=tmp_path, tree=ClientPlaceTree.of())
    note = a_note(tmp_path / "address", names=list(mix.names), run_dir=str(tmp_path / "run"))
    with LocalPlane(spec) as plane:

        def joined(_self, stack, _state):
            return stack.enter_context(Client(plane.handle(0)))

        monkeypatch.setattr(served_rank._JoinServed, "__call__", joined)
        with omniload.join(note, rank=2, world_size=4, arrays="numpy") as loader:
            rows = loader.next_batch()
            loader.observe(rows, rows.labels * 0.5, seconds=0.25)
            with pytest.raises(omniload.ConfigError, match="no losses, rewards or seconds"):
                loader.observe(rows)

    times = times_since(tmp_path / "run", 0)
    work = times.tokens_M[0], times.squares_M[0]
    assert (work, times.seconds_M.tolist()) == (rows.work(), [0.25])
    (line,) = (tmp_path / "run" / "losses" / "rank-2.jsonl").read_text().splitlines()
    assert (json.loads(line)["step"], json.loads(line)["names"]) == (0, list(mix.names))


def test_without_a_plane_a_rank_says_what_to_start(tmp_path):
    with pytest.raises(UnavailableError, match=r"no plane is served at .*omniload.serve"):
        omniload.join(tmp_path / "none", rank=0, world_size=1, timeout=1e-9)


def test_the_address_of_a_plane_whose_server_was_killed_is_none(tmp_path):
    a_note(tmp_path, served=False)

    with pytest.raises(UnavailableError, match=r"no plane is served .* that served one has ended"):
        omniload.join(tmp_path, rank=0, world_size=4, timeout=1e-9)


def test_ranks_that_look_at_an_address_at_once_do_not_take_one_another_for_its_server(tmp_path):
    with locked(a_note(tmp_path, served=False) / "plane.json", shared=True):
        assert plane_note._note_at(tmp_path / "plane.json") is None
    with locked(tmp_path / "plane.json"):
        assert plane_note._note_at(tmp_path / "plane.json").names == ("docs",)


@pytest.mark.parametrize(
    ("numbers", "reason"),
    [
        ({"rank": -1, "world_size": 4}, r"rank is -1"),
        ({"rank": 0, "world_size": 0}, r"world_size is 0"),
        ({"rank": 0, "world_size": True}, r"world_size is True"),
        ({"rank": 0, "world_size": 3}, r"served for 4 ranks; give step"),
        ({"rank": 0, "world_size": 4, "generation": 2}, r"served for 4 ranks; give step"),
        ({"rank": 0, "world_size": 3, "step": 1.5}, r"step is 1.5"),
        ({"rank": 0, "world_size": 3, "step": 1, "generation": 0}, r"generation is 0"),
        ({"rank": 0, "world_size": 4, "labels": "none"}, r"labels is 'none'"),
        ({"rank": 0, "world_size": 4, "timeout": 0}, r"timeout is 0"),
    ],
)
def test_numbers_that_are_none_are_refused(tmp_path, numbers, reason):
    with pytest.raises(ConfigError, match=reason):
        omniload.join(a_note(tmp_path), arrays="numpy", **({"timeout": 1.0} | numbers))


def test_a_plane_of_another_host_that_listens_on_loopback_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"on another host, .* set runtime.bind"):
        omniload.join(a_note(tmp_path, plane={"host": "elsewhere"}), rank=0, world_size=4)


@pytest.mark.parametrize("is_served", [True, False])
def test_whether_a_plane_of_another_host_is_served_a_connection_tells_and_no_lock(
    tmp_path, monkeypatch, is_served
):
    there = {"host": "elsewhere", "lifeline": "10.0.0.1:20199", "terms": TERMS}
    asked = []
    monkeypatch.setattr(plane_note, "answers", lambda *words: asked.append(words) or is_served)

    note = plane_note._note_at(a_note(tmp_path, served=not is_served, plane=there) / "plane.json")

    assert (note is not None) == is_served
    assert [address for address, _ in asked] == ["10.0.0.1:20199"]


def test_a_plane_is_found_at_a_port_as_in_a_folder(tmp_path, monkeypatch):
    asked = []
    note = (a_note(tmp_path) / "plane.json").read_bytes()
    monkeypatch.setattr(plane_note, "fetch_note", lambda *at: asked.append(at[:2]) or note)

    loader = omniload.join("head-0.job:29600", rank=0, world_size=4, arrays="numpy")

    assert (loader.source_names, asked) == (("docs",), [("head-0.job", 29600)])
    loader.close()


def test_a_plane_stays_where_its_relative_folder_was_named_from(tmp_path, monkeypatch):
    """A process that serves may go to another folder while it does."""
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    spec = PlaneSpec(mix=a_corpus(tmp_path), base_dir=tmp_path, tree=ClientPlaceTree.of(dp=1))

    def opened(spec):
        os.chdir(tmp_path / "elsewhere")
        return LocalPlane(spec)

    note = json.loads((a_note(tmp_path / "other") / "plane.json").read_text())
    monkeypatch.setattr(served_plane, "open_ray_plane", opened)
    monkeypatch.setattr(LocalPlane, "address", None, raising=False)
    monkeypatch.setattr(served_plane, "_note_of", lambda *_: plane_note.PlaneNote(**note))

    with served_plane.ServedPlane(spec, "here"):
        assert (tmp_path / "here" / "plane.json").exists()

    assert not (tmp_path / "here" / "plane.json").exists()
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_a_host_whose_name_nobody_knows_is_told(monkeypatch):
    def refused(*_):
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(plane_note, "fetch_note", lambda *_: b"")
    monkeypatch.setattr(socket, "getaddrinfo", refused)

    with pytest.raises(UnavailableError, match=r"no host head-9 is known here \(Name or service"):
        omniload.join("head-9:29600", rank=0, world_size=4, timeout=1e-9)


@pytest.mark.parametrize("address", ["[fd00::1]:29600", "fd00::1:29600", "tcp://10.0.0.1:29600"])
def test_what_is_neither_a_port_of_ipv4_nor_a_folder_is_refused_and_makes_none(
    tmp_path, monkeypatch, address
):
    mix = a_mix_file(tmp_path)
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.iterdir())

    with pytest.raises(ConfigError, match=r"neither HOST:PORT .* listen on IPv4"):
        omniload.join(address, rank=0, world_size=1)
    with pytest.raises(ConfigError, match=r"neither HOST:PORT .* listen on IPv4"):
        omniload.serve(mix, address=address)
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("port", [0, 65_536])
def test_a_port_that_there_is_not_is_refused(tmp_path, port):
    with pytest.raises(ConfigError, match=r"ports are 1 to 65535"):
        omniload.join(f"10.0.0.1:{port}", rank=0, world_size=1)
    with pytest.raises(ConfigError, match=r"ports are 1 to 65535"):
        omniload.serve(a_mix_file(tmp_path), address=f"10.0.0.1:{port}")


def test_a_plane_of_another_user_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 4711)
    os.chown(a_note(tmp_path) / "plane.json", 4712, -1)

    with pytest.raises(ConfigError, match=r"is of user 4712, this rank of 4711"):
        omniload.join(tmp_path, rank=0, world_size=4)


@pytest.mark.parametrize("damage", [{"version": 1}, {"token": None}, {"plane": {"cluster": 1}}])
def test_an_address_of_another_release_is_refused(tmp_path, damage):
    with pytest.raises(IntegrityError, match=r"no address of a plane that this release serves"):
        omniload.join(a_note(tmp_path, **damage), rank=0, world_size=4)


def test_a_rank_that_joins_is_given_no_state(tmp_path):
    loader = omniload.join(a_note(tmp_path), rank=0, world_size=4, arrays="numpy")
    loader.load_state_dict({"step": 3})

    with pytest.raises(ConfigError, match=r"give the state to omniload.serve"):
        loader.start()


def test_one_process_serves_at_an_address(tmp_path):
    mix, lock = a_mix_file(tmp_path), FileLock(tmp_path / "plane.lock")

    with pytest.raises(StateError, match=r"is the address of a plane that .* serves"):
        omniload.serve(mix, address=tmp_path)
    lock.close()


@pytest.mark.parametrize(
    ("keywords", "reason"),
    [
        ({"world_size": 0}, "world_size is 0"),
        ({"steps": 0}, "steps is 0"),
        ({"prefetch": 1}, "no setting"),
    ],
)
def test_what_cannot_be_served_is_refused_before_ray_is_started(tmp_path, keywords, reason):
    with pytest.raises(ConfigError, match=reason):
        omniload.serve(a_mix_file(tmp_path), address=tmp_path / "plane", **keywords)
    assert not (tmp_path / "plane").exists()


@pytest.mark.parametrize(
    ("numbers", "reason"),
    [
        ({"rank": 1.0, "world_size": 2}, "rank is 1.0"),
        ({"rank": 0, "world_size": -2}, "world_size is -2"),
        ({"rank": 0, "world_size": 2, "step": -1}, "step is -1"),
        ({"rank": 0, "world_size": 2, "generation": 0}, "generation is 0"),
    ],
)
def test_a_loader_is_no_rank_that_there_is_not(tmp_path, numbers, reason):
    loader = omniload.join(a_note(tmp_path), rank=0, world_size=4, arrays="numpy")

    with pytest.raises(ConfigError, match=reason):
        loader.resize(**numbers)
