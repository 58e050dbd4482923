"""What an OCI runtime is told: the image's own process, and how far it is kept from the machine."""

import json

import pytest
from click.testing import CliRunner

from omniload.base.errors import ConfigError
from snapshot.engines import runtime
from snapshot.engines.bundle import (
    CAPABILITIES,
    bundle_config,
    held_capabilities,
    runtime_words,
)
from snapshot.image.binding import Bind
from snapshot.image.cli import command
from snapshot.image.starting import Start


def a_config(ids=(0, 0), held=CAPABILITIES, **changes):
    given = {"words": ("python", "a.py"), "variables": {"A": "1", "B": "x=y"}, "folder": "/data"}
    return bundle_config(Start(**(given | changes)), ids, held, "job-1")


def test_the_process_is_the_one_of_the_image():
    process = a_config(ids=(5, 7))["process"]

    assert process["args"] == ["python", "a.py"]
    assert process["env"] == ["A=1", "B=x=y"]
    assert process["cwd"] == "/data"
    assert process["user"] == {"uid": 5, "gid": 7}


def test_a_configuration_is_json_as_it_is():
    config = a_config()

    assert json.loads(json.dumps(config)) == config
    assert config["root"] == {"path": "root", "readonly": False}
    assert config["hostname"] == "job-1"


def test_limits_are_inherited_since_raising_them_may_be_refused():
    assert "rlimits" not in a_config()["process"]


def test_the_network_is_the_machines_and_the_rest_is_its_own():
    kinds = {namespace["type"] for namespace in a_config()["linux"]["namespaces"]}

    assert kinds == {"pid", "ipc", "uts", "mount"}


def test_root_has_the_capabilities_of_engines_and_no_more():
    given = a_config()["process"]["capabilities"]

    assert given["effective"] == given["permitted"] == given["bounding"] == list(CAPABILITIES)
    assert "CAP_SYS_ADMIN" not in given["bounding"]
    assert given["ambient"] == given["inheritable"] == []


def test_another_user_starts_with_none():
    given = a_config(ids=(1000, 0))["process"]["capabilities"]

    assert given["effective"] == given["permitted"] == []
    assert given["bounding"] == list(CAPABILITIES)


def test_only_what_the_machine_holds_is_given():
    held = ["CAP_KILL", "CAP_SYS_ADMIN", "CAP_CHOWN"]

    assert a_config(held=held)["process"]["capabilities"]["bounding"] == ["CAP_CHOWN", "CAP_KILL"]


def test_binds_are_mounted_after_all_else_as_they_say():
    binds = (Bind("/here", "/there"), Bind("/a", "/b", read_only=True))

    mounts = a_config(binds=binds)["mounts"]

    assert [m["destination"] for m in mounts[-2:]] == ["/there", "/b"]
    assert [m["options"] for m in mounts[-2:]] == [
        ["rbind", "rprivate", "rw"],
        ["rbind", "rprivate", "ro"],
    ]
    assert {m["source"] for m in mounts[-2:]} == {"/here", "/a"}


def test_files_of_the_kernel_are_masked_or_read_only():
    config = a_config()
    options = {mount["destination"]: mount["options"] for mount in config["mounts"]}

    assert "ro" in options["/sys"]
    assert "/proc/sys" in config["linux"]["readonlyPaths"]
    assert "/proc/kcore" in config["linux"]["maskedPaths"]
    assert not any(option.startswith("size=") for option in options["/dev/shm"])


@pytest.mark.parametrize(
    ("bits", "held"),
    [
        ("0000000000000000", set()),
        ("0000000000000021", {"CAP_CHOWN", "CAP_KILL"}),
        ("000001ffffffffff", set(CAPABILITIES)),
        ("000001fffeffffff", set(CAPABILITIES)),
        ("0000000080040000", {"CAP_SYS_CHROOT", "CAP_SETFCAP"}),
    ],
)
def test_capabilities_are_read_from_a_process(bits, held):
    status = f"Name:\tx\nCapEff:\t000001ffffffffff\nCapBnd:\t{bits}\nCapAmb:\t0\n"

    assert held_capabilities(status) == held


def test_a_process_that_tells_nothing_holds_nothing():
    assert held_capabilities("Name:\tx\n") == frozenset()


def test_a_bundle_is_run_where_it_lies_with_a_state_that_goes_with_it():
    assert runtime_words("crun", "job-1") == [
        *("crun", "--root", "state", "run"),
        *("--bundle", ".", "job-1"),
    ]


def test_a_runtime_that_is_none_or_not_there_is_said_so(monkeypatch):
    with pytest.raises(ConfigError, match="runc, crun"):
        runtime.entry_by("docker")
    monkeypatch.setattr(runtime.shutil, "which", lambda _: None)
    with pytest.raises(ConfigError, match="crun is not installed"):
        runtime.entry_by("crun")


def test_commands_know_the_runtimes():
    done = CliRunner().invoke(command, ["run", "--runtime", "docker", "r.example/a:v"])

    assert done.exit_code == 2
    assert "'runc', 'crun'" in done.output
