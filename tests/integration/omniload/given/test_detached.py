"""A plane that outlives the driver that opened it, in a real Ray: attached to, refused, stopped, ended by itself."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from omniload.actors.ray.given.tenancy import LEASE_S
from tests.support.plane.front_ranks import samples
from tests.support.plane.given.given_ray import DRIVER, begin_job, end_of, run_job

pytestmark = pytest.mark.ray
STEPS = 6


@pytest.fixture
def keywords(tmp_path):
    run = {"run_dir": str(tmp_path / "run"), "steps": STEPS}
    return run | {"runtime_lifetime": "detached", "silent_after": 3}


def stop(given, run_dir):
    words = [sys.executable, "-m", "omniload", "mix", "stop", run_dir]
    return subprocess.run(words, env=given, capture_output=True, text=True, check=False)


# Three processes load all of Ray, one after another, which takes 20 s on an idle machine.
def test_the_next_driver_goes_on_with_a_plane_whose_driver_was_killed_until_it_is_stopped(
    given, mix, unbroken, tmp_path, keywords
):
    killed = run_job(given, mix, program=DRIVER, takes=2, end="kill", **keywords)
    state = killed["state"]
    next_of = run_job(given, mix, program=DRIVER, takes=4, state=state, **keywords)

    assert samples([killed, next_of]) == unbroken
    assert "continue at step 2" in (tmp_path / "run" / "logs" / "opener.log").read_text()
    stopped = stop(given, keywords["run_dir"])
    assert "has ended; no rank was there" in stopped.stdout, stopped.stderr
    again = stop(given, keywords["run_dir"])
    assert (again.returncode, "no detached data plane of" in again.stderr) == (4, True)


def test_a_driver_that_is_killed_before_its_rank_has_joined_costs_the_next_one_seconds(
    given, mix, unbroken, tmp_path, keywords
):
    for name in ("run", "again", "once more"):
        job = {**keywords, "run_dir": str(tmp_path / name)}
        killed = begin_job(given, mix, program=DRIVER, takes=1, end="attached", **job)
        assert (killed.communicate()[0], killed.returncode) == ("", -signal.SIGKILL)
        began_s = time.monotonic()

        next_of = run_job(given, mix, program=DRIVER, takes=STEPS, **job)

        took_s = time.monotonic() - began_s
        assert samples([next_of]) == unbroken
        log = (tmp_path / name / "logs" / "opener.log").read_text()
        assert "continue at step 0" in log, log
        assert "has ended; no rank was there" in stop(given, job["run_dir"]).stdout
        if took_s < LEASE_S:  # on a busy machine a process may take as long as this to load Ray
            break

    assert took_s < LEASE_S, "it waited for a lease of nobody"


@pytest.mark.soak  # 40 s: six processes, and the time after which ranks count as gone
def test_a_plane_goes_on_on_other_ranks_and_is_opened_anew_and_others_are_refused_meanwhile(
    given, mix, unbroken, tmp_path, keywords
):
    killed = run_job(given, mix, program=DRIVER, takes=2, end="kill", **keywords)

    # On two ranks, which are actors of another job in the same Ray.
    going_on = keywords | {"state": killed["state"]}
    ranks = run_job(given, mix, tmp_path / "meet", **going_on)["ranks"]
    assert samples([killed, *ranks]) == unbroken
    assert "continue at step 2" in (log := tmp_path / "run" / "logs" / "opener.log").read_text()

    # The steps that these ranks have taken are released, so the plane is opened anew at the state.
    holder = begin_job(given, mix, program=DRIVER, takes=2, end="wait", **going_on)
    held = json.loads(holder.stdout.readline())
    assert samples([killed, held]) == {step: unbroken[step] for step in range(4)}
    assert "is opened again: " in log.read_text()

    other_mix = run_job(given, mix, program=DRIVER, takes=1, **keywords, prefetch_steps=7)
    assert (other_mix["error"], "mix stop" in other_mix["message"]) == ("StateError", True)
    assert "runtime.prefetch_steps is 4, here 7" in other_mix["message"]
    code = tmp_path / "code"
    code.mkdir()
    # The variables that ``ray job submit --working-dir`` sets for its entrypoint.
    job = {"RAY_JOB_CONFIG_JSON_ENV_VAR": json.dumps({"runtime_env": {"working_dir": str(code)}})}
    (code / "lab.py").write_text("")
    other_code = run_job(given | job, mix, program=DRIVER, takes=1, **keywords)
    assert "working_dir of the job is not given, here gcs://" in other_code["message"]
    second = run_job(given, mix, program=DRIVER, takes=1, **keywords)
    assert second["error"] == "StateError"
    assert "has ranks of another driver (rank dp=0; attached by process" in second["message"]
    assert "has ended; it served rank dp=0" in stop(given, keywords["run_dir"]).stdout
    holder.communicate("")


# Both look for a plane and find none; the second one is notified as soon as a plane exists.
@pytest.mark.soak
@pytest.mark.parametrize("seed", [7, 77])
def test_of_two_drivers_that_begin_at_once_one_is_served_and_the_other_is_told_why_not(
    given, mix, unbroken, keywords, seed
):
    jobs = [
        begin_job(given, mix, program=DRIVER, takes=2, end="wait", seed=each, **keywords)
        for each in (7, seed)
    ]
    lines = [json.loads(job.stdout.readline()) for job in jobs]
    for job in jobs:
        job.communicate("")

    (served,) = [told for told in lines if "seen" in told]
    (refused,) = [told for told in lines if "error" in told]
    if lines.index(served) == 0 or seed == 7:
        assert samples([served]) == {step: unbroken[step] for step in range(2)}
    assert refused["error"] == "StateError"
    why = "has ranks of another driver" if seed == 7 else "is of another mix"
    assert why in refused["message"]
    assert "has ended; " in stop(given, keywords["run_dir"]).stdout


@pytest.mark.soak  # Ray calls a process that does not answer unreachable after 20 s
def test_a_stopped_opener_is_ended_by_mix_stop_and_leaves_the_folder_to_the_next(
    given, mix, unbroken, tmp_path, keywords
):
    killed = run_job(given, mix, program=DRIVER, takes=2, end="kill", **keywords)
    opener = json.loads((tmp_path / "run" / "status.json").read_text())["pid"]
    os.kill(opener, signal.SIGSTOP)

    stopped = stop(given, keywords["run_dir"])
    assert "has ended; its opener gave no answer and was killed" in stopped.stdout, stopped.stderr
    going_on = keywords | {"state": killed["state"]}
    next_of = run_job(given, mix, program=DRIVER, takes=4, **going_on)
    assert samples([killed, next_of]) == unbroken
    assert "has ended; no rank was there" in stop(given, keywords["run_dir"]).stdout


def test_a_run_without_a_folder_has_no_plane_that_outlives_its_driver(mix, given):
    told = run_job(given, mix, program=DRIVER, takes=1, runtime_lifetime="detached")

    assert told["error"] == "ConfigError"
    assert "give run_dir=" in told["message"]


@pytest.mark.soak  # as long as runtime.keep, ten seconds at least
def test_a_plane_that_no_rank_uses_ends_by_itself_and_says_so(given, mix, tmp_path, keywords):
    driver = begin_job(given, mix, program=DRIVER, takes=1, keep=10, **keywords)
    assert "error" not in end_of(driver)

    log, until_s = tmp_path / "run" / "logs" / "opener.log", time.monotonic() + 240
    while "has had no rank for" not in log.read_text():
        assert time.monotonic() < until_s, log.read_text()
        time.sleep(0.5)
    until_s = time.monotonic() + 240
    while "no detached data plane" not in (said := stop(given, keywords["run_dir"])).stderr:
        assert time.monotonic() < until_s, said
