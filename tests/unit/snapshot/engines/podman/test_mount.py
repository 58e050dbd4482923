"""What a layer store is told, and how the command asks for one."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from omniload.base.errors import ConfigError
from snapshot.commands import image as cli
from snapshot.engines.podman import mount as layer_store_mounting
from snapshot.engines.podman.mount import LayerStoreMount, layer_store_settings


def settings(*words):
    return layer_store_settings("/mnt/layers", words)


def test_options_become_settings():
    found = settings("registry=a.example,registry=b.example:5000", "plain=b.example:5000,index")

    assert found.registries == ("a.example", "b.example:5000")
    assert found.plain == ("b.example:5000",)
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


@pytest.mark.parametrize("key", ["cache", "memory", "window", "mirror", "registry", "plain"])
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
    ["registry=http://a.example", "registry=a.example/team", "plain=http://a", "mirror=/x"],
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

        monkeypatch.setattr(cli, "mount_layer_store", mount)
        monkeypatch.setattr(cli, "mount", mount)
        return asked

    def test_a_layer_store_names_no_image(self, asked):
        done = CliRunner().invoke(
            cli.command, ["mount", "--as", "layer-store", "here", "-o", "registry=a.example"]
        )

        assert done.exit_code == 0, done.output
        ((found, log),) = asked
        assert isinstance(found, LayerStoreMount)
        assert (found.mountpoint, log) == (str(Path("here").absolute()), "/dev/null")
        assert done.output == f"layers at {Path('here').absolute()}, process 7\n"

    def test_a_tree_names_one(self, asked):
        done = CliRunner().invoke(cli.command, ["mount", "r.example/a:v", "/mnt/a", "--log", "l"])

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
        done = CliRunner().invoke(cli.command, ["mount", *words])

        assert isinstance(done.exception, ConfigError)
        assert usage in str(done.exception)
        assert asked == []
