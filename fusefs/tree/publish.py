"""Publishing of content: while its objects close, the replaced version is read, and the manifest written."""

import errno
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from fusefs.format.attributes import PLAIN_MODE, Attributes, encoded, manifest_for
from fusefs.format.content import Content, may_be_plain
from fusefs.format.manifest import Manifest
from fusefs.stores.protocol import Entry, Store
from fusefs.tree.catalog import Catalog, FileInfo, described
from fusefs.tree.object_references import ObjectReferences
from omniload.base.errors import IntegrityError, OmniloadError
from omniload.base.log import get_logger

__all__ = ["Published", "Publisher"]

_LOG = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Published:
    """The result of publishing at a path."""

    is_new: bool
    """Whether the path was free before."""
    info: FileInfo | None
    """Description of the new file; None if the store does not report what it took."""
    manifest: Manifest | None


class Publisher:
    """Publishes files of one store. Blocking and safe in threads.

    Args:
        store: The store to publish to.
        catalog: Reads the replaced versions.
        references: Removes the objects of replaced versions.
    """

    def __init__(self, store: Store, catalog: Catalog, references: ObjectReferences) -> None:
        self._store = store
        self._catalog = catalog
        self._references = references

    def publish(
        self,
        path: str,
        content: Content,
        attributes: Attributes,
        *,
        ready: Callable[[], None] = lambda: None,
    ) -> Published:
        """Put complete content at a path, and remove the version that it replaces.

        Args:
            path: Path of the file.
            content: Content; its objects need not be durable yet.
            attributes: Attributes of the file.
            ready: Returns when the objects are durable, just before the file shows; if it raises, nothing
                changes. May be called again.

        Returns:
            The version that is there now.
        """
        found: list[Entry | None] = []
        replaced: list[Manifest | None] = []

        def before(there: Entry | None) -> None:
            # A repeated call may find the version that an earlier attempt has published.
            found.append(there)
            replaced.append(self._manifest_of(path, there))
            # After the replaced version was read, so that both steps run while the objects close.
            ready()
            if manifest is not None:
                self._let_read(path, manifest, replaced[-1])

        manifest = _needed_manifest(content, attributes)
        data = content if isinstance(content, bytes) else b""
        data = data if manifest is None else encoded(manifest, path)
        entry = self._store.publish(path, data, before, _kept_mode(attributes.mode))
        self._catalog.invalidate(path)
        gone = [known for known in replaced if known is not None and known.segments]
        if gone or (manifest is not None and manifest.segments):
            # The new objects are durable now. Make the path that names them durable before the old objects are removed.
            self._store.sync(path)
        self.remove_replaced(path, gone, manifest.object_paths() if manifest is not None else ())
        info = described(entry, manifest) if entry is not None else None
        return Published(found[0] is None, info, manifest)

    def replace(
        self, path: str, manifest: Manifest, over: Entry, *, was: Manifest | None = None
    ) -> bool:
        """Replace one version by a manifest; return False if another version is there now, which stays.

        Args:
            path: Path of the file.
            manifest: The new manifest.
            over: Entry of the version to replace.
            was: Manifest of that version, if it has one.
        """

        def check(there: Entry | None) -> None:
            if there != over:
                raise _ReplacedError(path)
            self._let_read(path, manifest, was)

        try:
            self._store.publish(path, encoded(manifest, path), check, _kept_mode(manifest.mode))
        except _ReplacedError:
            return False
        finally:
            self._catalog.invalidate(path)
        return True

    def remove_replaced(
        self, path: str, replaced: list[Manifest], kept: Iterable[str] = ()
    ) -> None:
        """Remove the objects of replaced versions, except those that the path needs.

        Another mount may have built on a version in the moment before this mount replaced it,
        and may have published over the new version since.

        Args:
            path: Path of the versions.
            replaced: Manifest of each version.
            kept: Paths of objects that are known to be needed without asking the store.
        """
        kept = set(kept)
        if all(kept.issuperset(manifest.object_paths()) for manifest in replaced):
            return
        try:
            now = self._catalog.version(path, self._store.stat(path))[1]
        except FileNotFoundError:
            now = None
        except (OSError, OmniloadError) as error:
            _LOG.info("what %s replaced stays, since what it is now is not known: %s", path, error)
            return
        if now is not None:
            kept.update(now.object_paths())
        for manifest in replaced:
            self._references.release_or_defer(manifest, kept)

    def _let_read(self, path: str, manifest: Manifest, known: Manifest | None) -> None:
        """Give the objects of a file its mode, except objects that have it from the previous version."""
        if not self._store.keeps_modes or not manifest.segments:
            return
        # This saves a request for each object at every fsync of a growing file.
        same = known is not None and known.mode == manifest.mode
        done = set(known.object_paths()) if known is not None and same else set()
        for object_path in manifest.object_paths():
            if object_path not in done:
                try:
                    self._store.set_mode(object_path, _kept_mode(manifest.mode))
                except FileNotFoundError as error:
                    raise OSError(errno.ESTALE, "what it builds on was removed", path) from error

    def _manifest_of(self, path: str, there: Entry | None) -> Manifest | None:
        """Return the manifest to be replaced; a broken one names nothing that could be removed."""
        if there is None:
            return None
        try:
            return self._catalog.version(path, there)[1]
        except (FileNotFoundError, IntegrityError, NotADirectoryError):
            return None


def _needed_manifest(content: Content, attributes: Attributes) -> Manifest | None:
    """Return the manifest for some content; None if the content is stored as it is."""
    if isinstance(content, bytes) and attributes.are_default and may_be_plain([bytearray(content)]):
        return None
    return manifest_for(content, attributes)


def _kept_mode(mode: int | None) -> int | None:
    """Return a mode in the form that stores want: None for the default mode of files."""
    return None if mode == PLAIN_MODE else mode


class _ReplacedError(OSError):
    """The path has another version, or none."""
