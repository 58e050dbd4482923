"""The pyfuse3 bridge: carries kernel requests to ``StripedFiles`` and ``Body``.

Who may suspend where: every handler runs on the mount's one trio loop. What memory
answers (attributes known for under a second, blocks in the cache, a write that fits the
window) is answered without suspending. Everything else awaits the store in a worker
thread, or the futures of the blocks it needs, which other requests may share. Nodes are
touched only on the loop, never in a thread, and never assumed unchanged across an await.
"""

import pyfuse3

from fusefs.bridge.attributes import AttributeRequests
from fusefs.bridge.content import ContentRequests
from fusefs.bridge.names import NameRequests

__all__ = ["FuseOperations"]


class FuseOperations(NameRequests, ContentRequests, AttributeRequests, pyfuse3.Operations):
    """One mount."""

    supports_dot_lookup = False
    enable_writeback_cache = False
    enable_acl = False
