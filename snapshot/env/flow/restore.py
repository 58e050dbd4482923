"""Restoring a snapshot into an environment: mounted, linked or copied, depending on what this machine can do."""

import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from omniload.base.errors import IntegrityError, OmniloadError, StateError, UnavailableError
from omniload.base.log import get_logger
from snapshot.env.flow.forms import (
    RequestedForm,
    form_to_put_back,
    forms_of,
    is_refusal,
    kept_by,
    mounts_first,
)
from snapshot.env.format.entries import Limits
from snapshot.env.key.interpreter import base_of, installed_in
from snapshot.env.key.keys import Installation, key_of
from snapshot.env.node.cache import NodeCache, together
from snapshot.env.node.overlay import mount_overlay
from snapshot.env.node.tree import Tree, boot_id
from snapshot.env.store.access import StoreMissingError
from snapshot.env.store.progress import Progress
from snapshot.env.target.environment import Environment
from snapshot.env.target.records import Form, Record

# Other imports are lazy, because a mount is finished before they would be loaded.
if TYPE_CHECKING:
    from snapshot.env.store.repository import Repository

__all__ = ["Restored", "Restorer"]

_LOG = get_logger(__name__)
# Each try fetches the whole snapshot; if it breaks this often, the cause is still active.
_TRIES = 5
# Time that the check for rot adds to a restore by links; ``env prune --verify`` checks everything.
_SAMPLE_S = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """The result of a restore."""

    key: str
    form: Form
    already: bool = False
    """Whether the environment already held the snapshot."""
    saved: bool = False
    """Whether the installation that had to be run was saved."""
    raw_bytes: int = 0
    stored_bytes: int = 0
    """Bytes read from the store."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Seconds of each stage: fetch, place, install, save."""


@dataclass(slots=True)
class Restorer:
    """Restores into one environment from one store through one node cache."""

    environment: Environment
    cache: NodeCache
    opened: "Callable[[], AbstractContextManager[Repository]]"
    """Opens the store; called only when the node does not have the snapshot."""
    limits: Limits = field(default_factory=Limits)
    progress: Progress = lambda *_: None

    def restore(self, key: str, requested: RequestedForm = "auto") -> Restored | None:
        """Make the environment hold the snapshot of ``key``.

        Returns:
            The result; ``None`` if there is no such snapshot.

        Raises:
            IntegrityError: The snapshot is damaged or hostile; nothing was changed.
            StateError: The snapshot does not fit, or the environment cannot be cleared.
            UnavailableError: The store does not answer, or ``mount`` was requested and is impossible.
        """
        with self.environment.locked():
            return self._restore(key, requested)

    def restore_or_install(
        self, installation: Installation, image: str, requested: RequestedForm = "auto"
    ) -> Restored:
        """Restore the snapshot of an installation; if there is none, install and save one.

        If the store does not answer or does not exist, the environment must start nevertheless: the command is
        run, and nothing is saved. Damage is never ignored.

        Raises:
            StateError: The command failed.
            IntegrityError: The snapshot is damaged or hostile.
        """
        with self.environment.locked():
            document = self.environment.document(installation, image)
            key, reachable = key_of(document), True
            try:
                restored = self._restore(key, requested)
                if restored is not None:
                    return restored
            except (UnavailableError, StoreMissingError) as error:
                if self.cache.tree(key) is not None:
                    raise  # the snapshot is here, but the form is impossible
                _LOG.warning("%s; the command is run, and nothing is saved", error)
                reachable = False
            return self._install(document, installation, record=reachable)

    def _restore(self, key: str, requested: RequestedForm) -> Restored | None:
        begin, read = time.monotonic(), 0
        mounted_first = mounts_first(requested, is_root=os.geteuid() == 0)
        record = self.environment.heal()
        if kept_by(record, key, requested) == "as it is":
            return Restored(key=key, form="mount", already=True)
        # The lock is free between a fetch and its use, so another process may prune or verify the tree away.
        for _ in range(_TRIES):
            with together(self.cache.lock(key)):
                tree = self.cache.tree(key)
                with suppress(_RottedError):
                    if tree is not None and (mounted_first or self._is_sound(tree)):
                        return self._take(tree, record, requested, begin=begin, read=read)
            if tree is not None:
                # it may have been cleared before the damage was found
                record = self.environment.heal()
            from snapshot.env.node.extraction import provide  # noqa: PLC0415

            with self.opened() as repository:
                tree = provide(
                    self.cache,
                    repository,
                    key,
                    self.environment.targets,
                    fits=self.environment.check_fits,
                    limits=self.limits,
                    progress=self.progress,
                )
                read += repository.bytes_read
            if tree is None:
                return None
        raise StateError(
            f"{self.cache.folder} loses {key[:16]} as often as it is fetched ({_TRIES} times); end "
            "what writes into environments that are linked to it, or restore with --form copy"
        )

    def _is_sound(self, tree: Tree) -> bool:
        """Check a few files; after damage, all files are compared before the tree is used again.

        Raises:
            IntegrityError: The tree is damaged, and only another user can repair it.
        """
        path = tree.rotted_file(_SAMPLE_S)
        if path is None:
            return True
        found = f"{path} in {tree.folder} holds other bytes than were extracted, at the same size"
        try:
            tree.invalidate()
        except PermissionError as error:
            raise IntegrityError(f"{found}; its owner mends it by 'env prune --verify'") from error
        _LOG.warning("%s and time; the snapshot is fetched again", found)
        return False

    def _take(
        self,
        tree: Tree,
        record: Record | None,
        requested: RequestedForm,
        *,
        begin: float,
        read: int,
    ) -> Restored:
        """Place a tree whose lock is held, unless the environment holds it in a suitable form."""
        self.environment.check_fits(tree.head)
        tree.mark_used()
        fetched, key = time.monotonic(), tree.head.key
        keeps = kept_by(record, key, requested)
        if record is not None and keeps == "if sound" and self._holds(tree, record):
            return Restored(key=key, form=record.form, already=True, stored_bytes=read)
        base = self._cleared_base(record, tree)
        try:
            form = self._place(tree, key, requested, base)
        except UnavailableError:
            if (before := form_to_put_back(record, key)) is not None:
                # it held the snapshot before, and must hold it still
                self._place_as(before, tree, key, base)
            raise
        return Restored(
            key=key,
            form=form,
            raw_bytes=tree.head.raw_bytes,
            stored_bytes=read,
            seconds={"fetch": fetched - begin, "place": time.monotonic() - fetched},
        )

    def _cleared_base(self, record: Record | None, tree: Tree) -> dict[str, str]:
        """Clear the environment; return its content after that, in the form for its record."""
        if record is not None and record.form != "command":
            self.environment.clear(record)
            return record.base
        if record is not None and record.key == tree.head.key:
            # it was installed here, so the present content includes the snapshot itself
            return record.base
        made_in: dict[str, str] = tree.head.document["base"]
        now = base_of(made_in["image"], installed_in(self.environment.targets))
        if now.installed != made_in["installed"]:
            _LOG.warning(
                "%s holds other distributions than the environment in which %s was saved",
                self.environment.interpreter.prefix,
                tree.head.key[:16],
            )
        return now._asdict()

    def _holds(self, tree: Tree, record: Record) -> bool:
        """Return whether the environment still matches the record."""
        targets = [target.path for target in self.environment.targets]
        changed = tree.changed_files(digests=record.boot != boot_id(), roots=targets)
        if changed:
            _LOG.warning(
                "%s of %s is not as it was restored; it is restored again",
                changed[0] or "the folder",
                self.environment.interpreter.prefix,
            )
        return not changed

    def _place(self, tree: Tree, key: str, requested: RequestedForm, base: dict[str, str]) -> Form:
        *others, last = forms_of(requested)
        for form in others:
            try:
                self._place_as(form, tree, key, base)
            except (UnavailableError, OSError) as error:
                if not is_refusal(error):
                    raise
                _LOG.debug("not as %s: %s", form, error)
                if form == "mount" and not self._is_sound(tree):
                    raise _RottedError from error
            else:
                return form
        self._place_as(last, tree, key, base)
        return last

    def _place_as(self, form: Form, tree: Tree, key: str, base: dict[str, str]) -> None:
        environment = self.environment
        used = tree.head.used
        record = Record(
            action="apply",
            key=key,
            form=form,
            base=base,
            targets=tuple(t.path for t in environment.targets),
            boot=boot_id(),
        )
        if form != "mount":
            from snapshot.env.target.moves import apply  # noqa: PLC0415

            if form == "link":
                # Mark it first: a kill in between then causes an unnecessary check, rather than unjustified trust.
                tree.mark_linked()
            apply(environment.records, tree, environment.targets, record)
            return
        paths = [environment.targets[number].path for number in used]
        first = not tree.may_be_mounted
        # Mark it first, because a mounted tree without a mark could be removed under its readers.
        tree.mark_mounted()
        try:
            for number in used:
                mount_overlay(tree, number, environment.targets[number].path, key)
        except OmniloadError:
            environment.heal()  # the mounts made so far are not recorded
            if first:
                tree.mark_unmounted()
            raise
        # Last: mounts without a record are leftovers, which the next restore unmounts.
        environment.records.write("record", replace(record, targets=tuple(paths)))

    def _install(
        self, document: dict[str, Any], installation: Installation, *, record: bool
    ) -> Restored:
        from snapshot.env.flow.save import install, save  # noqa: PLC0415

        key, held = key_of(document), self.environment.heal()
        if held is not None and held.form == "command" and held.key == key:
            record = False  # it was installed here before, so there is no change to capture
        begin = time.monotonic()
        captured = install(self.environment, installation)
        seconds, saved = {"install": captured.install_s}, False
        if record and not captured.is_empty:
            try:
                with self.opened() as repository:
                    save(repository, captured, document, progress=self.progress)
                saved = True
            except (OmniloadError, OSError) as error:  # for example, the store is full
                # A start does not depend on the save.
                _LOG.warning("installed, but no snapshot was saved: %s", error)
            seconds["save"] = time.monotonic() - begin - captured.install_s
        if not captured.is_empty:
            # Note it even if nothing was saved, because the former content is part of the key.
            self.environment.note_installed(document)
        return Restored(key=key, form="command", saved=saved, seconds=seconds)


class _RottedError(Exception):
    """A mount is impossible, and a file that would be linked or copied instead is damaged."""
