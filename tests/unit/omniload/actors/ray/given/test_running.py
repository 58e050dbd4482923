"""Which of the Rays of a machine ``runtime.address: auto`` means."""

import pytest

pytest.importorskip("ray")
from omniload.actors.ray.given import running
from omniload.actors.ray.given.running import address_meant, choose, require_listening
from omniload.base.errors import ConfigError, UnavailableError

OURS = "/tmp/omniload-ray-0123abcd/session_1/sockets/raylet"
ONE, OTHER = ("/nvme/ray/session_1/sockets/raylet", "/tmp/ray/session_2/sockets/raylet")


@pytest.mark.parametrize(
    ("found", "noted", "meant"),
    [
        ({}, None, "auto"),
        ({}, "a:1", "auto"),
        ({"a:1": ONE}, None, "a:1"),
        ({"a:1": ONE}, "b:1", "a:1"),
        ({"a:1": ONE, "b:1": OTHER}, "b:1", "b:1"),
        ({"a:1": ONE, "b:1": OURS, "c:1": OURS}, None, "a:1"),
        ({"a:1": OURS}, "b:1", "b:1"),
    ],
)
def test_auto_is_the_ray_that_was_noted_or_the_only_one_that_no_job_has_to_itself(
    found, noted, meant
):
    assert choose(found, noted) == meant


def test_several_rays_of_which_none_is_noted_are_refused_with_their_addresses():
    with pytest.raises(ConfigError, match=r"2 Rays run .* \(a:1, b:1\).*runtime.address HOST:PORT"):
        choose({"b:1": OTHER, "a:1": ONE}, "c:1")


def test_the_ray_of_another_job_is_never_meant():
    with pytest.raises(ConfigError, match="omniload started for other jobs; start one"):
        choose({"a:1": OURS}, None)


def test_a_machine_is_searched_only_where_no_address_is_given(monkeypatch):
    monkeypatch.setattr(running, "_found", lambda _: {"a:1": ONE})
    monkeypatch.setattr(
        running, "import_module", lambda _: type("utils", (), {"read_ray_address": lambda: None})
    )
    monkeypatch.delenv("RAY_ADDRESS", raising=False)

    assert (address_meant("auto"), address_meant("b:1")) == ("a:1", "b:1")

    monkeypatch.setenv("RAY_ADDRESS", "c:1")
    assert address_meant("auto") == "c:1"


def test_rays_are_found_by_the_commands_of_their_nodes(tmp_path):
    for number, words in enumerate(
        (
            ["/site/raylet", f"--raylet_socket_name={ONE}", "--gcs-address=a:1", ""],
            ["python", "raylet", "--gcs-address=b:1"],
            ["/site/raylet", "--gcs-address="],
            [""],
        ),
        start=1,
    ):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "cmdline").write_bytes("\0".join(words).encode())
    (tmp_path / "5").mkdir()  # a process that ends meanwhile

    assert running._found(tmp_path) == {"a:1": ONE}


@pytest.mark.parametrize("address", ["auto", "ray://head:10001", "host:1"])
def test_a_head_is_waited_for_until_it_listens(monkeypatch, address):
    heard = iter([False, True])
    monkeypatch.setattr(running, "answers", lambda *_: next(heard))
    monkeypatch.setattr(running, "_LOOK_S", 0.0)

    require_listening(address)

    assert len(list(heard)) == (0 if address == "host:1" else 2)  # others are not asked for here


def test_an_address_where_nothing_listens_is_reported_before_ray_tries_it(monkeypatch):
    monkeypatch.setattr(running, "answers", lambda *_: False)

    with pytest.raises(UnavailableError, match=r"Ray at host:1: nothing has accepted .* start its"):
        require_listening("host:1", within_s=0.0)
