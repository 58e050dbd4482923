"""What the commands for containerd are told, and what they tell containerd."""

import os

import pytest
from click.testing import CliRunner

from omniload.base.errors import ConfigError
from snapshot.commands import image_serve
from snapshot.commands.image import command
from snapshot.engines.containerd.server import METHODS, message, reader


def call(*words):
    return CliRunner().invoke(command, list(words), catch_exceptions=False)


def test_every_mount_records_and_prefetches_unless_told_otherwise():
    usual = image_serve.mount_template(("cache=/c,disk=1GiB", "mirror=one.example"))
    told = image_serve.mount_template(("trace=/t", "record=/r"))

    assert (usual.trace, usual.record, usual.command) == ("auto", "auto", None)
    assert (usual.cache, usual.disk, usual.mirrors) == ("/c", 1 << 30, ("one.example",))
    assert (told.trace, told.record) == ("/t", "/r")


@pytest.mark.parametrize("option", ["serve=127.0.0.1:7", "command=x", "image=y", "mountpoint=/m"])
def test_an_option_that_belongs_to_one_mount_is_refused(option):
    with pytest.raises(ConfigError, match="there will be several"):
        image_serve.mount_template(("cache=/c", option))


def test_an_option_that_is_none_is_refused():
    with pytest.raises(ConfigError, match="nonsense"):
        image_serve.mount_template(("nonsense=1",))


def test_only_root_may_serve(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)

    with pytest.raises(ConfigError, match="user 1000 cannot mount for containers"):
        call("serve")


def test_a_file_as_cache_is_refused_before_a_container_needs_it(tmp_path, monkeypatch):
    pytest.importorskip("grpc")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    file = tmp_path / "cache"
    file.touch()

    with pytest.raises(ConfigError, match=rf"^{file} is no folder; name another cache"):
        call("serve", "--root", str(tmp_path / "root"), "-o", f"cache={file}")

    assert not (tmp_path / "root").exists()


def test_without_grpc_the_extra_is_named(monkeypatch):
    def missing(name):
        raise ModuleNotFoundError(f"No module named {name!r}", name="grpc")

    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(image_serve.importlib, "import_module", missing)

    with pytest.raises(ConfigError, match=r"omniload-data\[containerd\]"):
        call("serve")


@pytest.mark.parametrize("name", METHODS)
def test_every_call_has_messages_that_can_be_written_and_read(name):
    for wire in (f"{name}Request", f"{name}Response"):
        assert reader(wire)(message(wire).SerializeToString()) == message(wire)


@pytest.mark.parametrize(
    ("wire", "fields", "data"),
    [
        (
            "Mount",
            {"type": "t", "options": ["a", "b"]},
            b"\x0a\x01t\x22\x01a\x22\x01b",
        ),
        (
            "Info",
            {"name": "n", "kind": 3, "labels": {"k": "v"}},
            b"\x0a\x01n\x18\x03\x32\x06\x0a\x01k\x12\x01v",
        ),
        (
            "UsageResponse",
            {"size": 1, "inodes": 2},
            b"\x08\x01\x10\x02",
        ),
    ],
)
def test_fields_have_the_numbers_of_the_public_interface(wire, fields, data):
    assert message(wire, **fields).SerializeToString() == data


def test_a_field_that_a_message_does_not_have_is_a_defect():
    with pytest.raises(ValueError, match="none"):
        message("Mount", none=1)
    with pytest.raises(KeyError):
        message("None")
