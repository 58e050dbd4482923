"""What a user may set about striping, caches and windows."""

from pathlib import PurePosixPath

from pydantic import Field

from fusefs.format.layout import StripeLayout
from fusefs.stores.protocol import Preferred
from omniload.base.config import StrictModel
from omniload.base.settings.quantities import Bytes

__all__ = ["DirectoryStriping", "DiskCacheConfig", "FilesConfig", "Striping"]

MiB = 1 << 20


class Striping(StrictModel):
    """How a file written from now on is dealt out. Existing files keep their own."""

    unit: Bytes = Field(default=MiB, ge=4096, le=64 * MiB)
    """Bytes of a stripe unit: what a checksum covers and the least that is read."""
    count: int | None = Field(default=None, ge=1, le=256)
    """Objects of a file, each read and written by a stream of its own; what suits the store if not given:
    1 on object stores, where parts of one object are read and uploaded side by side, else 4."""

    def layout(self, preferred: Preferred) -> StripeLayout:
        """The same as arithmetic wants it, for a store that prefers something."""
        return StripeLayout(self.unit, self.count or preferred.stripe_count)


class DirectoryStriping(Striping):
    """Striping of what lies below one directory."""

    path: str
    """Directory relative to the root of the store."""


class DiskCacheConfig(StrictModel):
    """Local copies of what was read, on a disk of this machine."""

    directory: str
    """Made if it is not there; belongs to one process at a time."""
    capacity: Bytes = Field(ge=MiB)
    """Most bytes on the disk."""


class FilesConfig(StrictModel):
    """Striping, memory and parallelism of one process's view of a store."""

    striping: Striping = Striping()
    """For every file no entry of ``directories`` covers."""
    directories: tuple[DirectoryStriping, ...] = ()
    """Exceptions by directory; the longest path that covers a file wins."""
    plain_limit: Bytes = Field(default=MiB, le=64 * MiB)
    """Files up to this many bytes are stored as they are."""
    cache: Bytes = Field(default=256 * MiB, ge=8 * MiB)
    """Most bytes of the block cache, blocks being fetched included."""
    disk_cache: DiskCacheConfig | None = None
    """Off unless given."""
    read_ahead: Bytes | None = Field(default=None, ge=0)
    """Most bytes fetched ahead of one offset stream; what suits the store if not given: 64 MiB on
    object stores, else 32 MiB."""
    longest_read: Bytes | None = Field(default=None, ge=4096)
    """Most bytes of one ranged read of an object; what suits the store if not given: 16 MiB on object
    stores, else 4 MiB, and at most an eighth of the cache, a 64th with a disk cache."""
    write_window: Bytes = Field(default=64 * MiB, ge=MiB)
    """Most bytes of full units on their way to the store, of all writers together."""
    read_streams: int = Field(default=16, ge=1, le=512)
    """Store reads in flight."""
    write_streams: int = Field(default=32, ge=1, le=512)
    """Store writes in flight."""

    def reading(self, preferred: Preferred) -> tuple[int, int]:
        """Return the longest read and the read-ahead, in bytes, for a store that prefers something."""
        # With a disk cache, the bytes of a read stay in memory outside the cache's cap until they are written.
        most = self.cache // (8 if self.disk_cache is None else 64)
        longest = self.longest_read or min(preferred.longest_read, most)
        ahead = preferred.read_ahead if self.read_ahead is None else self.read_ahead
        return longest, ahead

    def striping_of(self, path: str) -> Striping:
        """Return the striping for a new file at ``path``."""
        if not self.directories:
            return self.striping
        above = PurePosixPath(path)
        # Compare components: the folder "data" does not cover "database".
        covering = [d for d in self.directories if above.is_relative_to(d.path.strip("/") or ".")]
        return max(covering, key=lambda d: len(d.path.strip("/")), default=self.striping)
