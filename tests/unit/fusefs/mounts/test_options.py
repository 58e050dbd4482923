"""Options as people, fstab and mount(8) write them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusefs.config import FilesConfig
from fusefs.mounts.lifecycle import MountConfig, mount
from fusefs.mounts.options import mount_config, without_log, without_watch
from omniload.base.errors import ConfigError

MOUNTS_OWN = [
    *("rw", "defaults", "auto", "noauto", "user", "users", "nofail", "_netdev", "async"),
    *("noatime", "relatime", "nodiratime", "exec", "nosuid", "nodev", "comment=mine"),
    *("x-systemd.automount", "x-systemd.requires=network-online.target", "X-mount.mkdir"),
]


def of(*options):
    return mount_config("s", "/m", options)


@pytest.mark.parametrize("word", MOUNTS_OWN)
def test_mounts_own_words_change_nothing(word):
    assert of(word) == of("rw")


def test_words_may_be_joined_and_spaced():
    config = of("rw, ro ,count=8", "unit=4MiB,,cache=64MiB")

    assert config.read_only
    assert (config.files.striping.count, config.files.striping.unit) == (8, 4 << 20)
    assert config.files.cache == 64 << 20


def test_fields_of_the_mount_are_options(tmp_path):
    config = of("allow_other,metrics_port=9465,give_up_after=2m,bridge=device,spool_limit=1GiB")

    assert (config.allow_other, config.metrics_port, config.bridge) == (True, 9465, "device")
    assert (config.give_up_after, config.spool_limit) == (120.0, 1 << 30)


def test_options_go_over_the_file(tmp_path):
    (tmp_path / "files.yaml").write_text("cache: 64MiB\nstriping: {unit: 1MiB, count: 2}\n")

    config = mount_config("s", "/m", ["count=9"], str(tmp_path / "files.yaml"))

    assert (config.files.cache, config.files.striping.count) == (64 << 20, 9)


@pytest.mark.parametrize("word", ["suid", "dev", "noexec", "sync", "remount", "bind"])
def test_what_is_not_kept_is_refused(word):
    with pytest.raises(ConfigError, match=f"option '{word}' is not supported"):
        of(word)


@pytest.mark.parametrize(
    ("word", "meant"),
    [("cach=1GiB", "cache"), ("allow-other", "allow_other"), ("metrics=1", "metrics_port")],
)
def test_an_unknown_option_names_the_one_that_was_meant(word, meant):
    with pytest.raises(ConfigError, match=f"did you mean '{meant}'"):
        of(word)


@pytest.mark.parametrize("word", ["store=x", "mountpoint=/x", "files=1", "qqqqqq"])
def test_an_unknown_option_lists_those_there_are(word):
    with pytest.raises(ConfigError, match=r"is not known; There are allow_other, .*write_window$"):
        of(word)


@pytest.mark.parametrize("word", ["cache=3", "count=0", "unit=1", "bridge=none", "metrics_port=0"])
def test_a_value_out_of_range_names_its_option(word):
    with pytest.raises(ConfigError, match=word.partition("=")[0]):
        of(word)


def test_nosuid_does_not_undo_what_trusted_asks_for():
    assert of("trusted,nosuid").trusted
    assert of("nosuid,trusted").trusted
    assert not of("nosuid,nodev").trusted


words = st.sampled_from(["ro", "watch", "count=8", "rw", "cache=1GiB"])


@given(st.lists(st.lists(words, min_size=1, max_size=4), max_size=4))
def test_watch_is_found_wherever_it_stands_and_nothing_else_is_lost(groups):
    rest, watch = without_watch(",".join(group) for group in groups)

    flat = [word for group in groups for word in group]
    assert watch == ("watch" in flat)
    assert [word for word in rest if word] == [word for word in flat if word != "watch"]


@given(st.sets(st.sampled_from(MOUNTS_OWN)), st.sampled_from(["ro", "count=3", "cache=9MiB"]))
def test_mounts_own_words_are_passed_over_beside_any_other(own, word):
    assert of(*own, word) == of(word, *own) == of(word)


def test_every_option_that_is_listed_exists():
    with pytest.raises(ConfigError) as caught:
        of("qqqqqq")

    listed = str(caught.value).partition("There are ")[2].split(", ")
    fields = {*FilesConfig.model_fields, *MountConfig.model_fields}
    assert {*listed} - fields == {"ro", "watch", "log", "unit", "count", "disk_cache_capacity"}


def test_the_file_of_a_log_is_taken_out_of_the_options():
    assert without_log(["rw,log=/a", "count=8"]) == (("rw", "count=8"), "/a")
    assert without_log(["log=/a,log=/b=c"]) == ((), "/b=c")
    assert without_log(["rw"]) == (("rw",), None)


@pytest.mark.parametrize("word", ["log", "log="])
def test_a_log_without_a_file_is_refused(word):
    with pytest.raises(ConfigError, match="log=FILE"):
        without_log([word])


@pytest.mark.parametrize(
    ("settings", "meant"),
    [({"cach": 1}, "files.cache"), ({"files": {"cach": 1}}, "cache"), ({"trustd": 1}, "trusted")],
)
def test_settings_that_a_program_gives_are_checked_in_the_same_words(tmp_path, settings, meant):
    with pytest.raises(ConfigError, match=r"^mount settings: .*did you mean") as caught:
        mount("mem:", tmp_path, settings).__enter__()

    assert str(caught.value).endswith(f"{meant!r}?")


@pytest.mark.parametrize("at", range(3))
def test_what_is_no_text_is_named(at):
    words = ["s", "/m", "cache=1GiB"]
    words[at] += "\udcff"

    with pytest.raises(ConfigError, match=r"udcff' has bytes that are no UTF-8"):
        mount_config(words[0], words[1], words[2:])
