"""Putting content at a path: what it replaces is found, and its manifest written, while its objects close."""

from collections.abc import Callable, Iterable, Sequence

from fusefs.attributes import Attributes, encoded, manifest_for
from fusefs.catalog import Catalog
from fusefs.keeper import ObjectKeeper
from fusefs.manifest import Manifest
from fusefs.stores.protocol import Entry, Store
from fusefs.writing import Content, may_be_plain
from omniload.base.errors import IntegrityError, OmniloadError
from omniload.base.log import get_logger

__all__ = ["Publisher"]

_LOG = get_logger(__name__)


class Publisher:
    """Publishes files of one store. Blocking and safe in threads.

    Args:
        store: Where to.
        catalog: Reads what is replaced.
        keeper: Removes the objects of what is replaced.
    """

    def __init__(self, store: Store, catalog: Catalog, keeper: ObjectKeeper) -> None:
        self._store = store
        self._catalog = catalog
        self._keeper = keeper

    def publish(
        self,
        path: str,
        content: Content,
        attributes: Attributes,
        *,
        ready: Callable[[], None] = lambda: None,
    ) -> bool:
        """Put content at a path, whole, and remove what it replaces.

        Args:
            path: Where.
            content: Its objects need not be durable yet.
            attributes: Beside it.
            ready: Returns when they are, just before the file shows; if it raises, nothing
                changes. May be called again.

        Returns:
            Whether nothing was at the path.
        """
        found: list[Entry | None] = []
        replaced: list[Manifest | None] = []

        def before(there: Entry | None) -> None:
            # A call that is repeated may find what the one before it has published.
            found.append(there)
            replaced.append(self._manifest_of(path, there))
            ready()

        data, kept = _stored(path, content, attributes)
        self._store.publish(path, data, before)
        self._catalog.doubt(path)
        self.remove_replaced(path, [known for known in replaced if known is not None], kept)
        return found[0] is None

    def replace(self, path: str, manifest: Manifest, over: Entry) -> bool:
        """Put a manifest in the place of one version; False where another is there by now, and stays."""

        def check(there: Entry | None) -> None:
            if there != over:
                raise _ReplacedError(path)

        try:
            self._store.publish(path, encoded(manifest, path), check)
        except _ReplacedError:
            return False
        finally:
            self._catalog.doubt(path)
        return True

    def remove_replaced(
        self, path: str, replaced: list[Manifest], kept: Iterable[str] = ()
    ) -> None:
        """Remove the objects of replaced versions, but for those that the path needs.

        Another mount may have built on a version in the moment before this one replaced it,
        and published over this one since.

        Args:
            path: Where they were.
            replaced: What each of them was.
            kept: Paths of objects that are needed, as is known without asking.
        """
        kept = set(kept)
        if all(kept.issuperset(manifest.object_paths()) for manifest in replaced):
            return
        try:
            now = self._catalog.version(path, self._store.stat(path))[1]
        except FileNotFoundError:
            now = None
        except (OSError, OmniloadError) as error:
            _LOG.info(
                "what %s replaced stays, since what it is now cannot be told: %s", path, error
            )
            return
        if now is not None:
            kept.update(now.object_paths())
        for manifest in replaced:
            self._keeper.condemn(manifest, kept)

    def _manifest_of(self, path: str, there: Entry | None) -> Manifest | None:
        """Return the manifest about to be replaced; a broken one names nothing we could remove."""
        if there is None:
            return None
        try:
            return self._catalog.version(path, there)[1]
        except (FileNotFoundError, IntegrityError, NotADirectoryError):
            return None


def _stored(path: str, content: Content, attributes: Attributes) -> tuple[bytes, Sequence[str]]:
    """Return what is stored at the path of some content, and the paths of the objects it names."""
    if isinstance(content, bytes) and attributes.are_default and may_be_plain([bytearray(content)]):
        return content, ()
    manifest = manifest_for(content, attributes)
    return encoded(manifest, path), manifest.object_paths()


class _ReplacedError(OSError):
    """Another version is at the path, or none."""
