"""Both ways of the whole start-up benchmark, from an empty node to a first step, with a job that needs no torch.

The image is a shell and a few tools; Python and this tree are bound into it, as a user binds
what no image holds. The job stands in for the trainer: it installs a wheel, reads what the
plain way fetched, writes its stages, and waits to be killed.
"""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import psutil
import pytest
from click.testing import CliRunner

from benchmarks.startup.place import MAIN, TOOLS, copy_libraries, copy_tree, environment
from benchmarks.startup.whole import Link, Round, tables_of, timelines
from benchmarks.startup.whole_job import FETCH, FirstStep
from benchmarks.startup.whole_place import push_image
from benchmarks.startup.whole_ways import Places, begin, ours, plain
from snapshot.commands.startup import startup_command
from snapshot.startup.attempts import attempts_of
from snapshot.startup.reading import read_events
from tests.support.programs import finished
from tests.support.snapshot.env_wheels import a_venv, a_wheel
from tests.support.snapshot.registries.registry import needs, running_registry
from tests.support.trainer.run_lines import a_step

pytestmark = [pytest.mark.fuse, pytest.mark.slow]

ROOT = Path(__file__).resolve().parents[3]
LIBRARIES = "/usr/lib/x86_64-linux-gnu"
CHECKPOINT = os.urandom(3 << 20)
PROGRAM = """\
import signal, sys
from pathlib import Path

import greet
from snapshot.startup.events import stage

name, line = Path(sys.argv[1]).stem, {line!r}
with stage("checkpoint_load") as tally:
    where = "/node/checkpoints" if name == "plain" else "/checkpoints"
    data = (Path(where) / "step").read_bytes()
    tally.add("disk" if name == "plain" else "store", len(data))
with stage("first_step"):
    run = Path("/job") / ("run-" + name)
    run.mkdir()
    digest = format(sum(data), "016x")
    (run / "log.jsonl").write_text(line.replace("SUM", digest) + chr(10))
signal.pause()
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A registry with the image, a job that is to start, a checkpoint, and an empty store of snapshots."""
    needs("umoci", "skopeo", "docker-registry", "unshare")
    if not Path("/dev/fuse").exists() or os.geteuid() != 0:
        pytest.skip("NOT TESTED: needs /dev/fuse and root")
    folder = tmp_path_factory.mktemp("whole")
    tree = folder / "tree"
    for tool in (*TOOLS, "/bin/date"):
        copy_tree(Path(tool).resolve(), tree / tool[1:])
    (tree / "etc").mkdir()
    (tree / "etc/issue").write_text("of the image")
    copy_libraries([tree], tree)
    job = folder / "job"
    a_wheel(job / "wheels", "greet")
    (job / "requirements.txt").write_text("greet==1.0\n")
    (job / "pip.conf").write_text("[global]\nno-index = true\nfind-links = /job/wheels\n")
    (job / "fetch.py").write_text(FETCH)
    line = a_step(1, digest="SUM").model_dump_json()
    (job / "job.py").write_text(PROGRAM.format(line=line))
    for name in ("checkpoints", "snapshots"):
        (folder / name).mkdir()
    (folder / "checkpoints/step").write_bytes(CHECKPOINT)
    with running_registry(folder) as address:
        push_image(folder, address, [tree])
        yield folder, int(address.rpartition(":")[2])


def an_environment(folder):
    """Make the environment that an image would hold, at the same path for everybody inside."""
    a_venv(folder)
    (next(folder.glob("lib/*/site-packages")) / "tree.pth").write_text(f"{ROOT}\n")
    command = (
        "#!/opt/venv/bin/python\nfrom omniload.base.cli import main\nraise SystemExit(main())\n"
    )
    (folder / "bin/omniload").write_text(command)
    (folder / "bin/omniload").chmod(0o755)


def started(place, link, port, name, number):
    """Start the job on a node where nothing is yet; return what it took and what it told."""
    folder, here = place[0], place[0] / f"start-{number}"
    (here / "node").mkdir(parents=True)
    an_environment(here / "venv")
    shutil.rmtree(folder / f"job/run-{name}", ignore_errors=True)
    software = (sys.base_prefix, sysconfig.get_paths()["purelib"], ROOT, LIBRARIES)
    places = Places(
        node=here / "node",
        job=folder / "job",
        plain=f"127.0.0.1:{port}/job/plain:v",
        lazy=f"127.0.0.1:{port}/job/lazy:v",
        trace=None,
        snapshots="/snapshots",
        checkpoint="file:///checkpoints",
        variables={},
        binds=(
            f"{here / 'venv'}:/opt/venv",
            f"{folder / 'job/pip.conf'}:/etc/pip.conf:ro",
            *(f"{folder / each}:/{each}" for each in ("snapshots", "checkpoints")),
            *(f"{each}:{each}:ro" for each in software),
        ),
    )
    log = here / "startup.jsonl"
    command = {"plain": plain, "ours": ours}[name](places, log, f"{name}.yaml")
    done = begin(command, log, folder / f"job/run-{name}", sent=link.sent, limit_s=120)
    (attempt,) = attempts_of(read_events([log]).events)
    return Round(start=done, attempt=attempt), log


def stages_of(each):
    return {stage.name: stage for stage in each.attempt.stages}


@pytest.fixture(scope="module")
def rounds(place):
    """One start of the plain way; of ours a first one, which installs, and one on another node."""
    link = Link(mbit=2000, delay_ms=1)
    with link.to(place[1]) as port:
        return {
            "first": started(place, link, port, "ours", 0),
            "plain": started(place, link, port, "plain", 1),
            "ours": started(place, link, port, "ours", 2),
        }


def test_both_ways_reach_a_first_step_from_the_same_bytes(rounds):
    loss = a_step(1)
    wanted = FirstStep(loss.loss, loss.grad_norm, f"{sum(CHECKPOINT):016x}")

    assert {each.start.first for each, _ in rounds.values()} == {wanted}
    for each, _ in rounds.values():
        assert each.attempt.reached
        assert each.start.cpu_s > 0
        assert each.start.wire_bytes > 10_000


def test_all_lines_of_a_start_are_of_one_job_attempt_and_node(rounds):
    for each, log in rounds.values():
        seen = {
            (line["job"], line["node"], line["attempt"])
            for line in map(json.loads, log.read_text().splitlines())
        }

        assert seen == {("whole-startup", "n1", 0)}
        assert {"image", "environment", "checkpoint_load", "first_step"} <= set(stages_of(each))
        assert (each.attempt.strays, each.attempt.backward) == (0, 0)


def test_the_first_start_installs_and_the_next_node_gets_it_from_the_store(rounds):
    first, second = (stages_of(rounds[name][0]) for name in ("first", "ours"))

    assert first["environment"].bytes.get("store", 0) == 0
    assert second["environment"].bytes["store"] > 100
    keys = [stage["environment"].nodes[0].runs[-1].facts["packages"] for stage in (first, second)]
    assert keys[0] == keys[1]


def test_bytes_are_told_by_the_tier_they_came_from(rounds):
    plain_stages, our_stages = (stages_of(rounds[name][0]) for name in ("plain", "ours"))

    assert our_stages["checkpoint_load"].bytes == {"store": len(CHECKPOINT)}
    # Fetched to a disk, and then read from there.
    assert plain_stages["checkpoint_load"].bytes == {
        "disk": len(CHECKPOINT),
        "store": len(CHECKPOINT),
    }


def test_what_a_start_took_is_the_sum_of_its_parts(rounds):
    for each, _ in rounds.values():
        assert sum(each.parts.values()) == pytest.approx(each.start.wall_s, abs=1e-6)
        assert min(each.parts.values()) >= 0


def test_stages_and_ratios_are_printed_and_drawn(rounds, tmp_path):
    of_way = {name: [rounds[name][0]] for name in ("plain", "ours")}

    stages, ways, ratios = tables_of(of_way)
    timelines(of_way, tmp_path)

    names = [row[0] for row in stages.rows]
    assert names[0] == "(before the first stage)"
    assert names[-1] == "total"
    assert {"image", "environment", "first_step"} <= set(names)
    assert [row[0] for row in ways.rows] == ["plain", "ours"]
    assert [row[0] for row in ratios.rows] == ["whole start", "without the checkpoint stage"]
    drawn = json.loads((tmp_path / "whole_startup-ours.json").read_text())
    assert "environment" in {event["name"] for event in drawn["traceEvents"]}
    assert (tmp_path / "whole_startup-plain.json").stat().st_size > 1000


def test_a_user_compares_both_from_their_logs(rounds):
    new, old = (str(rounds[name][1]) for name in ("ours", "plain"))

    shown = CliRunner().invoke(startup_command, [new, "--against", old], catch_exceptions=False)

    assert shown.exit_code == 0
    assert "environment" in shown.output
    assert "on the critical path" in shown.output


def test_nothing_stays_mounted_and_nothing_runs_on(rounds, place):
    assert rounds
    left = [
        process
        for process in psutil.process_iter(["cmdline"])
        if any(str(place[0] / "start-") in word for word in process.info["cmdline"] or ())
    ]

    # What was told to end may still be on its way out.
    assert psutil.wait_procs(left, timeout=60)[1] == []
    assert str(place[0]) not in Path("/proc/self/mountinfo").read_text()


OVERLAY = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
if libc.mount(b"o", b"/etc", b"overlay", 1, b"lowerdir=/laid:/etc"):
    raise SystemExit(os.strerror(ctypes.get_errno()))
print(sorted(set(os.listdir("/etc")) & {"laid", "issue"}))
"""


def test_another_overlay_fits_on_a_folder_of_the_image(place, tmp_path):
    """So that an environment of the image gets its snapshot by a mount, not file by file."""
    (tmp_path / "laid").mkdir()
    (tmp_path / "laid/laid").write_text("")
    software = (sys.base_prefix, LIBRARIES)
    words = [sys.executable, "-c", MAIN, "image", "run", f"127.0.0.1:{place[1]}/job/lazy:v"]
    words += ["--option", f"cache={tmp_path / 'cache'}"]
    words += [word for each in software for word in ("--bind", f"{each}:{each}:ro")]
    words += ["--bind", f"{tmp_path / 'laid'}:/laid", "--", f"{sys.base_prefix}/bin/python3"]

    done = finished([*words, "-c", OVERLAY], limit_s=240, env=environment())

    assert (done.stdout, done.stderr) == ("['issue', 'laid']\n", "")


def test_a_job_that_ends_before_its_first_step_is_told_with_what_it_said(tmp_path):
    command = plain(
        Places(
            node=tmp_path, job=tmp_path, plain="127.0.0.1:1/no:v", lazy="", trace=None,
            snapshots="", checkpoint="", variables={}, binds=(),
        ),
        tmp_path / "startup.jsonl",
        "plain.yaml",
    )  # fmt: skip

    with pytest.raises(RuntimeError, match=r"(?s)no first step.*127\.0\.0\.1:1"):
        begin(command, tmp_path / "startup.jsonl", tmp_path / "run", sent=lambda: 0, limit_s=60)


def test_the_benchmark_says_how_it_is_used():
    words = [sys.executable, "-m", "benchmarks.startup.whole", "--help"]
    told = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout

    assert "python -m benchmarks.startup.whole --folder" in told
    assert "--stream-mb" in told
