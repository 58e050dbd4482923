"""What a run keeps in its folder: a pipe, or a file past all reason, in its place is refused, not waited for."""

import os

import pytest

from omniload.base.errors import IntegrityError, StateError
from snapshot.env.target.records import Records
from trainer_integration.checkpoint import file_digests as seals
from trainer_integration.checkpoint.file_digests import FileDigest, read_sealed_json
from trainer_integration.report import proof
from trainer_integration.report.proof import PROOF_NAME, read_proof
from trainer_integration.run import launch_record, run_log
from trainer_integration.run.launch_plan import next_log_number
from trainer_integration.run.launch_record import LAUNCH_RECORD_NAME, read_launch_record
from trainer_integration.run.run_log import LOG_NAME, RunLog, read_log

READERS = [
    (LAUNCH_RECORD_NAME, launch_record, read_launch_record),
    (PROOF_NAME, proof, read_proof),
    (LOG_NAME, run_log, read_log),
    ("meta.json", seals, lambda folder: read_sealed_json(folder / "meta.json")),
]


@pytest.mark.parametrize(("name", "_", "read"), READERS, ids=[name for name, *_ in READERS])
def test_a_pipe_in_place_of_a_file_of_a_run_is_refused_at_once(tmp_path, name, _, read):
    os.mkfifo(tmp_path / name)

    with pytest.raises((StateError, IntegrityError), match=f"{name}: is a pipe, not "):
        read(tmp_path)


@pytest.mark.parametrize(("name", "module", "read"), READERS, ids=[name for name, *_ in READERS])
def test_a_file_of_a_run_has_a_largest_size(tmp_path, monkeypatch, name, module, read):
    monkeypatch.setattr(module, "_MOST_BYTES", 10)
    (tmp_path / name).write_bytes(b"{" * 11)

    with pytest.raises(
        (StateError, IntegrityError), match=f"{name}: holds 11 bytes, and .* at most 10"
    ):
        read(tmp_path)


@pytest.mark.parametrize("fresh", [True, False])
def test_a_log_is_not_begun_in_a_pipe(tmp_path, fresh):
    os.mkfifo(tmp_path / LOG_NAME)

    with pytest.raises(StateError, match=f"{LOG_NAME}: is a pipe, not a file of ours"):
        RunLog(tmp_path, fresh=fresh)


@pytest.mark.parametrize("stride", [1, 3, 1 << 20])
@pytest.mark.parametrize(
    ("before", "kept"),
    [(b"", b""), (b"torn", b""), (b"a\nb\n", b"a\nb\n"), (b"a\nb\ntorn", b"a\nb\n")],
)
def test_a_torn_line_of_any_length_is_cut_off(tmp_path, monkeypatch, stride, before, kept):
    monkeypatch.setattr(run_log, "_STRIDE_BYTES", stride)
    (tmp_path / LOG_NAME).write_bytes(before)

    RunLog(tmp_path).close()

    assert (tmp_path / LOG_NAME).read_bytes() == kept


def test_a_pipe_has_no_digest(tmp_path):
    os.mkfifo(tmp_path / "data")

    with pytest.raises(StateError, match="is a pipe"):
        FileDigest.of(tmp_path / "data")


def test_only_ascii_digits_number_a_log(tmp_path):
    (tmp_path / "logs").mkdir()
    for attempt in ("3", "\u0669", "\u00b2", "9" * 200):
        (tmp_path / "logs" / f"rank-0-attempt-{attempt}.log").touch()

    assert next_log_number(tmp_path) == 4


def test_the_record_of_an_environment_is_a_file_of_a_size_that_can_be(tmp_path, monkeypatch):
    records = Records(str(tmp_path))
    records.folder.mkdir()
    os.mkfifo(records.folder / "journal.json")
    with pytest.raises(StateError, match=r"journal.json: is a pipe, not a journal"):
        records.read("journal")

    monkeypatch.setattr("snapshot.env.target.records._MOST_BYTES", 10)
    (records.folder / "record.json").write_bytes(b"[" * 11)
    with pytest.raises(StateError, match=r"record.json: holds 11 bytes, .* at most 10"):
        records.read("record")
