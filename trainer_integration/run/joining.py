"""A rank among its peers: the process group, its share of the model, the rows that it shares."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from omniload.base.errors import ConfigError
from omniload.base.linux.network import interface_toward
from omniload.base.log import get_logger
from omniload.batch.microbatch import Batch, CpSlice
from omniload.batch.slices import whole_rows
from snapshot.startup.events import restarted, stage
from trainer_integration.config import TrainConfig
from trainer_integration.mixtral.folder import weights_of
from trainer_integration.moe.config import MoEConfig
from trainer_integration.moe.model import MoETransformer
from trainer_integration.moe.parallel.collectives import Peers
from trainer_integration.moe.parallel.ep_transport import chosen_transport
from trainer_integration.moe.parallel.process_groups import BACKENDS, ProcessGroups
from trainer_integration.moe.parallel.sharding import shard_over
from trainer_integration.moe.parallel.sp_attention import replicas_of, volume_ratio
from trainer_integration.run.rank_spec import RankSpec
from trainer_integration.vision.config import VisionConfig
from trainer_integration.vision.model import VisionLanguageModel

__all__ = ["built_model", "joined", "peer_loss", "whole_batch"]

_LOG = get_logger(__name__)
_TIMEOUT = timedelta(minutes=5)


@contextmanager
def joined(spec: RankSpec) -> Iterator[ProcessGroups]:
    """Join the ranks of this attempt; a single rank needs no group.

    They find each other through a store of rank 0: at a port of the launcher, or where torchrun's or Slurm's variables
    say.
    """
    parallel, device = spec.train.parallel, spec.train.device
    if device == "cuda":
        from trainer_integration.loader.torch_arrays import TorchArrays  # noqa: PLC0415 -- unused on a CPU

        number = _gpu_of(spec)
        TorchArrays().check(f"cuda:{number}")
        # Before any allocation or join. Otherwise every rank would use the first GPU of the host for both.
        torch.cuda.set_device(number)
    if parallel.num_ranks == 1:
        yield ProcessGroups()
        return
    with stage("process_group", restarted(spec.attempt)):
        dist.init_process_group(
            BACKENDS[device],
            store=_store(spec),
            rank=spec.rank,
            world_size=parallel.num_ranks,
            timeout=_TIMEOUT,
        )
    try:
        yield ProcessGroups.of(parallel.dp, parallel.sp, device)
    finally:
        dist.destroy_process_group()


def peer_loss(error: RuntimeError) -> str | None:
    """Return torch's message about a peer that has ended; ``None`` for an error of another kind."""
    first = str(error).splitlines()[0] if str(error) else type(error).__name__
    # Gloo raises plain errors, which only their text distinguishes from others.
    return first if isinstance(error, dist.DistError) or "gloo/transport" in str(error) else None


def _gpu_of(spec: RankSpec) -> int:
    """Return the number of this rank on its host: our launcher has one host, others set it in variables."""
    found = os.environ.get("LOCAL_RANK") or os.environ.get("SLURM_LOCALID") or ""
    told = spec.launcher_pid is None and found.isascii() and found.isdigit()
    return int(found) if told else spec.rank


def _store(spec: RankSpec) -> Store:
    if spec.store_port is None:
        # Gloo looks for its interface by the host's own name, which need not lead to the other hosts.
        toward = interface_toward(os.environ.get("MASTER_ADDR", ""))
        if toward is not None:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", toward)
        ranks = spec.train.parallel.num_ranks
        found: Store = next(iter(rendezvous("env://", spec.rank, ranks, timeout=_TIMEOUT)))[0]
        # torchrun's store may outlive a start of the job, and keep the addresses of ranks that are gone.
        return PrefixStore(f"omniload/train/{spec.attempt}", found)
    # Ranks of our launcher are on one host, and communicate over loopback, whatever its interfaces are called.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    return TCPStore(
        "127.0.0.1",
        spec.store_port,
        # Rank 0 was given the socket; the others can connect to it as soon as the launcher has bound it.
        is_master=spec.store_fd is not None,
        master_listen_fd=spec.store_fd,
        timeout=_TIMEOUT,
        wait_for_workers=False,
    )


def built_model(
    train: TrainConfig,
    config: MoEConfig,
    groups: ProcessGroups,
    vision: VisionConfig | None = None,
    weights: Path | None = None,
) -> MoETransformer:
    """Build this rank's share of the model on its device, with an encoder of images if ``vision`` describes one.

    Args:
        train: Mesh, device and seed.
        config: The model's shape.
        groups: The ranks.
        vision: The encoder's shape; ``None`` without images.
        weights: Folder of a Mixtral to begin with; ``None`` draws weights, by the seed.

    Raises:
        ConfigError: The device is a GPU and there is none.
        IntegrityError: A file of the weights is not of its format.
        StateError: A file of the weights, or one of the weights, is missing.
    """
    if train.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device is cuda and this process sees no GPU; set device to cpu")
    size, heads, kv_heads = train.parallel.sp, config.num_heads, config.num_kv_heads
    if (replicas := replicas_of(kv_heads, size)) > 1:
        _LOG.warning(
            "num_kv_heads %d, sp %d: %d ranks hold each KV head, and attention sends %.2f times as much as with a "
            "head for each rank",
            *(kv_heads, size, replicas, volume_ratio(heads, kv_heads, size)),
        )
    assert not isinstance(train.parallel.crossover, str), "the launch has read the file"
    transport = chosen_transport(
        train.parallel.transport, config.top_k, size, train.parallel.crossover
    )
    mesh = groups.mesh if train.parallel.is_sharded else None
    # No rank needs memory for a whole model of which it keeps a part.
    dtype = torch.bfloat16 if train.dtype == "bf16" else None
    model: MoETransformer
    with nullcontext() if mesh is None else torch.device("meta"):
        if vision is None:
            model = MoETransformer(
                config, seed=train.seed, peers=groups.sp, transport=transport, dtype=dtype
            )
        else:
            model = VisionLanguageModel(
                config, vision, seed=train.seed, dp_peers=groups.dp_peers, dtype=dtype
            )
    if mesh is None:
        model = model.to(train.device)
    else:
        # Cut while it is on ``meta``, so that only this rank's part is allocated afterwards.
        shard_over(model, mesh["dp"])
        model.to_empty(device=train.device)
        model.draw_weights(train.seed)
    if weights is not None:
        model.take_weights(weights_of(weights, config))
    return model


def whole_batch(batch: Batch, peers: Peers) -> Batch:
    """Assemble the rows of a batch from the slices of all peers; every peer calls it."""
    found = []
    for piece in batch.microbatches:
        assert isinstance(piece, CpSlice), "peers share rows"
        # Copies, because the plane's arrays are read-only, and torch warns of such memory.
        own = torch.stack([torch.from_numpy(x.copy()) for x in (piece.tokens_RC, piece.labels_RC)])
        of_all = peers.gather(own, "digest").view(peers.size, *own.shape).numpy()
        aligned = {}
        for name, values in piece.aligned_RC.items():
            # As bytes, because not every transport between ranks supports every type of number.
            sent = torch.from_numpy(values.copy()).view(torch.uint8)
            made = peers.gather(sent, "digest").view(peers.size, *sent.shape).numpy()
            aligned[name] = made.view(values.dtype)
        found.append(whole_rows(piece, of_all[:, 0], of_all[:, 1], aligned))
    return replace(batch, microbatches=tuple(found))
