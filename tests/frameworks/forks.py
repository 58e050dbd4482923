"""Programs as forks of the process of these tests, which has loaded frameworks: that takes longer than what they do."""

import multiprocessing
import os
import runpy
import sys
import traceback
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.support.trainer.host_ranks import variables_of_ranks

__all__ = ["omniload", "run_ranks"]

LIMIT_S = 240
SCRIPTS = Path(__file__).parents[1] / "support" / "trainer" / "processes"


def run_ranks(script, world_size, *arguments):
    """Run a script of ranks as every rank of a job; fail with what the ranks said."""
    ranks = [
        ([str(SCRIPTS / script), *arguments], variables)
        for variables in variables_of_ranks(world_size)
    ]
    _run(runpy.run_path, ranks)


def omniload(*words):
    """Run a command of ours; return what it wrote to its standard output."""
    return _run(runpy.run_module, [(["omniload", *map(str, words)], {})])[0]


def _run(run, programs):
    """Run programs side by side; return what each wrote to its standard output."""
    fork = multiprocessing.get_context("fork").Process
    with TemporaryDirectory() as folder:
        files = [Path(folder) / f"{number}" for number in range(len(programs))]
        begun = [
            fork(target=_be, args=(run, words, variables, file))
            for (words, variables), file in zip(programs, files, strict=True)
        ]
        for process in begun:
            process.start()
        try:
            for process in begun:
                process.join(LIMIT_S)
        finally:
            for process in begun:
                process.kill()
                process.join()
        told = [file.with_suffix(".err").read_text() for file in files]
        assert [process.exitcode for process in begun] == [0] * len(begun), "\n".join(told)
        return [file.with_suffix(".out").read_text() for file in files]


def _be(run, words, variables, file):
    with file.with_suffix(".out").open("w") as said, file.with_suffix(".err").open("w") as told:
        os.dup2(said.fileno(), 1)
        os.dup2(told.fileno(), 2)
        sys.stdout, sys.stderr = said, told
        os.environ.update(variables)
        sys.argv = words
        try:
            run(words[0], run_name="__main__")
        except Exception:
            traceback.print_exc()
            raise
