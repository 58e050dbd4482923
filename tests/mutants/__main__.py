"""Try the mutants: each in a scratch copy of the checkout, against the tests that are to catch it.

python -m tests.mutants [WORD ...]      all of them, or those whose sentence or package holds a word
"""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from importlib import import_module
from pathlib import Path

from tests.mutants.mutants import ROOT, modules_naming, modules_with, mutants

LIMIT_S = 300
"""Of the tests of one mutant."""
SOUND_LIMIT_S = 1800
"""Of all of them on the code as it is, also on a busy machine."""
CAUGHT, PASSED = 1, 0
"""Exit codes of pytest; any other means that the tests did not run."""
LIBRARIES = ("numpy", "orjson", "psutil", "pyarrow", "pydantic", "pytest", "torch")
"""Loaded once for all mutants: each is tried in a process that is forked off, and loads our own modules alone."""


def copied(folder):
    """Copy the files of the checkout, as they are now, and no others."""
    words = ["git", "ls-files", "-co", "--exclude-standard", "-z"]
    listed = subprocess.run(words, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)


def run_tests(folder, words, limit_s=LIMIT_S):
    """Run pytest in a copy, in a process of its own; return its exit code and what it said."""
    said = folder / "said"
    child = os.fork()
    if child == 0:
        code = 70
        try:
            os.setpgid(0, 0)
            os.chdir(folder)
            os.environ |= {"PYTHONPATH": str(folder), "CI": "true"}
            output = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(output, 1)
            os.dup2(output, 2)
            # Of this checkout are only the mutants and this module loaded: the rest is the copy's.
            for name in [name for name in sys.modules if name.split(".")[0] == "tests"]:
                del sys.modules[name]
            sys.path[:] = [str(folder), *(path for path in sys.path if path not in ("", str(ROOT)))]
            code = import_module("pytest").main(["-x", "-q", "-p", "no:cacheprovider", *words])
        except BaseException:  # noqa: BLE001 -- said by who waits for it
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(int(code))
    limit = threading.Timer(limit_s, os.killpg, (child, signal.SIGKILL))
    limit.start()
    _, status = os.waitpid(child, 0)
    limit.cancel()
    code = os.waitstatus_to_exitcode(status)
    # Without an end is not as it should be either.
    return (CAUGHT if code < 0 else code), said.read_text(encoding="utf-8", errors="replace")


def outcome(folder, names, limit_s=LIMIT_S):
    """Run the named tests in a copy; return pytest's exit code and what it said."""
    modules, missing = modules_naming(names, folder)
    if missing:
        return 4, f"no test is named {', '.join(missing)}"
    words = ["--tb=line", "-k", " or ".join(names), *map(str, modules)]
    return run_tests(folder, words, limit_s)


def verdict(folder, mutant, attempt=outcome):
    """Put a mutant into the copy, try it, and take it out again."""
    found = modules_with(mutant, folder)
    if len(found) != 1:
        return f"DOES NOT APPLY: its text stands {len(found)} times in {mutant.package}"
    (module,) = found
    sound = module.read_text(encoding="utf-8")
    module.write_text(sound.replace(mutant.before, mutant.after), encoding="utf-8")
    try:
        code, said = attempt(folder, mutant.tests)
    finally:
        module.write_text(sound, encoding="utf-8")
    if code == CAUGHT:
        return "caught"
    return "SURVIVED" if code == PASSED else f"NOT TRIED: {said[-2000:]}"


def main():
    words = sys.argv[1:]
    if {"-h", "--help"} & set(words):
        sys.exit(__doc__)
    chosen = [
        m for m in mutants() if not words or any(w in f"{m.package} {m.holds}" for w in words)
    ]
    for name in LIBRARIES:
        import_module(name)
    with tempfile.TemporaryDirectory(prefix="omniload-mutants-") as name:
        folder = Path(name)
        copied(folder)
        names = sorted({test for m in chosen for test in m.tests})
        code, said = outcome(folder, names, SOUND_LIMIT_S)
        if code != PASSED:
            sys.exit(f"the tests fail on the code as it is:\n{said[-3000:]}")
        verdicts = []
        for mutant in chosen:
            verdicts.append(verdict(folder, mutant))
            sys.stdout.write(f"{verdicts[-1]}: {mutant.package}: {mutant.holds}\n")
            sys.stdout.flush()
    caught = verdicts.count("caught")
    sys.stdout.write(f"{caught} of {len(chosen)} caught\n")
    sys.exit(caught < len(chosen))


if __name__ == "__main__":
    main()
