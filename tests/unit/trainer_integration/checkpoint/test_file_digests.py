import pytest

from omniload.base.errors import IntegrityError
from trainer_integration.checkpoint.file_digests import (
    FileDigest,
    read_sealed_json,
    write_sealed_json,
    write_synced,
)


def test_a_seal_survives_json():
    seal = FileDigest(size_bytes=5, xxh3=(1 << 64) - 3)

    assert FileDigest.from_json(seal.to_json()) == seal


@pytest.mark.parametrize("value", [None, 3, {}, {"size_bytes": "5", "xxh3": "00"}])
def test_what_is_not_a_seal_is_refused(value):
    with pytest.raises(ValueError, match="is no digest of a file"):
        FileDigest.from_json(value)


def test_a_file_fits_its_own_seal(tmp_path):
    file = tmp_path / "data"
    write_synced(file, b"x" * 10_000_000)

    assert FileDigest.of(file).fault_in(file) is None


def test_a_missing_a_longer_and_a_changed_file_are_told_apart(tmp_path):
    file = tmp_path / "data"
    write_synced(file, b"hello")
    seal = FileDigest.of(file)

    write_synced(file, b"hellp")
    changed = seal.fault_in(file)
    write_synced(file, b"hello!")
    longer = seal.fault_in(file)
    file.unlink()
    missing = seal.fault_in(file)

    assert changed is not None
    assert "has checksum" in changed
    assert longer == f"{file} has 6 bytes, 5 were saved"
    assert missing == f"{file} is missing, 5 bytes were saved"


def test_sealed_json_comes_back_as_it_went(tmp_path):
    value = {"b": [1, 2.5, None, True], "a": {"c": "text"}}

    write_sealed_json(tmp_path / "meta.json", value)

    assert read_sealed_json(tmp_path / "meta.json") == value


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (b"{", "cannot be read as JSON"),
        (b"[1]", "holds a list"),
        (b'{"a": 1}', "carries digest None"),
        pytest.param(
            b'{"blake2b": ' + 1022 * b"[" + 1022 * b"]" + b"}",
            "carries digest a list of 1",
            id="nested",
        ),
    ],
)
def test_json_without_a_fitting_seal_is_refused(tmp_path, text, reason):
    file = tmp_path / "meta.json"
    write_synced(file, text)

    with pytest.raises(IntegrityError, match=reason):
        read_sealed_json(file)


def test_an_edited_value_no_longer_fits_its_digest(tmp_path):
    file = tmp_path / "meta.json"
    write_sealed_json(file, {"step": 20})
    file.write_bytes(file.read_bytes().replace(b"20", b"21"))

    with pytest.raises(IntegrityError, match=r"meta\.json carries digest"):
        read_sealed_json(file)
