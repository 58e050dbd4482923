"""``omniload mix simulate`` on a small corpus, in one process."""

import shutil

import orjson
import pytest
import yaml

from omniload.base.errors import ConfigError
from tests.support.plane.edits.mix_commands import a_mix_file, json_of, run_mix

QUICK = ("--ranks", 1, "--steps", 4)


@pytest.fixture(scope="module")
def mix_file(tmp_path_factory):
    return a_mix_file(tmp_path_factory.mktemp("corpus"), rows=8, micro_rows=8)


@pytest.fixture(scope="module")
def measured(mix_file, tmp_path_factory):
    """The result of a simulation with a measured profile, and the profile that it kept, which takes longest."""
    folder = tmp_path_factory.mktemp("measured")
    kept = ("--profile", folder / "profile.json", "--cache-dir", folder)
    return json_of("simulate", mix_file, *QUICK, *kept), folder / "profile.json"


@pytest.fixture
def profile(measured, tmp_path):
    return shutil.copy(measured[1], tmp_path / "profile.json")


def test_it_prints_waits_throughput_planner_memory_and_connections(mix_file, profile):
    result = run_mix("simulate", mix_file, *QUICK, "--profile", profile)

    assert result.exit_code == 0, result.output
    for said in ("wait of a step, p50", "tokens/s", "planner", "memory of the first host"):
        assert said in result.output
    assert "1 rank on 1 host, 2 sources, runtime local" in result.output


def test_as_many_steps_count_as_hold_several_windows_unless_fewer_are_asked_for(mix_file, profile):
    far = mix_file.with_name("far.yaml")
    far.write_text(mix_file.read_text().replace("prefetch_steps: 4", "prefetch_steps: 64"))
    arguments = ("simulate", far, "--ranks", 1, "--profile", profile)

    assert json_of(*arguments)["steps"] == 8 * 32  # of these small ones 32 come at once
    said = run_mix(*arguments, "--steps", 40).output
    assert "32 steps come at once, and 40 count" in said
    assert "give --steps 256" in said


def test_a_kept_profile_gives_the_same_figures_without_the_data(
    mix_file, measured, profile, tmp_path
):
    arguments = ("simulate", mix_file, *QUICK, "--profile", profile)
    (mix_file.parent / "text" / "0.jsonl").rename(tmp_path / "away.jsonl")

    again = json_of(*arguments)
    (tmp_path / "away.jsonl").rename(mix_file.parent / "text" / "0.jsonl")

    assert again == measured[0]
    assert json_of(*arguments, "--seed", 1) != again


def test_several_seeds_tell_how_far_waits_go_and_the_first_is_the_one_that_was_asked_for(
    mix_file, profile
):
    arguments = ("simulate", mix_file, *QUICK, "--profile", profile)
    first, second = (json_of(*arguments, "--seed", seed) for seed in (7, 8))

    both = json_of(*arguments, "--seed", 7, "--seeds", 2)

    assert both.pop("waits_by_seed") == [first["waits"], second["waits"]]
    assert both == first
    shown = run_mix(*arguments, "--seeds", 2)
    assert " to " in next(line for line in shown.output.splitlines() if "p99" in line)
    assert "waits are of one seed" not in shown.output
    assert "waits are of one seed" in run_mix(*arguments, "--step-time", "20ms").output


def test_more_sources_are_copies_of_those_of_the_file(mix_file, profile):
    found = json_of("simulate", mix_file, *QUICK, "--sources", 7, "--profile", profile)

    assert found["sources"] == 7
    assert found["connections"]["without"] == 7


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--ranks", 2, "--knee"), "--knee needs --step-time"),
        (("--ranks", 2, "--network", "0B"), "--network is 0 bytes a second"),
        (("--ranks", 1, "--step-time", "soon"), "soon"),
        (("--ranks", 1, "--tokens", "0"), "below 1"),
    ],
)
def test_options_that_say_nothing_are_refused(mix_file, arguments, said):
    result = run_mix("simulate", mix_file, *arguments)

    assert result.exit_code == 2
    assert said in result.output


@pytest.mark.parametrize(
    ("changed", "arguments", "said"),
    [
        (
            ("strategy: balanced", "strategy: hybrid"),
            ("--ranks", 1),
            "balance.strategy is 'hybrid'",
        ),
        ((), ("--ranks", 2, "--hosts", 3), "--hosts is 3, more than --ranks 2"),
        (("kind: auto", "kind: local"), ("--ranks", 2, "--hosts", 2), "local is one process"),
    ],
)
def test_a_job_that_cannot_be_simulated_is_refused_before_anything_is_measured(
    mix_file, monkeypatch, changed, arguments, said
):
    monkeypatch.setattr(
        "omniload.commands.simulate.measured_sources", lambda *_: pytest.fail("did")
    )
    other = mix_file.with_name("other.yaml")
    text = mix_file.read_text()
    other.write_text(text.replace(*changed) if changed else text)

    result = run_mix("simulate", other, *arguments)

    assert isinstance(result.exception, ConfigError)
    assert said in str(result.exception)


def test_images_whose_patches_are_not_simulated_are_told_of(mix_file, profile):
    content = yaml.safe_load(mix_file.read_text())
    patches = {"type": "images", "patch": 14, "placeholder": 7}
    seen = {"type": "parquet", "path": "seen/*", "text": "text", "images": "images"}
    content["sources"]["text"] = seen | {"transforms": [patches]}
    other = mix_file.with_name("seen.yaml")
    other.write_text(yaml.safe_dump(content))

    told = [run_mix("simulate", each, *QUICK, "--profile", profile) for each in (mix_file, other)]

    assert [each.exit_code for each in told] == [0, 0]
    assert ["the mix has images" in each.output for each in told] == [False, True]
    kept = ("--profile", profile)
    warned = [json_of("simulate", f, *QUICK, *kept)["warnings"] for f in (mix_file, other)]
    assert ["the mix has images" in "".join(each) for each in warned] == [False, True]


def test_fewer_rows_than_ranks_are_refused_with_how_many_it_takes(mix_file):
    result = run_mix("simulate", mix_file, "--ranks", 9)

    assert isinstance(result.exception, ConfigError)
    assert "raise batch.tokens to 288" in str(result.exception)


def test_a_file_that_is_no_profile_is_named(mix_file, tmp_path):
    (tmp_path / "profile.json").write_text('{"version": 9}')

    result = run_mix("simulate", mix_file, *QUICK, "--profile", tmp_path / "profile.json")

    assert "profile.json: is no profile of this release" in str(result.exception)


def test_a_profile_of_a_release_before_is_refused_with_its_version_and_what_to_do(
    mix_file, profile
):
    profile.write_bytes(orjson.dumps({**orjson.loads(profile.read_bytes()), "version": 2}))

    result = run_mix("simulate", mix_file, *QUICK, "--profile", profile)

    assert isinstance(result.exception, ConfigError)
    assert "version   Input should be 11" in str(result.exception)
    assert "remove it to measure again" in str(result.exception)


def test_a_profile_that_cannot_be_kept_is_refused_before_anything_is_measured(
    mix_file, monkeypatch
):
    monkeypatch.setattr(
        "omniload.commands.simulate.measured_sources", lambda *_: pytest.fail("measured")
    )

    result = run_mix("simulate", mix_file, *QUICK, "--profile", "/nowhere/at/all.json")

    assert isinstance(result.exception, ConfigError)
    assert "--profile /nowhere/at/all.json: there is no folder /nowhere/at" in str(result.exception)
