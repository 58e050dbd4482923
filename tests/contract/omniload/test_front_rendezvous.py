"""What every rendezvous promises: a note is written once, read whole, and waited for no longer than told."""

import errno
import os
import socket
import threading
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from omniload.base.errors import ConfigError, StateError, UnavailableError
from omniload.front import rendezvous as rendezvous_module
from omniload.front.launch import Launch
from omniload.front.meeting import Failure, Joined, read_as, wait_for_ranks
from omniload.front.rendezvous import FolderRendezvous, NoteServer, fetch_note
from tests.support.ports import free_port
from trainer_integration.loader.torch_arrays import StoreRendezvous, rendezvous_of

NOTE = Joined(host="here", pid=1)
LONG_S = 30.0


@pytest.fixture(params=["folder", "store"])
def boards(request, tmp_path):
    """The boards of two ranks."""
    if request.param == "folder":
        return FolderRendezvous(tmp_path / "notes"), FolderRendezvous(tmp_path / "notes")
    first = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return StoreRendezvous(first), StoreRendezvous(
        TCPStore("127.0.0.1", first.port, is_master=False)
    )


@pytest.fixture
def rendezvous(boards):
    return boards[0]


def test_a_note_is_read_by_another_rank_as_it_was_written(boards):
    here, there = boards

    assert here.post("a/b", "grün") is True
    assert there.read("a/b", LONG_S) == "grün"


def test_a_note_is_written_once(boards):
    here, there = boards
    here.post("a", "first")

    assert there.post("a", "second") is False
    assert here.read("a", LONG_S) == "first"


def test_a_note_that_is_not_there_is_none_in_time(rendezvous):
    assert rendezvous.read("a", 0.05) is None


def test_a_note_written_while_it_is_waited_for_is_read(boards):
    here, there = boards
    writer = threading.Timer(0.1, there.post, ("a", "late"))
    writer.start()

    assert here.read("a", LONG_S) == "late"
    writer.join()


def test_a_failure_in_place_of_a_note_is_raised_by_its_reader(rendezvous):
    rendezvous.post("plane", Failure.of(StateError("another mix")).model_dump_json())

    with pytest.raises(StateError, match="rank 0: another mix"):
        read_as(rendezvous, "plane", Joined, of_rank=0, timeout_s=LONG_S)


def test_a_fault_of_another_rank_is_told_too(rendezvous):
    rendezvous.post("plane", Failure.of(KeyError("x")).model_dump_json())

    with pytest.raises(UnavailableError, match="rank 0: 'x'"):
        read_as(rendezvous, "plane", Joined, of_rank=0, timeout_s=LONG_S)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"version": 2, "host": "h", "pid": 1}'])
def test_a_note_of_another_release_is_refused(rendezvous, text):
    rendezvous.post("k", text)

    with pytest.raises(ConfigError, match="install one release"):
        read_as(rendezvous, "k", Joined, of_rank=3, timeout_s=LONG_S)


def test_a_note_that_is_there_is_read_however_little_time_is_left(rendezvous):
    rendezvous.post("k", "v")

    assert [rendezvous.read("k", 0.0) for _ in range(200)] == ["v"] * 200


def test_ranks_that_have_not_joined_are_named(rendezvous):
    rendezvous.post("joined/2", NOTE.model_dump_json())

    with pytest.raises(UnavailableError, match=r"ranks \[1, 3\] have not joined"):
        wait_for_ranks(rendezvous, [(r, f"joined/{r}") for r in (1, 2, 3)], 0.2, Joined)


def test_a_folder_of_notes_is_its_owners_alone(tmp_path):
    rendezvous = FolderRendezvous(tmp_path / "notes")
    rendezvous.post("plane", "secret")

    modes = {
        p.name: p.stat().st_mode & 0o777
        for p in (tmp_path / "notes", *(tmp_path / "notes").iterdir())
    }

    assert modes == {"notes": 0o700, "plane": 0o600}


def test_a_folder_that_goes_away_is_told_by_its_name(tmp_path):
    rendezvous = FolderRendezvous(tmp_path / "notes")
    (tmp_path / "notes").rmdir()

    with pytest.raises(ConfigError, match=r"address '.*notes': .*; correct the path"):
        rendezvous.post("plane", "note")


def test_a_folder_that_another_user_keeps_closed_is_told_by_its_name(tmp_path, monkeypatch):
    rendezvous = FolderRendezvous(tmp_path / "notes")

    def closed(path, **_):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(Path, "exists", closed)  # a test may run as root, to whom nothing is closed
    with pytest.raises(ConfigError, match=r"address '.*notes': .*plane: Permission denied"):
        rendezvous.read("plane", LONG_S)


def test_what_is_no_note_is_refused_and_never_waited_for(tmp_path):
    rendezvous = FolderRendezvous(tmp_path / "notes")
    os.mkfifo(tmp_path / "notes" / "pipe")
    rendezvous.post("bytes", "")
    (tmp_path / "notes" / "bytes").write_bytes(b"\xff")

    with pytest.raises(ConfigError, match="pipe: is a pipe; give the path of a note of this job"):
        rendezvous.read("pipe", LONG_S)
    with pytest.raises(ConfigError, match="install one release"):
        read_as(rendezvous, "bytes", Joined, of_rank=1, timeout_s=LONG_S)


def test_a_folder_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").write_text("x")

    with pytest.raises(ConfigError, match="name a folder that all ranks can write"):
        FolderRendezvous(tmp_path / "file" / "notes")


def test_a_file_far_too_large_for_a_note_is_not_read(tmp_path):
    rendezvous = FolderRendezvous(tmp_path)
    with (tmp_path / "plane").open("wb") as file:
        file.truncate(1 << 40)

    with pytest.raises(ConfigError, match=r"plane: holds 1 TiB, more than 1 MiB; is it a note"):
        rendezvous.read("plane", LONG_S)


@pytest.mark.parametrize("port", ["", "x", "0", "70000", "²"])
def test_ranks_without_a_meeting_place_are_told_how_to_have_one(monkeypatch, port):
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", port)

    with pytest.raises(
        ConfigError, match=r"rank 1 of 2, by the test, .* start by torchrun, .* alone takes rank=0"
    ):
        rendezvous_of(Launch(rank=1, world_size=2, attempt="", found_in="the test"), 1.0)


def test_a_store_that_nobody_hosts_is_unavailable(monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "9")

    with pytest.raises(
        UnavailableError,
        match=r"rank 1 of 2, by the test, finds no store at 127\.0\.0\.1:9 .* alone takes rank=0",
    ):
        rendezvous_of(Launch(rank=1, world_size=2, attempt="", found_in="the test"), 0.5)


@pytest.mark.parametrize(
    ("host", "said"),
    [
        ("[::1]", "correct it without its brackets, or"),
        ("a..b", r"MASTER_ADDR 'a\.\.b' .*correct it, or"),
    ],
)
def test_a_store_at_a_name_without_an_address_is_told_with_the_name(monkeypatch, host, said):
    monkeypatch.setenv("MASTER_ADDR", host)
    monkeypatch.setenv("MASTER_PORT", "9")

    with pytest.raises(
        UnavailableError, match=f"this host finds no address .*{said} have it resolved"
    ):
        rendezvous_of(Launch(rank=1, world_size=2, attempt="", found_in="the test"), 0.5)


def test_a_note_left_while_rank_0_is_between_two_loaders_is_there_for_its_next(monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    first, second = (
        Launch(rank=rank, world_size=2, attempt="", found_in="the test") for rank in range(2)
    )
    closed = rendezvous_of(first, LONG_S)
    del closed

    rendezvous_of(second, LONG_S).post("here/1", "early")

    assert rendezvous_of(first, LONG_S).read("here/1", LONG_S) == "early"


@pytest.fixture
def server():
    """A server of one note, and where it is."""
    at = "127.0.0.1", free_port()
    server = NoteServer(*at)
    yield server, at
    server.close()


def test_a_note_is_served_to_every_client_also_to_one_that_came_before_it(server):
    server, at = server
    heard = []
    early = threading.Thread(target=lambda: heard.append(fetch_note(*at, LONG_S, 100)))
    early.start()
    server.serve(b"a note")
    early.join(LONG_S)

    assert [*heard, fetch_note(*at, LONG_S, 100)] == [b"a note"] * 2


def test_no_note_is_had_of_a_server_that_has_none_yet_or_too_long_a_one_or_is_closed(server):
    server, at = server
    assert fetch_note(*at, 0.05, 100) == b""
    server.serve(b"a note")
    assert fetch_note(*at, LONG_S, 5) == b""
    server.close()
    assert fetch_note(*at, LONG_S, 100) == b""


def test_a_client_that_reads_nothing_keeps_no_other_from_the_note(server, monkeypatch):
    monkeypatch.setattr(rendezvous_module, "_TAKEN_S", 1.0)
    server, at = server
    server.serve(b"n" * (8 << 20))  # more than the kernel takes for who does not read
    with socket.create_connection(at):
        # A busy machine may give one that reads too little time as well: it asks again.
        assert any(len(fetch_note(*at, LONG_S, 8 << 20)) == 8 << 20 for _ in range(5))


def test_a_port_where_somebody_listens_is_refused(server):
    with pytest.raises(ConfigError, match=r"127\.0\.0\.1:\d+ cannot be listened on"):
        NoteServer(*server[1])
