"""Who may have a detached plane, and when: mixes that differ, drivers that come together, and drivers that are gone."""

from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("ray")

from omniload.actors.plane import PlaneSpec
from omniload.actors.ray.given import tenancy as tenancy_module
from omniload.actors.ray.given.tenancy import LEASE_S, LEFT_S, Attaching, Tenancy, opener_of
from omniload.base.errors import StateError
from omniload.plan.place_tree import ClientPlaceTree
from tests.support.plane.builders import a_mix

RANK = ["rank dp=0"]


@pytest.fixture
def first():
    mix = a_mix()
    runtime = mix.runtime.model_copy(update={"silent_after": 10.0})
    spec = PlaneSpec(
        mix=mix.model_copy(update={"runtime": runtime}),
        base_dir=Path("/"),
        tree=ClientPlaceTree.of(),
        run_dir=Path("/runs/a"),
    )
    return Attaching(spec=spec, identity={"seed": "7"}, driver="process 1 on a", ticket="1")


@pytest.fixture
def second(first):
    return replace(first, driver="process 2 on b", ticket="2")


@pytest.fixture
def taken(first):
    """The tenancy of a plane that the first driver has opened and has, since time 0."""
    tenancy = Tenancy()
    tenancy.opened(first)
    tenancy.give(first, now_s=0.0)
    return tenancy


def test_whoever_is_first_has_it_at_once_and_again_where_the_answer_was_lost(first, taken):
    assert Tenancy().why_wait(first, 0.0, [], now_s=0.0) == ""
    assert taken.why_wait(first, 0.0, [], now_s=1.0) == ""


@pytest.mark.parametrize(("ranks", "waited_s"), [([], 0.0), (RANK, 0.0), (RANK, 99.0)])
def test_a_plane_of_another_mix_is_refused_whoever_has_it(second, taken, ranks, waited_s):
    other = replace(second, identity={"seed": "77"})

    with pytest.raises(
        StateError, match=r"seed is 7, here 77; end it by omniload mix stop /runs/a"
    ):
        taken.why_wait(other, waited_s, ranks, now_s=500.0)


def test_a_driver_whose_ranks_have_not_joined_keeps_it_for_a_while_from_all_others(second, taken):
    assert "ranks of process 1 on a" in taken.why_wait(second, 99.0, [], now_s=LEASE_S - 1)
    assert taken.why_wait(second, 99.0, [], now_s=LEASE_S) == ""


def test_once_its_ranks_have_joined_they_alone_say_whether_it_is_there(second, taken):
    taken.joined()

    limit_s = second.spec.mix.runtime.silent_after + LEFT_S
    assert "rank dp=0 of process 1 on a" in taken.why_wait(second, limit_s - 1, RANK, now_s=2.0)
    with pytest.raises(StateError, match=r"rank dp=0; attached by process 1 on a\), so process 2"):
        taken.why_wait(second, limit_s, RANK, now_s=2.0)
    assert taken.why_wait(second, 0.0, [], now_s=2.0) == ""


def test_a_plane_that_was_closed_may_be_opened_of_any_mix(second, taken):
    taken.closed()

    assert taken.why_wait(replace(second, identity={"seed": "77"}), 0.0, [], now_s=1.0) == ""


def test_values_that_are_passed_on_are_told_apart_and_not_kept(first, taken):
    other = replace(first, environment={"AWS_SECRET_ACCESS_KEY": "hush"})

    assert taken.has_other_variables(other)
    assert not taken.has_other_variables(first)
    assert "hush" not in other.passed_on


def test_what_an_actor_is_asked_names_the_ray_that_it_is_in_by_no_address_of_the_drivers(first):
    runtime = first.spec.mix.runtime.model_copy(update={"address": "10.0.0.1:6379"})
    mix = first.spec.mix.model_copy(update={"runtime": runtime})
    asked = replace(first, spec=replace(first.spec, mix=mix, base_dir=Path()))

    told = asked.for_an_actor().spec
    assert told.mix.runtime.address == "auto"
    assert told.base_dir == Path.cwd()


def test_folders_of_one_path_on_two_hosts_have_openers_of_two_names(tmp_path):
    run_dir = tmp_path / "run"
    names = []
    for host in "ab":
        names.append(opener_of(run_dir, is_new=True))
        assert opener_of(run_dir, is_new=True) == opener_of(run_dir) == names[-1]
        run_dir.rename(tmp_path / host)  # the other host has another folder under that path

    assert len({*names, opener_of(run_dir)}) == 3
    assert opener_of(tmp_path / "a") != names[0]


def test_a_number_that_was_never_written_is_told_with_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setattr(tenancy_module, "_WRITTEN_S", -1.0)
    (tmp_path / ".plane.id").touch()

    with pytest.raises(StateError, match=r"\.plane\.id has 0 of 32 letters; remove it"):
        opener_of(tmp_path, is_new=True)
