"""Ctrl-C during the imports of a command, or after its end."""

import os
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from omniload.base.linux import interrupts
from tests.support.programs import finished

# SIGINT comes when a module is looked up: there, or in a callback of a weak reference of the import system, where an
# exception is printed and lost.
_AT_MODULE = """
import runpy, signal, sys, weakref

module, where, *words = sys.argv[1:]

def interrupt(*_):
    signal.raise_signal(signal.SIGINT)

class Finder:
    def find_spec(self, name, *_):
        if name == module and where == "import":
            interrupt()
        elif name == module:
            held = type("Held", (), {})()
            kept = weakref.ref(held, interrupt)
            del held

sys.meta_path.insert(0, Finder())
sys.argv[1:] = words
runpy.run_module("omniload", run_name="__main__", alter_sys=True)
"""
_AT_END = """
import runpy, signal, sys, threading

# Called as the interpreter ends, where it joins threads.
threading._register_atexit(signal.raise_signal, signal.SIGINT)
sys.argv[1:] = ["--version"]
runpy.run_module("omniload", run_name="__main__", alter_sys=True)
"""


def ended(script: str, *words: str) -> tuple[int, str]:
    """Run a script in a new Python; return its exit code and its standard error."""
    run = finished([sys.executable, "-c", script, *words], limit_s=60)
    return run.returncode, run.stderr


@pytest.mark.parametrize("where", ["import", "callback"])
@pytest.mark.parametrize(
    ("module", "words"),
    [
        ("omniload.base.cli", "--help"),
        ("click", "--help"),
        ("fusefs.cli", "fs --help"),
        ("snapshot.commands.env", "env --help"),
        ("snapshot.commands.image", "image --help"),
        ("trainer_integration.cli", "train --help"),
        ("omniload.commands.check", "mix check mix.yaml"),
        ("numpy", "mix check mix.yaml"),
    ],
)
def test_a_command_that_is_interrupted_as_it_is_imported_ends_with_130_and_no_traceback(
    module, words, where
):
    assert ended(_AT_MODULE, module, where, *words.split()) == (130, "interrupted\n")


def test_a_command_that_is_interrupted_as_its_process_ends_has_no_traceback():
    assert ended(_AT_END) == (130, "interrupted\n")


@pytest.mark.parametrize("words", ["mix schema", "mix --help", "mix check mix.yaml"])
def test_a_command_that_nobody_reads_to_its_end_is_no_fault_of_ours(words, tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n')
    (tmp_path / "mix.yaml").write_text(
        "version: 2\nseed: 1\ntokenizer: {type: bytes}\nsources: {a: {type: jsonl, path: a.jsonl}}\n"
        "mix: {stages: [{from_step: 0, weights: {a: 1}}]}\npack: {length: 8}\nbatch: {tokens: 8, micro_tokens: 8}\n"
    )
    reads, writes = os.pipe()
    os.close(reads)
    command = [sys.executable, "-m", "omniload", *words.split()]
    try:
        done = subprocess.run(
            command,
            stdout=writes,
            stderr=subprocess.PIPE,
            cwd=tmp_path,
            text=True,
            check=False,
            timeout=60,
        )
    finally:
        os.close(writes)

    assert (done.returncode, done.stderr) == (141, "")


def test_the_installed_command_is_that_of_the_module():
    scripts = tomllib.loads((Path(__file__).parents[4] / "pyproject.toml").read_text())["project"]

    assert scripts["scripts"]["omniload"] == "omniload.__main__:main"


def test_an_ignored_interrupt_stays_ignored_and_a_handler_of_others_stays():
    before = signal.getsignal(signal.SIGINT)
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        with interrupts.ending_when_interrupted():
            signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_behind_the_import_an_interrupt_is_an_exception_again():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with interrupts.ending_when_interrupted():
            pass
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)
