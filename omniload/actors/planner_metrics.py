"""What the planner's shell counts, and who may ask for it."""

from collections.abc import Callable, Sequence

from omniload.base.errors import ConfigError
from omniload.base.log import get_logger
from omniload.base.metrics import IMBALANCE_RATIO, SAMPLES_SKIPPED, TOKENS_PLANNED, serve
from omniload.mix.config import MixConfig
from omniload.plan.records import StepPlan

__all__ = ["count_skipped", "measure", "serve_metrics"]

_LOG = get_logger(__name__)


def count_skipped(name: str, skipped: int) -> None:
    """Count records of a source that were skipped by policy."""
    if skipped:
        SAMPLES_SKIPPED.labels(name).inc(skipped)
        _LOG.warning("source %s: skipped %d records that cannot be decoded", name, skipped)


def measure(plan: StepPlan, names: Sequence[str]) -> None:
    """Count what a plan holds of each source, and how even it is."""
    IMBALANCE_RATIO.set(plan.imbalance)
    for name, tokens in zip(names, plan.tokens_S, strict=True):
        TOKENS_PLANNED.labels(name).inc(tokens)


def serve_metrics(mix: MixConfig) -> Callable[[], None]:
    """Answer Prometheus from the planner's process, where the mix asks for it.

    Returns:
        A function that ends it.

    Raises:
        ConfigError: The port is taken.
    """
    port = mix.runtime.metrics_port
    if not port:
        return _nothing
    try:
        return serve(port)
    except OSError as error:
        raise ConfigError(
            f"runtime.metrics_port {port} cannot be used ({error.strerror}); choose another"
        ) from error


def _nothing() -> None:
    pass
