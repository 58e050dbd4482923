"""Images for containers of other programs: Podman and containerd."""

import os

# No forked child here uses gRPC, and its fork handlers keep other users of fork in the same process (such as
# Ray's client) from noticing events that they wait for.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
