"""Events of invented start-ups."""

from snapshot.startup.events import StageEvent

NS = 1_000_000_000
EPOCH_NS = 1_795_000_000 * NS


def a_pair(stage, node, begin_s, end_s, **changes):
    """Return begin and end of one stage on one node; there is no end if ``end_s`` is ``None``."""
    on_end = {name: changes.pop(name) for name in ("bytes", "facts") if name in changes}
    known = {"job": "pretrain", "attempt": 0, "node": node, "stage": stage} | changes
    begin = StageEvent(event="begin", time_ns=EPOCH_NS + round(begin_s * NS), **known)
    if end_s is None:
        return [begin]
    end = StageEvent(event="end", time_ns=EPOCH_NS + round(end_s * NS), **known, **on_end)
    return [begin, end]


def a_start(nodes=("n1", "n2", "n3"), *, slow=None, environment_s=100.0, attempt=0, job="pretrain"):
    """Return a whole start: a queue, then every stage; the node ``slow`` takes 50 s more for packages.

    Times in seconds: queue 0-60, image 60-90, environment 90-190, process group to 192, model 192-202, checkpoint
    202-232, data 232-235, first step 235-240.
    """
    known = {"attempt": attempt, "job": job}
    events = a_pair("queue", "login", 0, 60, **known)
    ready = 90 + environment_s + (50 if slow else 0)
    for node in nodes:
        done = 90 + environment_s + (50 if node == slow else 0)
        events += a_pair("image", node, 60, 90, bytes={"registry": 1 << 30}, **known)
        events += a_pair("environment", node, 90, done, bytes={"store": 270 << 20}, **known)
        events += a_pair("process_group", node, done, ready + 2, **known)
        events += a_pair("model_build", node, ready + 2, ready + 12, **known)
        events += a_pair("checkpoint_load", node, ready + 12, ready + 42, **known)
        events += a_pair("data_plane", node, ready + 42, ready + 45, **known)
        events += a_pair("first_step", node, ready + 45, ready + 50, **known)
    return events


def write_events(path, events):
    """Write events into a file, in the format of their writers."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(event.line() for event in events), encoding="utf-8")
    return path


def write_nodes(folder, events):
    """Write events into a file for each node."""
    for node in sorted({event.node for event in events}):
        write_events(folder / f"{node}.jsonl", [e for e in events if e.node == node])
    return folder
