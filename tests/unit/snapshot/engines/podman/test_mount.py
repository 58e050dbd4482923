"""What a layer store is told, and how the command asks for one."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from omniload.base.errors import ConfigError
from snapshot.commands import image_mount
from snapshot.commands.image import command
from snapshot.engines.podman import mount as layer_store_mounting
from snapshot.engines.podman.images import LayerStoreMount, RoutedTier
from snapshot.engines.podman.mount import (
    ImageStarts,
    layer_store_settings,
)
from snapshot.image.block.loader import BlockLoader
from snapshot.image.trace.store import TraceStore
from snapshot.image.trace.trace import Touch, encode_trace, trace_of
from snapshot.image.tree.merge import layer_tree
from snapshot.image.view.view import ImageView
from tests.support.snapshot.engine_builders import BIG, a_served_image


def settings(*words):
    return layer_store_settings("/mnt/layers", words)


def test_options_become_settings():
    found = settings("registry=a.example,registry=b.example:5000", "index")

    assert found.registries == ("a.example", "b.example:5000")
    assert found.index
    assert found.mountpoint == "/mnt/layers"


def test_sizes_times_mirrors_and_platform_are_read_like_those_of_a_mount():
    found = settings("memory=1GiB,disk=5GB,window=9s,slots=4,mirror=m.example,platform=linux/arm64")

    assert (found.memory, found.disk, found.window, found.slots) == (1 << 30, 5 * 10**9, 9.0, 4)
    assert found.mirrors == ("m.example",)
    assert found.platform.architecture == "arm64"


def test_folders_are_named_from_the_root():
    assert Path(settings().cache).is_absolute()
    assert settings("cache=a/b").cache == str(Path("a/b").absolute())


def test_owners_devices_and_set_uid_files_count_and_the_engine_may_tell_uses():
    bridge = settings().bridge

    assert (bridge.trusted, bridge.allow_other, bridge.read_only) == (True, True, False)


@pytest.mark.parametrize("option", ["trace=x", "speed=9", "memory=much", "slots=1", "platform=x"])
def test_an_option_that_is_none_is_refused(option):
    with pytest.raises(ConfigError, match=r"-o|OS/ARCHITECTURE"):
        settings(option)


@pytest.mark.parametrize("key", ["cache", "memory", "window", "mirror", "registry"])
@pytest.mark.parametrize("text", ["{}", "{}="])
def test_an_option_without_the_value_it_needs_is_refused(key, text):
    with pytest.raises(ConfigError, match=rf"-o {key} has no value; write {key}=VALUE"):
        settings(text.format(key))


@pytest.mark.parametrize("key", ["mountpoint", "bridge", "registries", "mirrors", "trace"])
def test_what_is_told_in_another_way_is_no_option(key):
    with pytest.raises(ConfigError, match=f"-o {key}: there is no such option"):
        settings(f"{key}=x")


@pytest.mark.parametrize(
    "option",
    ["registry=http://a.example", "registry=a.example/team", "mirror=/x"],
)
def test_a_registry_that_no_image_could_be_of_is_refused(option):
    with pytest.raises(ConfigError, match=r"-o.*is not HOST or HOST:PORT"):
        settings(option)


def test_a_mirror_may_be_one_without_tls():
    assert settings("mirror=http://m.example:5000").mirrors == ("http://m.example:5000",)


def test_settings_reach_the_daemon_as_they_were():
    found = settings("registry=a.example,platform=linux/arm64/v8,window=0")

    assert LayerStoreMount.model_validate_json(found.model_dump_json(by_alias=True)) == found


def test_only_root_can_serve_layers(monkeypatch):
    monkeypatch.setattr(layer_store_mounting.os, "geteuid", lambda: 1000)

    with pytest.raises(ConfigError, match=r"1000.*as root"):
        layer_store_mounting.mount(settings())


class TestCommand:
    @pytest.fixture
    def asked(self, monkeypatch):
        asked = []

        class Process:
            pid, returncode = 7, None

        def mount(settings, log_path):
            asked.append((settings, log_path))
            return Process()

        monkeypatch.setattr(image_mount, "mount_layer_store", mount)
        monkeypatch.setattr(image_mount, "mount", mount)
        return asked

    def test_a_layer_store_names_no_image(self, asked):
        done = CliRunner().invoke(
            command, ["mount", "--as", "layer-store", "here", "-o", "registry=a.example"]
        )

        assert done.exit_code == 0, done.output
        ((found, log),) = asked
        assert isinstance(found, LayerStoreMount)
        assert (found.mountpoint, log) == (str(Path("here").absolute()), "/dev/null")
        assert done.output == f"layers at {Path('here').absolute()}, process 7\n"

    def test_a_tree_names_one(self, asked):
        done = CliRunner().invoke(command, ["mount", "r.example/a:v", "/mnt/a", "--log", "l"])

        assert done.exit_code == 0, done.output
        ((found, log),) = asked
        assert (found.image, found.mountpoint, log) == ("r.example/a:v", "/mnt/a", "l")

    @pytest.mark.parametrize(
        ("words", "usage"),
        [
            ([], "IMAGE MOUNTPOINT"),
            (["/mnt"], "IMAGE MOUNTPOINT"),
            (["a", "b", "c"], "IMAGE MOUNTPOINT"),
            (["--as", "layer-store"], "takes MOUNTPOINT"),
            (["--as", "layer-store", "r.example/a:v", "/mnt"], "takes MOUNTPOINT"),
        ],
    )
    def test_other_numbers_of_places_are_refused(self, asked, words, usage):
        done = CliRunner().invoke(command, ["mount", *words])

        assert isinstance(done.exception, ConfigError)
        assert usage in str(done.exception)
        assert asked == []


class Place:
    def __init__(self, folder, window_s=60.0, **changes):
        self.served = a_served_image(folder, **changes)
        self.traces = TraceStore(folder / "traces")
        self.now_s = 0.0
        tier = RoutedTier()
        tier.add(self.served)
        self.loader = BlockLoader({"registry": tier})
        self.starts = ImageStarts(
            self.served, self.loader, self.traces, lambda: self.now_s, window_s
        )

    def view(self, number):
        indexes = self.served.indexes
        tree = layer_tree([index.entries if index else () for index in indexes], number)
        note = self.starts.noting(number, tree)
        return ImageView(tree, [indexes[number]], self.loader, note), tree

    def read(self, number, path, offset=0, size_bytes=10):
        view, tree = self.view(number)
        return bytes(view.read(tree.lookup(path).number, offset, size_bytes))

    def kept(self):
        return self.traces.get(self.served.image.digest, ("run",))


@pytest.fixture
def place(tmp_path):
    made = []

    def make(**changes):
        made.append(Place(tmp_path, **changes))
        return made[-1]

    yield make
    for each in made:
        each.starts.finish()
        each.loader.close()


def test_reads_of_layers_are_touches_of_the_merged_image(place):
    here = place()
    assert here.read(1, "tmp/new") == b"fresh"
    here.now_s = 0.5
    assert here.read(0, "bin", 100, 50) == BIG[100:150]

    here.starts.finish()

    kept = here.kept()
    assert (kept.image, kept.command, kept.runs) == (here.served.image.digest, ("run",), 1)
    assert kept.touches == (Touch(0, "tmp/new", 0, 5), Touch(500, "bin", 100, 50))


def test_a_file_that_another_layer_hides_is_no_touch_of_the_image(place):
    here = place()
    here.read(1, "tmp/new")
    assert here.read(0, "gone") == b"old"

    here.starts.finish()

    assert [touch.path for touch in here.kept().touches] == ["tmp/new"]


def test_the_window_begins_with_the_first_read_and_not_with_the_mount(place):
    here = place(window_s=10.0)
    here.now_s = 1000.0
    here.read(0, "bin", 0, 10)
    here.now_s = 1011.0
    here.read(0, "bin", 500, 10)

    here.starts.finish()

    assert here.kept().touches == (Touch(0, "bin", 0, 10),)


def test_nothing_is_kept_where_nothing_was_read_or_nothing_is_to_be_recorded(place, tmp_path):
    place().starts.finish()
    silent = place(window_s=0.0)
    silent.read(0, "bin")
    silent.starts.finish()

    assert silent.kept() is None


def test_hot_blocks_are_fetched_before_anybody_reads(place, tmp_path):
    first = place()
    first.read(0, "bin", 1_500_000, 10)
    first.starts.finish()
    again = place()

    assert again.starts.prefetch() == 1

    assert again.read(0, "bin", 1_500_000, 10) == BIG[1_500_000:1_500_010]
    assert again.loader.requests == 1


def test_an_image_without_a_trace_fetches_nothing(place):
    here = place()

    assert here.starts.prefetch() == 0
    assert here.loader.requests == 0


def test_a_trace_of_an_image_some_of_whose_layers_are_not_ours_serves_those_that_are(place):
    here = place(left_out={1})
    touches = [Touch(0, "tmp/new", 0, 5), Touch(1, "bin", 0, 10)]
    here.traces.add(trace_of(here.served.image.digest, ("run",), touches))

    assert here.starts.prefetch() == 1


class TestTraces:
    def found(self, here):
        return here.traces.any_of(here.served.image.digest, ("run",))

    def trace(self, here, command, *paths):
        return trace_of(
            here.served.image.digest, command, [Touch(n, p, 0, 1) for n, p in enumerate(paths)]
        )

    def test_commands_that_are_started_alike_often_are_united_as_the_images_own(self, place):
        here = place()
        here.traces.add(self.trace(here, ("other",), "bin"))
        here.traces.add(self.trace(here, ("run",), "gone"))

        found = self.found(here)

        assert (found.command, found.runs) == (("run",), 2)
        assert {touch.path for touch in found.touches} == {"bin", "gone"}

    def test_a_command_that_is_rarely_started_is_left_out(self, place):
        here = place()
        here.traces.add(self.trace(here, ("rare",), "gone"))
        for _ in range(3):
            here.traces.add(self.trace(here, ("often",), "bin"))

        found = self.found(here)

        assert [touch.path for touch in found.touches] == ["bin"]

    def test_one_that_is_broken_is_passed_over(self, place, caplog):
        here = place()
        good = here.traces.add(self.trace(here, ("other",), "bin"))
        folder = here.traces.path(here.served.image.digest, ()).parent
        (folder / "broken.trace").write_bytes(encode_trace(good)[:-5])

        assert self.found(here).touches == good.touches
        assert "passed over" in caplog.text

    def test_there_may_be_none(self, place):
        here = place()

        assert self.found(here) is None
