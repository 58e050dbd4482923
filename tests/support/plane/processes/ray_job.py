"""A job in a running Ray, as Ray Train starts it: ranks are actors in placement groups that capture their children.

ray_job.py MIX FOLDER KEYWORDS      keywords of omniload.open as JSON; "bundles" are cores of each bundle, two at least,
                                    and "runtime_env" is that of the job; "beside" are those of a second loader,
                                    which is opened with the first batch and closed last

Prints the batches of its two ranks, the actors that existed meanwhile and afterwards, and the free resources of the
placement groups meanwhile.
"""

import json
import sys
import tempfile
from pathlib import Path

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

RANKS = 2


class Rank:
    """A rank in a bundle."""

    def run(self, number, mix, folder, keywords):
        """Take all batches; return them, and the processes that existed at the first one."""
        import omniload  # noqa: PLC0415 -- as a training function does

        beside, seen, there = keywords.pop("beside", None), [], {}
        others, seen_beside = None, []
        try:
            where = {"rank": number, "world_size": RANKS, "address": folder, "arrays": "numpy"}
            with omniload.open(mix, **where, **keywords) as loader:
                for batch in loader:
                    if beside is not None:
                        others = others or omniload.open(mix, **where, **keywords | beside)
                        if batch.step % 2 == 0:
                            seen_beside.append(taken(others.next_batch()))
                    seen.append(taken(batch))
                    there = there or {"free": ray.available_resources(), "actors": planes_actors()}
            # The second loader's plane continues, although the first loader has ended.
            if others is not None:
                seen_beside += [taken(batch) for batch in others]
                there["actors_beside"] = planes_actors()
                others.close()
        except omniload.OmniloadError as error:
            return {"error": type(error).__name__, "message": str(error)}
        stays = ray.is_initialized()
        return {"rank": number, "seen": seen, "beside": seen_beside, **there, "stays": stays}


def taken(batch):
    """Return a batch as JSON."""
    return [batch.step, batch.tokens.tolist()]


def planes_actors():
    """Return the names of actors of planes."""
    named = ray.util.list_named_actors(all_namespaces=True)
    return sorted(each["name"] for each in named if each["namespace"].startswith("omniload-"))


def main(mix, folder, keywords):
    bundles = [{"CPU": cores} for cores in keywords.pop("bundles", [1, 1])]
    env = keywords.pop("runtime_env", None)
    quiet = {"configure_logging": False, "log_to_driver": False}
    ray.init(namespace="of the trainer", runtime_env=env, **quiet)
    group = ray.util.placement_group(bundles)
    ray.get(group.ready(), timeout=60)
    ranks = [
        ray.remote(num_cpus=1)(Rank)
        .options(
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                group, placement_group_bundle_index=n, placement_group_capture_child_tasks=True
            )
        )
        .remote()
        for n in range(RANKS)
    ]
    told = ray.get([rank.run.remote(n, mix, folder, keywords) for n, rank in enumerate(ranks)])
    there = Path(tempfile.gettempdir()).glob("omniload-ray-*")
    left = {"left": planes_actors(), "group": group.id.hex(), "folders": [f.name for f in there]}
    sys.stdout.write(json.dumps({"ranks": told} | left) + "\n")


main(*sys.argv[1:3], json.loads(sys.argv[3]))
