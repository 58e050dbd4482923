"""Settings of a mix as keywords, for editors and type checkers: by key, and by section and key.

The models in ``omniload.mix.config`` define the settings; a test compares this list with them.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict

__all__ = ["Settings"]


class Settings(TypedDict, total=False):
    """Keywords that override settings of a mix file; numbers may be written as there, such as ``"16Ki"``."""

    seed: int
    length: int | str
    overlong: Literal["split", "truncate", "drop", "refuse"]
    lookahead_rows: int | str
    pack_length: int | str
    pack_method: Literal["best_fit", "concat_and_split", "none"]
    pack_overlong: Literal["split", "truncate", "drop", "refuse"]
    pack_lookahead_rows: int | str
    tokens: int | str
    micro_tokens: int | str
    columns: Sequence[str]
    pipeline: Mapping[str, Any]
    batch_tokens: int | str
    batch_micro_tokens: int | str
    batch_columns: Sequence[str]
    batch_pipeline: Mapping[str, Any]
    strategy: str
    cost: str
    linear: float
    quadratic: float
    encoder_linear: float
    encoder_quadratic: float
    fit_every: int | str
    balance_strategy: str
    balance_cost: str
    balance_method: Literal["greedy_swap", "karmarkar_karp", "none"]
    balance_linear: float
    balance_quadratic: float
    balance_encoder_linear: float
    balance_encoder_quadratic: float
    balance_fit_every: int | str
    memory: int | str
    spill: str
    token_cache: Mapping[str, Any] | None
    shard_cache: Mapping[str, Any] | None
    readers: Mapping[str, int]
    loader_memory: int | str
    loader_spill: str
    loader_token_cache: Mapping[str, Any] | None
    loader_shard_cache: Mapping[str, Any] | None
    loader_readers: Mapping[str, int]
    kind: Literal["auto", "local", "ray"]
    prefetch_steps: int
    loaders: int
    scaling: Mapping[str, Any]
    shadows: int
    constructors: int
    elastic: bool
    keep: float | str
    lifetime: Literal["owned", "detached"]
    journal: str
    journal_steps: int
    place: Mapping[str, Any]
    env: Mapping[str, Any]
    bind: str
    ports: str
    metrics_port: int
    metrics_bind: str
    silent_after: float | str
    stuck_after: float | str
    batch_timeout: float | str
    runtime_kind: Literal["auto", "local", "ray"]
    runtime_prefetch_steps: int
    runtime_loaders: int
    runtime_scaling: Mapping[str, Any]
    runtime_shadows: int
    runtime_constructors: int
    runtime_elastic: bool
    runtime_keep: float | str
    runtime_lifetime: Literal["owned", "detached"]
    runtime_journal: str
    runtime_journal_steps: int
    runtime_address: str
    runtime_place: Mapping[str, Any]
    runtime_env: Mapping[str, Any]
    runtime_bind: str
    runtime_ports: str
    runtime_metrics_port: int
    runtime_metrics_bind: str
    runtime_silent_after: float | str
    runtime_stuck_after: float | str
    runtime_batch_timeout: float | str
