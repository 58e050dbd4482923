"""The main job on two hosts, a rank on each: one is killed, all come back, and the samples are those of one host.

    python -m examples.demo_hosts            some minutes on two cores
    python -m examples.demo_hosts --fresh    build the corpus anew and forget earlier runs

The hosts are network namespaces on this machine, with an address each and a wire between them. That needs root, or a
kernel that allows namespaces for other users; nothing on the machine is changed. Ends like demo.py.
"""

import os
import signal
import sys
import time
from pathlib import Path

import psutil
import yaml
from rich.console import Console

from examples.demo import (
    CORPUS,
    DEMO,
    MIX,
    ROOT,
    TRAIN,
    Demo,
    DemoError,
    between,
    clear,
    conclude,
    options_of,
    prove_run,
)
from examples.two_hosts import ADDRESSES, NAMES, WIRE, HostsError, TwoHosts
from omniload import OmniloadError
from omniload.actors.status_file import read_status
from omniload.base.errors import StateError
from omniload.base.log import set_up_logging
from trainer_integration.config import load_train
from trainer_integration.run.run_log import StepLine, last_of_each_step, read_log

HOSTS = DEMO / "hosts"
TRAIN_FILE = "demo/hosts/train.yaml"
PORT = 29500
LOOK_S = 0.2
INTERRUPTED = 130


def main() -> int:
    """Run the demo; return its exit code."""
    options = options_of(__doc__)
    set_up_logging("WARNING")
    os.chdir(ROOT)
    demo = Demo(Console(highlight=False))
    try:
        clear(HOSTS / "run", fresh=options.fresh)
        with TwoHosts(HOSTS / "etc") as hosts:
            _data(demo, hosts)
            _train(demo, hosts)
            demo.console.print("\n[dim]ending what is left on both hosts[/]")
        run_dir = (HOSTS / "run").resolve()
        proof, summary = prove_run(demo, run_dir, TRAIN_FILE)
        _compare(demo, run_dir)
        conclude(demo, proof, summary, run_dir)
    except KeyboardInterrupt:
        demo.console.print("\n[bold]interrupted[/]: both hosts are gone, and all that ran on them")
        return INTERRUPTED
    except (DemoError, HostsError) as failure:
        demo.console.print("\n[bold red]failed:[/]", str(failure), soft_wrap=True)
        return 1
    except OmniloadError as error:
        demo.console.print("\n[bold red]failed:[/]", str(error), soft_wrap=True)
        return error.exit_code
    return 0


def _data(demo: Demo, hosts: TwoHosts) -> None:
    with demo.phase("A real corpus, and the files of make demo with a network to listen on"):
        demo.omniload("mix", "sample", CORPUS)
        mix = yaml.safe_load(Path(MIX).read_text(encoding="utf-8"))
        for source in mix["sources"].values():
            source["path"] = source["path"].replace("../demo/corpus", "../corpus")
        mix["tokenizer"]["path"] = "../corpus/tokenizer.json"
        mix["runtime"] |= {"bind": WIRE}
        train = yaml.safe_load(Path(TRAIN).read_text(encoding="utf-8"))
        train |= {"mix": "mix.yaml", "run_dir": "run"}
        for name, keys in (("mix", mix), ("train", train)):
            file = HOSTS / f"{name}.yaml"
            file.write_text(yaml.safe_dump(keys, sort_keys=False), encoding="utf-8")
        # It runs on that host, which has the interface that the file names.
        words = ["omniload", "mix", "check", "demo/hosts/mix.yaml", "--dp", "2"]
        demo.console.print(f"\n[dim]on host {NAMES[0]} $[/] [bold]{' '.join(words)}[/]")
        demo.console.file.flush()
        if code := hosts.start(0, [sys.executable, "-m", *words]).wait():
            raise DemoError(f"omniload mix check ended with {code}")


def _train(demo: Demo, hosts: TwoHosts) -> None:
    train = load_train(TRAIN_FILE)[0]
    due = between(train.steps, train.checkpoint.every_steps)
    with demo.phase("Training, a rank on each of two hosts; that of the second is killed half-way"):
        words = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--nnodes",
            "2",
            "--nproc-per-node",
            "1",
        ]
        words += ["--master-addr", ADDRESSES[0], "--master-port", str(PORT)]
        words += ["--max-restarts", str(train.max_restarts)]
        for name, address in zip(NAMES, ADDRESSES, strict=True):
            demo.console.print(f"[dim]host {name}[/]  {address} on {WIRE}")
        shown = [
            "torchrun",
            *words[3:],
            "--node-rank",
            "0|1",
            "-m",
            "omniload",
            "train",
            "run",
            TRAIN_FILE,
        ]
        demo.console.print(f"\n[dim]on both $[/] [bold]{' '.join(shown)}[/]\n", soft_wrap=True)
        demo.console.file.flush()
        other = HOSTS / "two.log"
        with other.open("wb") as out:
            started = [
                hosts.start(
                    n,
                    [*words, "--node-rank", str(n), "-m", "omniload", "train", "run", TRAIN_FILE],
                    to,
                )
                for n, to in ((1, out), (0, None))
            ]
            killed = False
            while started[1].poll() is None:
                time.sleep(LOOK_S)
                if not killed and _steps(HOSTS / "run") > due:
                    killed = _kill(demo, hosts)
            codes = [command.wait(60) for command in started]
        if any(codes):
            raise DemoError(
                f"training ended with exit codes {codes}; see {other} and {HOSTS}/run/logs"
            )
        if not killed:
            raise DemoError("no rank was ever killed, so nothing was resumed")


def _kill(demo: Demo, hosts: TwoHosts) -> bool:
    """Print the host of each rank, and kill the rank of the second host; return whether there was one."""
    ranks = [pid for pid in hosts.processes(1) if _is_rank(pid)]
    if not ranks:
        return False
    for n, name in enumerate(NAMES):
        there = hosts.processes(n)
        roles = sorted(role.name for role in read_status(HOSTS / "run").roles if role.pid in there)
        demo.console.print(f"[dim]host {name}[/]  {', '.join(roles)}", soft_wrap=True)
    demo.console.print(
        f"[bold red]kill -9 {ranks[0]}[/]   rank 1 on host {NAMES[1]}, as a failing machine would"
    )
    demo.console.file.flush()
    os.kill(ranks[0], signal.SIGKILL)
    return True


def _is_rank(pid: int) -> bool:
    try:
        process = psutil.Process(pid)
        # The agent that starts ranks has no rank itself, and children of ranks have another command.
        return process.environ().get("RANK") == "1" and process.cmdline()[1:4] == [
            "-u",
            "-m",
            "omniload",
        ]
    except psutil.Error:
        return False


def _digests(run: Path) -> dict[int, str | None]:
    steps = [line for line in read_log(run) if isinstance(line, StepLine)]
    return {line.step: line.digest for line in last_of_each_step(steps)}


def _steps(run: Path) -> int:
    try:
        return max(_digests(run), default=-1) + 1
    except StateError:  # its log does not exist yet
        return 0


def _compare(demo: Demo, run: Path) -> None:
    """Compare with the one-host run that ``make demo`` left, if it exists: each log shows what trainers received."""
    try:
        one, two = _digests(DEMO / "run"), _digests(run)
    except StateError:
        demo.console.print(
            "\nmake demo leaves a run of one host, with which this one is compared when it is there"
        )
        return
    common = sorted(one.keys() & two.keys())
    others = [step for step in common if one[step] != two[step]]
    if others:
        raise DemoError(
            f"steps {others[:5]} have other digests than in {DEMO}/run; was that run of the same corpus?"
        )
    demo.console.print(
        f"\n[bold green]{len(common)} steps[/] have the digests of demo/run, which ran on one host"
    )


if __name__ == "__main__":
    sys.exit(main())
