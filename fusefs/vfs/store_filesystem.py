"""A store as the kernel bindings show it: carries requests to ``StripedFiles`` and ``OpenFile``.

Suspension: every handler runs on the mount's one thread. What memory answers
(attributes known for under a second, blocks in the cache, a write that fits the window) is
answered without suspending. Everything else awaits the store in a worker thread, or the
futures of the blocks it needs, which other requests may share. Nodes are touched only on
the mount's thread, never in a worker, and never assumed unchanged across an await.
"""

from fusefs.vfs.attributes import AttributeRequests
from fusefs.vfs.content import ContentRequests
from fusefs.vfs.names import NameRequests
from fusefs.vfs.state_transfer import Resuming

__all__ = ["StoreFileSystem"]


class StoreFileSystem(NameRequests, ContentRequests, AttributeRequests, Resuming):
    """One mount of a store."""

    hands_over_copies = True
