"""What a mount is told, what it prefetches, and what it leaves behind."""

import logging
from pathlib import Path
from types import SimpleNamespace

import pytest

from omniload.base.errors import ConfigError, IntegrityError
from snapshot.image.block.prefetch import want_blocks
from snapshot.image.layer.index import BlockRef
from snapshot.image.mount import daemon as mounting
from snapshot.image.mount.daemon import mount_settings
from snapshot.image.trace.store import merge_into
from snapshot.image.trace.trace import Touch, decode_trace, encode_trace, trace_of

IMAGE, OTHER = "sha256:" + "ab" * 32, "sha256:" + "cd" * 32


def a_trace(image=IMAGE, *touches):
    return trace_of(image, ("run",), touches or [Touch(1, "f", 0, 10)])


def settings(*words):
    return mount_settings("r.example/a:v", "/mnt", words)


def test_options_become_settings():
    found = settings("memory=1GiB", "platform=linux/arm64,mirror=a.example", "mirror=b.example")

    assert (found.memory, found.mirrors) == (1 << 30, ("a.example", "b.example"))
    assert found.platform.architecture == "arm64"
    assert found.bridge.read_only
    assert Path(found.cache).is_absolute()


def test_options_of_the_kernels_side_go_to_the_bridge():
    found = settings("allow_other,trusted,max_background=9")

    assert (found.bridge.allow_other, found.bridge.trusted) == (True, True)
    assert found.bridge.max_background == 9


def test_files_are_named_from_the_root_since_the_daemon_may_stand_elsewhere():
    assert settings("trace=a/b").trace == str(Path("a/b").absolute())


@pytest.mark.parametrize("option", ["speed=9", "memory=much", "slots=1", "platform=linux"])
def test_an_option_that_is_none_is_refused(option):
    with pytest.raises(ConfigError, match=r"-o|OS/ARCHITECTURE"):
        settings(option)


@pytest.mark.parametrize("key", ["cache", "memory", "trace", "record", "mirror", "serve", "bridge"])
@pytest.mark.parametrize("text", ["{}", "{}="])
def test_an_option_without_the_value_it_needs_is_refused(key, text):
    with pytest.raises(ConfigError, match=rf"-o {key} has no value; write {key}=VALUE"):
        settings(text.format(key))


@pytest.mark.parametrize("key", ["image", "mountpoint", "mirrors", "command", "sharing", "speed"])
def test_what_is_told_in_another_way_is_no_option(key):
    with pytest.raises(ConfigError, match=f"-o {key}: there is no such option"):
        settings(f"{key}=x")


def test_a_yes_or_no_may_be_given_alone_or_with_a_value():
    assert settings("trusted").bridge.trusted
    assert not settings("trusted=no").bridge.trusted


def test_settings_reach_the_daemon_as_they_were():
    found = settings("platform=linux/arm64/v8,disk=5MB,window=9s")

    assert mounting.ImageMount.model_validate_json(found.model_dump_json(by_alias=True)) == found


def test_the_cache_lies_where_the_desktop_says(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")

    assert settings("").cache == "/somewhere/omniload/image"


def test_what_was_recorded_is_merged_with_earlier_starts(tmp_path):
    path = tmp_path / "trace"

    merge_into(path, a_trace(IMAGE, Touch(5, "f", 0, 10)))
    merge_into(path, a_trace(IMAGE, Touch(3, "f", 5, 10)))

    found = decode_trace(path.read_bytes(), name="it")
    assert found.runs == 2
    assert found.touches == (
        Touch(3, "f", 5, 5, 2),
        Touch(3, "f", 10, 5, 1),
        Touch(5, "f", 0, 5, 1),
    )
    assert list(tmp_path.iterdir()) == [path]


def test_a_trace_of_another_image_or_a_broken_one_is_replaced(tmp_path, caplog):
    path = tmp_path / "trace"
    for earlier in (encode_trace(a_trace(OTHER)), b"broken", b""):
        path.write_bytes(earlier)

        merge_into(path, a_trace())

        assert decode_trace(path.read_bytes(), name="it") == a_trace()


def chosen(path):
    return mounting.chosen_trace(settings(f"trace={path}"), SimpleNamespace(digest=IMAGE))


def test_a_trace_of_another_image_is_used_with_a_warning(tmp_path, caplog):
    path = tmp_path / "trace"
    path.write_bytes(encode_trace(a_trace(OTHER)))

    with caplog.at_level(logging.WARNING, "omniload"):
        assert chosen(path) == a_trace(OTHER)

    assert "its files may differ" in caplog.text


def test_a_trace_that_is_not_there_or_broken_is_said_before_the_mount(tmp_path):
    with pytest.raises(ConfigError, match="no such file"):
        chosen(tmp_path / "none")
    (tmp_path / "broken").write_text("x")
    with pytest.raises(IntegrityError, match="trace"):
        chosen(tmp_path / "broken")


class Wanting:
    """A loader that only notes what is wanted."""

    def __init__(self):
        self.wanted = []

    def prefetch(self, index, refs):
        self.wanted.append((index.blob_digest, [ref.number for ref in refs]))
        return tuple(refs[:1])


class Named:
    def __init__(self, blob_digest):
        self.blob_digest = blob_digest


def test_hot_blocks_are_wanted_in_their_order_over_all_layers():
    refs = [
        BlockRef(f"{blob}{number}", blob, number, number, 1)
        for blob, number in (("a", 3), ("a", 1), ("b", 0), ("a", 2))
    ]
    loader = Wanting()

    want_blocks(loader, (Named("a"), Named("b")), tuple(refs))

    assert loader.wanted == [("a", [3, 1]), ("b", [0]), ("a", [2])]
    want_blocks(loader, (), ())
    assert len(loader.wanted) == 3
