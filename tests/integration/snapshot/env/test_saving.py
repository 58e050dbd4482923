"""What a save captures, in which packs it lies, and what it refuses to make a snapshot of."""

import hashlib
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from omniload.base.errors import IntegrityError, StateError
from snapshot.env.flow.save import capture, save
from snapshot.env.format.entries import Kind, Limits
from snapshot.env.format.packs import inflate
from snapshot.env.store.repository import ROOT
from tests.support.snapshot.env_builders import (
    a_repository,
    a_restorer,
    an_environment,
    an_installation,
    changes,
    contents,
    remake,
    saved,
)

DOCUMENT = {"version": 1, "base": {"image": "", "installed": ""}, "command": ["x"]}


def captured(folder, script):
    environment = an_environment(folder)
    found = capture(
        environment.interpreter,
        environment.targets,
        an_installation(environment, script),
        byte_code=False,
    )
    return environment, found


def files_script(**files):
    """Return a script that writes files into site-packages."""
    return (
        "import os, sys\n"
        f"for name, data in {files!r}.items():\n"
        "    with open(f'{sys.argv[1]}/lib/site-packages/' + name, 'wb') as file:\n"
        "        file.write(data)\n"
    )


def test_a_capture_names_what_was_added_changed_and_deleted(tmp_path):
    _, manifest, _ = saved(tmp_path)

    kinds = {(e.target, e.path): e.kind for e in manifest.entries if e.path}
    assert kinds[1, "base.py"] is Kind.FILE
    assert kinds[1, "old.py"] is Kind.DELETED
    assert kinds[1, "gone"] is Kind.DELETED
    assert (1, "gone/inner.py") not in kinds
    assert (1, "kept.py") not in kinds
    assert kinds[1, "tree/nothing_in_it"] is Kind.DIRECTORY
    assert kinds[0, "tree-link"] is Kind.LINK


def test_modes_and_times_are_kept_to_the_nanosecond(tmp_path):
    script = files_script(a=b"1") + (
        "path = f'{sys.argv[1]}/lib/site-packages/a'\n"
        "os.chmod(path, 0o640)\n"
        "os.utime(path, ns=(1, 1234567890123456789))\n"
    )
    environment, manifest, _ = saved(tmp_path, script)

    a_restorer(environment, tmp_path).restore(manifest.head.key, "copy")

    seen = (Path(environment.targets[1].path) / "a").stat()
    assert (seen.st_mode & 0o7777, seen.st_mtime_ns) == (0o640, 1234567890123456789)


def test_a_deletion_alone_is_a_snapshot(tmp_path):
    script = "import os, sys; os.remove(f'{sys.argv[1]}/lib/site-packages/shared/__init__.py')"
    environment, manifest, held = saved(tmp_path, script)

    assert manifest.num_files == 0
    assert manifest.head.packs == ()
    a_restorer(environment, tmp_path).restore(manifest.head.key, "copy")
    assert contents(environment) == held


def test_a_command_that_changes_nothing_is_a_snapshot_of_nothing(tmp_path):
    environment, manifest, held = saved(tmp_path, "pass")

    assert manifest.entries == ()
    done = a_restorer(environment, tmp_path).restore(manifest.head.key, "copy")
    assert done.raw_bytes == 0
    assert contents(environment) == held


def test_a_file_that_took_the_place_of_a_directory_is_restored_and_undone(tmp_path):
    script = (
        "import os, shutil, sys\n"
        "site = f'{sys.argv[1]}/lib/site-packages'\n"
        "shutil.rmtree(f'{site}/gone')\n"
        "open(f'{site}/gone', 'w').write('a file now')\n"
        "os.remove(f'{site}/old.py')\n"
        "os.makedirs(f'{site}/old.py/inside')\n"
    )
    environment, manifest, held = saved(tmp_path, script)
    before = contents(environment)

    a_restorer(environment, tmp_path).restore(manifest.head.key, "copy")

    assert contents(environment) == held
    with environment.locked():
        environment.clear(environment.heal())
    assert contents(environment) == before


def test_names_of_any_bytes_come_back(tmp_path):
    script = (
        "import os, sys\n"
        "site = os.fsencode(sys.argv[1]) + b'/lib/site-packages/'\n"
        "for name in (b'na\\xffme', b' blank ', 'schön'.encode(), b'-rf', b'new\\nline'):\n"
        "    open(site + name, 'wb').write(name)\n"
    )
    environment, manifest, held = saved(tmp_path, script)

    a_restorer(environment, tmp_path).restore(manifest.head.key, "link")

    assert contents(environment) == held
    assert changes(environment, tmp_path, manifest.head.key) == []


def test_a_pack_is_closed_when_it_is_full(tmp_path, monkeypatch):
    monkeypatch.setattr("snapshot.env.flow.save.PACK_RAW_BYTES", 1000)
    files = {f"f{n}": bytes([n]) * 400 for n in range(10)}
    environment, manifest, held = saved(tmp_path, files_script(**files))

    assert len(manifest.head.packs) == 4
    a_restorer(environment, tmp_path).restore(manifest.head.key, "copy")
    assert contents(environment) == held


def test_contents_of_one_kind_lie_beside_each_other(tmp_path):
    files = {f"{n}.{kind}": f"{n}{kind}".encode() for n in range(3) for kind in ("py", "so")}
    environment, manifest, _ = saved(tmp_path, files_script(**files))

    with a_repository(tmp_path / "store") as repository:
        (frame,) = manifest.frames[0]
        stored = repository.read_frames(manifest.head.packs[0], frame.offset, frame.stored_bytes)
        assert inflate(stored, frame.raw_bytes, name="p") == b"0py1py2py0so1so2so"
    assert environment.targets == manifest.head.targets


def test_a_file_that_changes_while_it_is_saved_is_told(tmp_path):
    environment, found = captured(tmp_path, files_script(a=b"1" * 100))
    path = Path(environment.targets[1].path) / "a"

    def change(what, done, total):
        if what == "reading":
            path.write_bytes(b"2" * 100)

    with a_repository(tmp_path / "store") as repository:
        with pytest.raises(StateError, match="changed while it was saved"):
            save(repository, found, DOCUMENT, progress=change)

        assert repository.all_keys() == []


@pytest.mark.parametrize(
    ("script", "message"),
    [
        (
            "import os, sys; os.symlink('/etc/passwd', f'{sys.argv[1]}/bin/out')",
            "outside the targets",
        ),
        (files_script(Name=b"1", name=b"2"), "differ by case only"),
    ],
    ids=["link out", "case"],
)
def test_what_could_not_be_restored_is_not_saved(tmp_path, script, message):
    _, found = captured(tmp_path, script)

    with a_repository(tmp_path / "store") as repository:
        with pytest.raises(IntegrityError, match=message):
            save(repository, found, DOCUMENT)

        assert repository.all_keys() == []
        assert not (tmp_path / "store" / ROOT).exists()


def test_paths_that_differ_by_case_are_saved_and_restored_where_that_is_allowed(tmp_path):
    environment, found = captured(tmp_path, files_script(Name=b"1", name=b"2"))
    limits = Limits(case_pairs=True)
    with a_repository(tmp_path / "store") as repository:
        manifest = save(repository, found, {**DOCUMENT, **_fits(environment)}, limits=limits)
    remake(environment, tmp_path)
    restorer = a_restorer(environment, tmp_path)

    with pytest.raises(IntegrityError, match="differ by case only"):
        restorer.restore(manifest.head.key, "copy")
    restorer.limits = limits
    restorer.restore(manifest.head.key, "copy")

    assert (Path(environment.targets[1].path) / "Name").read_bytes() == b"1"
    assert (Path(environment.targets[1].path) / "name").read_bytes() == b"2"


def _fits(environment):
    return {
        "interpreter": environment.interpreter.identity,
        "prefix": os.path.realpath(environment.interpreter.prefix),
    }


def test_set_uid_bits_do_not_enter_a_snapshot(tmp_path):
    script = files_script(a=b"1") + "os.chmod(f'{sys.argv[1]}/lib/site-packages/a', 0o4755)\n"
    _, manifest, _ = saved(tmp_path, script)

    assert [e.mode for e in manifest.entries if e.path == "a"] == [0o755]


def test_progress_goes_to_the_end_of_every_part(tmp_path):
    environment, found = captured(tmp_path, files_script(a=b"1" * 3000, b=b"2" * 50))
    told = {}
    with a_repository(tmp_path / "store") as repository:
        save(
            repository,
            found,
            {**DOCUMENT, **_fits(environment)},
            progress=lambda what, done, total: told.update({what: (done, total)}),
        )

    assert told == {"reading": (3050, 3050), "packing": (3050, 3050)}


def test_every_content_lies_in_a_pack_under_its_digest(tmp_path):
    _, manifest, held = saved(tmp_path)

    with a_repository(tmp_path / "store") as repository, ThreadPoolExecutor(1):
        found = repository.known_contents(manifest.contents)
    files = [each for each in held.values() if each[0] == "file"]
    digests = {hashlib.sha256(each[2]).digest() for each in files if each[2]}

    assert set(found) <= digests
    assert {d for d, place in manifest.contents.items() if place.size_bytes} == set(found)


COMPILED = """
import os, py_compile, sys
site = f"{sys.argv[1]}/lib/site-packages"
os.makedirs(f"{site}/new/__pycache__")
os.makedirs(f"{site}/kept_too/__pycache__")
for name in ("new/a", "kept", "shared/b", "kept_too/m"):
    with open(f"{site}/{name}.py", "a") as file:
        print("X = 1", file=file)
    py_compile.compile(f"{site}/{name}.py", doraise=True)
open(f"{site}/new/__pycache__/gone.cpython-311.pyc", "wb").write(b"no source of it is here")
open(f"{site}/kept_too/__pycache__/data.txt", "w").write("no byte code")
open(f"{site}/sourceless.pyc", "wb").write(b"imported as it is")
"""


def test_byte_code_that_can_be_made_again_is_left_out_where_it_is_not_wanted(tmp_path):
    _, found = captured(tmp_path, COMPILED)

    added = {path for _, path in found.delta.changed if "pyc" in path}
    assert added == {
        "new/__pycache__",
        "new/__pycache__/gone.cpython-311.pyc",
        "kept_too/__pycache__",
        "kept_too/__pycache__/data.txt",
        "sourceless.pyc",
    }
    assert found.delta.deleted == ()


def test_byte_code_that_was_there_before_is_captured_when_it_changes(tmp_path):
    environment = an_environment(tmp_path)
    site = Path(environment.interpreter.purelib)
    cache = site / "__pycache__" / f"kept.{sys.implementation.cache_tag}.pyc"
    cache.parent.mkdir()
    cache.write_bytes(b"of before")
    installation = an_installation(environment, COMPILED)

    found = capture(environment.interpreter, environment.targets, installation, byte_code=False)

    assert f"__pycache__/{cache.name}" in {path for _, path in found.delta.changed}
    assert found.delta.deleted == ()


INSTALLED = """
import os, sys
site = f"{sys.argv[1]}/lib/site-packages"
os.makedirs(f"{site}/new/below")
for name in ("new/__init__", "new/below/deep", "old/added", "single", "broken"):
    with open(f"{site}/{name}.py", "w") as file:
        print("X = (" if name == "broken" else "X = 1", file=file)
"""


def test_what_the_command_brought_is_compiled_and_nothing_that_was_there(tmp_path):
    environment = an_environment(tmp_path)
    site = Path(environment.interpreter.purelib)
    (site / "old").mkdir()
    (site / "old" / "was_there.py").write_text("X = 0\n")
    (site / "also_there.py").write_text("X = 0\n")
    installation = an_installation(environment, INSTALLED)

    found = capture(environment.interpreter, environment.targets, installation)

    compiled = {path for _, path in found.delta.changed if path.endswith(".pyc")}
    tag = sys.implementation.cache_tag
    assert compiled == {
        f"new/__pycache__/__init__.{tag}.pyc",
        f"new/below/__pycache__/deep.{tag}.pyc",
        f"old/__pycache__/added.{tag}.pyc",
        f"__pycache__/single.{tag}.pyc",
    }
