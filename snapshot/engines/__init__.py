"""Images under other programs' containers: Podman and containerd."""

import os

# gRPC is used by no forked child here, and its handlers of forks keep other users of fork in
# the same process (Ray's client, for one) from noticing what they wait for.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
