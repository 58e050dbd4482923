"""Environments of a few files, made without an interpreter of their own, and installations into them."""

import os
import shutil
import stat
import sys
from contextlib import closing, contextmanager
from pathlib import Path

from fusefs.stores.local.store import LocalStore
from snapshot.env.flow.restore import Restorer
from snapshot.env.flow.save import install_and_save
from snapshot.env.format.entries import Entry, Kind, Target
from snapshot.env.key.interpreter import Interpreter
from snapshot.env.key.keys import Installation
from snapshot.env.node.cache import NodeCache
from snapshot.env.store.repository import Repository
from snapshot.env.target.environment import Environment, targets_of
from snapshot.env.target.records import Records

SITE, BIN = "lib/site-packages", "bin"

INSTALL = """
import os, sys
prefix = sys.argv[1]
site, scripts = f"{prefix}/lib/site-packages", f"{prefix}/bin"
def put(path, data, mode=0o644):
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "wb") as file:
        file.write(data)
    os.chmod(path, mode)
put(f"{site}/tree/__init__.py", b"VALUE = 'from the snapshot'\\n")
put(f"{site}/tree/deep/er/data.bin", bytes(range(256)) * 5000)
put(f"{site}/tree/deep/twin.bin", bytes(range(256)) * 5000)
put(f"{site}/tree/empty.txt", b"")
os.makedirs(f"{site}/tree/nothing_in_it")
put(f"{site}/shared/added.py", b"ADDED = 1\\n")
put(f"{site}/base.py", b"VALUE = 'changed'\\n")
os.symlink("data.bin", f"{site}/tree/deep/er/link.bin")
os.symlink("../lib/site-packages/tree/__init__.py", f"{scripts}/tree-link")
put(f"{scripts}/tree", b"#!/bin/sh\\necho tree\\n", 0o755)
os.remove(f"{site}/old.py")
os.remove(f"{site}/gone/inner.py")
os.rmdir(f"{site}/gone")
"""
"""A script that adds, changes and deletes files, directories and links; equal contents; an executable."""


def an_environment(folder):
    """Return an environment whose site-packages have a few files, as in an image."""
    prefix = Path(folder) / "prefix"
    site, scripts = prefix / SITE, prefix / BIN
    for path, text in {
        site / "base.py": "VALUE = 'base'\n",
        site / "old.py": "OLD = 1\n",
        site / "kept.py": "KEPT = 1\n",
        site / "gone" / "inner.py": "INNER = 1\n",
        site / "shared" / "__init__.py": "",
        scripts / "there": "#!/bin/sh\n",
    }.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        os.utime(path, ns=(10**18, 10**18))
    return environment_at(prefix)


def environment_at(prefix):
    """Return the environment at ``prefix``."""
    interpreter = an_interpreter(prefix)
    targets = targets_of(interpreter.prefix, interpreter.targets)
    return Environment(interpreter, targets, Records(interpreter.prefix))


def an_interpreter(prefix, **changes):
    identity = {
        "implementation": "CPython",
        "version": "3.11.7",
        "cache_tag": "cpython-311",
        "soabi": "cpython-311-x86_64-linux-gnu",
        "abiflags": "",
        "platform": "linux-x86_64",
        "machine": "x86_64",
        "libc": "glibc 2.36",
    }
    return Interpreter(
        executable=sys.executable,
        prefix=str(prefix),
        purelib=f"{prefix}/{SITE}",
        platlib=f"{prefix}/{SITE}",
        scripts=f"{prefix}/{BIN}",
        identity={**identity, **changes},
    )


def an_installation(environment, script=INSTALL, **changes):
    """Return the installation that ``INSTALL`` performs."""
    command = (sys.executable, "-I", "-c", script, environment.interpreter.prefix)
    fields = {"folder": environment.interpreter.prefix, "environment": dict(os.environ)}
    return Installation(**{"command": command, **fields, **changes})


@contextmanager
def a_repository(folder):
    """Open a store in a directory, which is made if it is missing."""
    Path(folder).mkdir(exist_ok=True)
    with closing(LocalStore(folder)) as store:
        yield Repository(store)


def a_restorer(environment, folder, cache="cache"):
    """Return a restorer of an environment; store and node cache lie in ``folder``."""
    folder = Path(folder)
    return Restorer(environment, NodeCache(folder / cache), lambda: a_repository(folder / "store"))


def saved(folder, script=INSTALL):
    """Install into an environment, save, and make the environment again; return both."""
    environment = an_environment(folder)
    with a_repository(Path(folder) / "store") as repository:
        manifest = install_and_save(
            environment, repository, an_installation(environment, script), byte_code=False
        )
    held = contents(environment)
    remake(environment, folder)
    return environment, manifest, held


def discard(folder):
    """Remove a folder, even if it contains read-only folders."""
    for above, folders, _ in os.walk(folder):
        for name in folders:
            if not (Path(above) / name).is_symlink():
                (Path(above) / name).chmod(0o755)
    shutil.rmtree(folder)


def remake(environment, folder):
    """Remove an environment and make it again in its first state."""
    discard(environment.interpreter.prefix)
    an_environment(folder)


def contents(environment):
    """Return everything in the targets: kind, mode, bytes or link, and time of each path."""
    found = {}
    for target in environment.targets:
        for folder, folders, files in os.walk(target.path):
            folders[:] = [name for name in folders if name != ".omniload-env"]
            for name in [*folders, *files]:
                path = Path(folder) / name
                shown = f"{target.name}/{path.relative_to(target.path)}"
                found[shown] = _description(path)
    return found


def _description(path):
    seen = path.lstat()
    if path.is_symlink():
        return ("link", str(path.readlink()))
    if path.is_dir():
        return ("directory", stat.S_IMODE(seen.st_mode))
    return ("file", stat.S_IMODE(seen.st_mode), path.read_bytes(), seen.st_mtime_ns)


def changes(environment, folder, key):
    """Return the paths of an environment that differ from a snapshot, by their digests."""
    tree = NodeCache(Path(folder) / "cache").tree(key)
    return tree.changed_files(digests=True, roots=[target.path for target in environment.targets])


def a_file(path, target=0, **changes):
    """Return the entry of a file of three bytes."""
    fields = {"kind": Kind.FILE, "mode": 0o644, "mtime_ns": 1, "size_bytes": 3, "digest": b"d" * 32}
    return Entry(target, path, **{**fields, **changes})


def a_folder(path, target=0, mode=0o755):
    return Entry(target, path, Kind.DIRECTORY, mode, 1)


def a_link(path, link, target=0):
    return Entry(target, path, Kind.LINK, 0, 1, link=link)


TARGETS = (Target("bin", "/env/bin"), Target("lib", "/env/lib"))
