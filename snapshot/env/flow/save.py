"""Running a command, finding its changes to the targets, and saving them as a snapshot."""

import hashlib
import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from omniload.base.errors import StateError
from omniload.base.linux import exec_with_parent
from omniload.base.linux.cores import cores_here
from omniload.base.log import get_logger
from snapshot.env.format.digests import file_digest
from snapshot.env.format.entries import (
    Delta,
    Entry,
    Kind,
    Limits,
    Place,
    Target,
    check_entries,
    difference,
)
from snapshot.env.format.manifest import Head, Manifest
from snapshot.env.format.manifest import Place as PackPlace
from snapshot.env.format.packs import Frame
from snapshot.env.key.interpreter import Interpreter, environment_of, installed_in, shown
from snapshot.env.key.keys import Installation, key_of
from snapshot.env.store.progress import Progress
from snapshot.env.store.repository import Repository
from snapshot.env.target.environment import Environment, Scan, scan

__all__ = ["Captured", "capture", "install", "install_and_save", "save"]

# A pack is closed by the first content that exceeds this, because a file is never divided between two packs.
PACK_RAW_BYTES = 256 << 20
_PIECE_BYTES = 1 << 20
_LOG = get_logger(__name__)


class Captured(NamedTuple):
    """The changes that a command made to the targets."""

    targets: tuple[Target, ...]
    before: Scan
    after: Scan
    delta: Delta
    install_s: float

    @property
    def is_empty(self) -> bool:
        """Whether nothing was installed, except perhaps byte code for existing files."""
        made = (
            place
            for place in self.delta.changed
            if self.after[place].kind is not Kind.DIRECTORY or place not in self.before
        )
        return not self.delta.deleted and all("__pycache__" in path for _, path in made)


def capture(
    interpreter: Interpreter,
    targets: Sequence[Target],
    installation: Installation,
    *,
    byte_code: bool = True,
) -> Captured:
    """Run the command of an installation between two scans of the targets.

    With ``byte_code``, sources that the command left uncompiled are compiled. Otherwise each process that imports
    them, on every node, would compile them again. Without it, byte code is left out: this halves the number of
    files, for environments that are linked or far from the store.

    Raises:
        StateError: The command failed.
    """
    before = scan(targets)
    begin = time.monotonic()
    variables = environment_of(interpreter, installation.environment)
    words = list(installation.command)
    if "/" not in words[0] and shutil.which(words[0], path=variables["PATH"]) is None:
        raise StateError(f"{words[0]!r} cannot be run: there is no such program on PATH")
    try:
        # Standard output is reserved for the key. If this save is killed, the command must end with it, or the next
        # save would look at files that are still being written.
        leash = [interpreter.executable, "-I", exec_with_parent.__file__, str(os.getpid())]
        done = subprocess.run(  # noqa: S603
            # A user who may not run the interpreter can only copy into its environment.
            [*leash, *words] if os.access(interpreter.executable, os.X_OK) else words,
            cwd=installation.folder,
            env=variables,
            check=False,
            stdout=2,
        )
    except OSError as error:
        raise StateError(f"{words[0]!r} cannot be run: {error.strerror}") from error
    if done.returncode == exec_with_parent.CANNOT_RUN:
        raise StateError(f"{words[0]!r} cannot be run; why is said above")
    if done.returncode != 0:
        raise StateError(f"{' '.join(words)!r} ended with {done.returncode}; nothing was saved")
    install_s = time.monotonic() - begin
    # Compile before the last scan, so that byte code is captured like all other files of the command.
    if byte_code:
        _compile(interpreter, _sources_of(interpreter, targets, before, scan(targets)))
    after = scan(targets)
    if not byte_code:
        _leave_out_byte_code(before, after)
    return Captured(tuple(targets), before, after, difference(before, after), install_s)


def install(
    environment: Environment, installation: Installation, *, byte_code: bool = True
) -> Captured:
    """Run the command of an installation in the environment's content before any restore, under its lock.

    Raises:
        StateError: The command failed.
    """
    held = environment.heal()
    if held is not None and held.form != "command":
        environment.clear(held)
    captured = capture(
        environment.interpreter, environment.targets, installation, byte_code=byte_code
    )
    if captured.is_empty:
        _LOG.warning(
            "the command changed nothing in %s; is its pip that of this environment?",
            environment.interpreter.prefix,
        )
    return captured


def install_and_save(  # noqa: PLR0913 -- what, into what, to where, and how
    environment: Environment,
    repository: Repository,
    installation: Installation,
    *,
    image: str = "",
    byte_code: bool = True,
    limits: Limits | None = None,
    progress: Progress = lambda *_: None,
) -> Manifest:
    """Install into the environment's content before any restore, and save a snapshot.

    Returns:
        The manifest on the store.

    Raises:
        StateError: The command failed, or it was run here before and cannot be captured again.
        IntegrityError: Its result could not be restored.
    """
    with environment.locked():
        held = environment.heal()
        document = environment.document(installation, image)
        if held is not None and held.form == "command" and held.key == key_of(document):
            raise StateError(
                f"{environment.interpreter.prefix} got this snapshot by the same command before, so "
                "nothing of it can be seen any more; make the environment anew"
            )
        captured = install(environment, installation, byte_code=byte_code)
        manifest = save(repository, captured, document, limits=limits, progress=progress)
        environment.note_installed(document)
        return manifest


def save(
    repository: Repository,
    captured: Captured,
    document: dict[str, Any],
    *,
    limits: Limits | None = None,
    progress: Progress = lambda *_: None,
) -> Manifest:
    """Write a snapshot of captured changes: packs first, the manifest last.

    Contents that the store already has are not written again.

    Returns:
        The manifest that is on the store now; an existing one of the same key stays.

    Raises:
        StateError: A file changed while it was read.
        IntegrityError: The changes could not be restored (such as links that lead out).
    """
    threads = min(8, cores_here() + 1)
    with ThreadPoolExecutor(threads, thread_name_prefix="omniload-env") as pool:
        targets = captured.targets
        entries = _entries(captured, pool, progress)
        check_entries(entries, targets, limits)
        writer = _Writer(repository, targets, entries, progress)
        writer.write(pool)
    head = Head(
        key=key_of(document),
        document=document,
        targets=tuple(Target(shown(name), shown(path)) for name, path in targets),
        created_ns=time.time_ns(),
        packs=tuple(writer.packs),
        distributions=installed_in(targets),
        install_s=round(captured.install_s, 3),
        stored_bytes=writer.stored_bytes,
        skipped=tuple(map(shown, captured.after.special)),
    )
    manifest = Manifest(
        head=head, entries=entries, contents=writer.places, frames=tuple(writer.packs.values())
    )
    if repository.publish(manifest):
        return manifest
    present = repository.manifest(head.key)
    if present is None:
        raise StateError(f"the manifest of {head.key} came and went; save again")
    return present


def _entries(captured: Captured, pool: ThreadPoolExecutor, progress: Progress) -> tuple[Entry, ...]:
    """Make the entries of a delta; files are hashed in parallel."""
    targets, delta, after = captured.targets, captured.delta, captured.after
    files = [place for place in delta.changed if after[place].kind is Kind.FILE]
    total, done = sum(after[place].size_bytes for place in files), 0
    digests = dict[tuple[int, str], bytes]()
    paths = (Path(targets[number].path) / path for number, path in files)
    for place, digest in zip(files, pool.map(file_digest, paths), strict=True):
        digests[place] = digest
        done += after[place].size_bytes
        progress("reading", done, total)
    entries = [Entry(number, path, Kind.DELETED) for number, path in delta.deleted]
    for place in delta.changed:
        number, path = place
        seen = after[place]
        link = str(Path(targets[number].path, path).readlink()) if seen.kind is Kind.LINK else ""
        mode = 0 if seen.kind is Kind.LINK else seen.mode & 0o777
        digest = digests.get(place, b"")
        entries.append(
            Entry(number, path, seen.kind, mode, seen.mtime_ns, seen.size_bytes, digest, link)
        )
    return tuple(sorted(entries, key=lambda entry: (entry.target, entry.path)))


class _Writer:
    """Writes the contents of entries into packs."""

    def __init__(
        self,
        repository: Repository,
        targets: Sequence[Target],
        entries: Sequence[Entry],
        progress: Progress,
    ) -> None:
        self._repository = repository
        self._progress = progress
        self._done = 0
        files = [entry for entry in entries if entry.kind is Kind.FILE]
        self._path_of = {e.digest: Path(targets[e.target].path) / e.path for e in files}
        self._size_of = {e.digest: e.size_bytes for e in files}
        # Compute it once, because it is reported with each of tens of thousands of files.
        self._total = sum(self._size_of.values())
        self.places: dict[bytes, PackPlace] = {}
        self.packs: dict[str, tuple[Frame, ...]] = {}
        self.stored_bytes = 0

    def write(self, pool: ThreadPoolExecutor) -> None:
        """Find the contents that the store has, and write the others."""
        # An empty content needs no place, so a snapshot of empty files has no pack.
        empty = (digest for digest, size in self._size_of.items() if size == 0)
        self.places = dict.fromkeys(empty, PackPlace(0, 0, 0))
        known = self._repository.known_contents(self._path_of.keys() - self.places.keys())
        for digest, found in known.items():
            # If a manifest claims another size for the digest, it is wrong, and our content is written.
            if found.size_bytes == self._size_of[digest]:
                self._place(digest, found.pack, found.frames, found.offset)
        # Adjacent files of one kind compress better.
        rest = sorted(
            self._path_of.keys() - self.places.keys(),
            key=lambda digest: (self._path_of[digest].suffix, self._path_of[digest]),
        )
        for batch in self._batches(rest):
            pieces = (piece for digest in batch for piece in self._pieces(digest))
            name, frames, stored = self._repository.write_pack(pieces, pool)
            at = 0
            for digest in batch:
                self._place(digest, name, frames, at)
                at += self._size_of[digest]
            self.stored_bytes += stored

    def _place(self, digest: bytes, pack: str, frames: tuple[Frame, ...], offset: int) -> None:
        self.packs[pack] = frames
        number = list(self.packs).index(pack)
        self.places[digest] = PackPlace(number, offset, self._size_of[digest])

    def _batches(self, digests: Sequence[bytes]) -> Iterator[list[bytes]]:
        batch, held = list[bytes](), 0
        for digest in digests:
            batch.append(digest)
            held += self._size_of[digest]
            if held >= PACK_RAW_BYTES:
                yield batch
                batch, held = [], 0
        if batch:
            yield batch

    def _pieces(self, digest: bytes) -> Iterator[bytes]:
        """Read a file again, and check that it did not change since it was hashed."""
        path, total = self._path_of[digest], hashlib.sha256()
        with path.open("rb") as file:
            while piece := file.read(_PIECE_BYTES):
                total.update(piece)
                yield piece
                self._done += len(piece)
                self._progress("packing", self._done, self._total)
        if total.digest() != digest:
            raise StateError(f"{path} changed while it was saved; end what writes it, save again")


def _leave_out_byte_code(before: Scan, after: Scan) -> None:
    """Remove byte code that can be compiled again from a scan: new byte code whose source is in the scan."""
    folders = set[Place]()
    for number, path in after.keys() - before.keys():
        folder, _, name = path.rpartition("/")
        above, _, cache = folder.rpartition("/")
        source = f"{above}/{name.partition('.')[0]}.py".lstrip("/")
        if cache == "__pycache__" and name.endswith(".pyc") and (number, source) in after:
            del after[number, path]
            folders.add((number, folder))
    held = {(number, path.rpartition("/")[0]) for number, path in after}
    for place in folders - held - before.keys():
        del after[place]


def _sources_of(
    interpreter: Interpreter, targets: Sequence[Target], before: Scan, after: Scan
) -> list[str]:
    """Return the paths to compile: new directories with sources, and changed sources in old directories."""
    found: dict[str, None] = {}
    for number, path in difference(before, after).changed:
        if not path.endswith(".py") or targets[number].path == interpreter.scripts:
            continue
        parts = path.split("/")
        # Do not look at folders that existed before: an image that is read lazily would fetch them over the network.
        above = ("/".join(parts[:depth]) for depth in range(1, len(parts)))
        new = next((folder for folder in above if (number, folder) not in before), path)
        found[f"{targets[number].path}/{new}"] = None
    return list(found)


def _compile(interpreter: Interpreter, sources: Sequence[str]) -> None:
    """Compile files and directories to byte code; sources that cannot be compiled are left alone."""
    listed = "".join(f"{path}\n" for path in sources if "\n" not in path)
    if not listed:
        return
    words = [interpreter.executable, "-m", "compileall", "-qq", "-j", "0", "-i", "-"]
    try:
        done = subprocess.run(  # noqa: S603 -- the user's own interpreter
            words,
            check=False,
            input=os.fsencode(listed),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        if done.returncode != 0:
            _LOG.debug("some sources could not be compiled to byte code")
    except OSError as error:
        _LOG.warning("no byte code was added: %s", error)
