"""Start-ups as JSON, for other programs."""

from dataclasses import asdict
from typing import Any

from snapshot.startup.attempts import Attempt, NodeStage, Stage
from snapshot.startup.difference import Difference

__all__ = ["VERSION", "attempt_json", "difference_json"]

VERSION = 1
"""Of the document; it changes when a key changes its meaning or goes."""


def attempt_json(attempt: Attempt) -> dict[str, Any]:
    """Return an attempt with every stage on every node. Times are seconds from its begin."""
    return {
        "job": attempt.job,
        "attempt": attempt.number,
        "begin_ns": attempt.begin_ns,
        "seconds": attempt.seconds,
        "between_s": attempt.between_s,
        "reached": attempt.reached,
        "job_s": attempt.job_s,
        "node_s": attempt.node_s,
        "held_node_s": attempt.held_node_s,
        "nodes": list(attempt.nodes),
        "bytes": dict(attempt.bytes),
        "offsets_s": dict(attempt.offsets_s),
        "moved_s": dict(attempt.moved_s),
        "doubt": None if attempt.doubt is None else asdict(attempt.doubt),
        "strays": attempt.strays,
        "backward": attempt.backward,
        "path": [
            {
                "stage": part.stage,
                "node": part.node,
                "begin_s": _seconds(part.begin_ns, attempt.begin_ns),
                "end_s": _seconds(part.end_ns, attempt.begin_ns),
            }
            for part in attempt.path
        ],
        "stages": [_stage_json(stage, attempt.begin_ns) for stage in attempt.stages],
    }


def difference_json(difference: Difference) -> dict[str, Any]:
    """Return what changed from one start to another, stage by stage."""
    explaining = difference.explaining
    return {
        "seconds": difference.seconds,
        "ratio": difference.ratio,
        "explaining": None if explaining is None else explaining.name,
        "explained": difference.explained,
        "stages": [
            {
                "stage": each.name,
                "path_before_s": each.path_before_s,
                "path_after_s": each.path_after_s,
                "path_s": each.path_s,
                "max_before_s": each.before and each.before.max_s,
                "max_after_s": each.after and each.after.max_s,
                "straggler_ratio_before": each.before and each.before.straggler_ratio,
                "straggler_ratio_after": each.after and each.after.straggler_ratio,
                "changed_bytes": dict(each.changed_bytes),
                "changed_facts": {name: list(pair) for name, pair in each.changed_facts.items()},
            }
            for each in difference.stages
        ],
    }


def _stage_json(stage: Stage, begin_ns: int) -> dict[str, Any]:
    return {
        "stage": stage.name,
        "median_s": stage.median_s,
        "max_s": stage.max_s,
        "straggler_ratio": stage.straggler_ratio,
        "slowest": stage.slowest,
        "lost_s": stage.lost_s,
        "waited_node_s": stage.waited_node_s,
        "path_s": stage.path_s,
        "bytes": dict(stage.bytes),
        "unfinished": list(stage.unfinished),
        "failed": list(stage.failed),
        "nodes": [_node_json(node, begin_ns) for node in stage.nodes],
    }


def _node_json(node: NodeStage, begin_ns: int) -> dict[str, Any]:
    return {
        "node": node.node,
        "begin_s": _seconds(node.begin_ns, begin_ns),
        "end_s": _seconds(node.end_ns, begin_ns),
        "seconds": node.seconds,
        "runs": len(node.runs),
        "bytes": dict(node.bytes),
        "facts": dict(node.facts),
    }


def _seconds(time_ns: int | None, begin_ns: int) -> float | None:
    return None if time_ns is None else (time_ns - begin_ns) / 1e9
