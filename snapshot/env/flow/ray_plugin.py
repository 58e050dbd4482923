"""Ray workers that find the packages of a snapshot, fetched once for each node.

Start the cluster with the plug-in named in its environment::

    export RAY_RUNTIME_ENV_PLUGINS='[{"class": "snapshot.env.flow.ray_plugin.EnvironmentPlugin"}]'

and name a snapshot where a task, an actor or a job is declared::

    runtime_env={"omniload_env": {"store": "hdfs://namenode:9000/envs", "key": "3f9a..."}}

Tasks with different snapshots share a node and its site-packages, so nothing is laid
over these: workers get the extracted tree in front of their module path. What a snapshot
deletes therefore stays visible to them, and its ``.pth`` files are not read.
"""

import asyncio
import logging
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ray._private.runtime_env.plugin import RuntimeEnvPlugin
from typing_extensions import override

from omniload.base.errors import StateError
from omniload.base.log import get_logger
from snapshot.env.node.cache import NodeCache
from snapshot.env.node.extraction import provide
from snapshot.env.node.tree import Tree
from snapshot.env.store.access import opened
from snapshot.env.target.environment import Environment, active_environment
from snapshot.startup.events import stage

__all__ = ["NAME", "EnvironmentPlugin", "worker_variables"]

NAME = "omniload_env"
_SCHEME = "omniload-env://"


class EnvironmentPlugin(RuntimeEnvPlugin):
    """Extracts a snapshot into the node cache before a worker starts, and shows it the tree."""

    name = NAME

    @staticmethod
    @override
    def validate(runtime_env_dict: Mapping[str, Any]) -> None:
        """Check what was declared.

        Raises:
            ValueError: It is not a store and a key.
        """
        given = runtime_env_dict[NAME]
        if not isinstance(given, Mapping) or set(given) != {"store", "key"}:
            raise ValueError(f"{NAME} is {given!r}; give it a store and a key, nothing else")
        key = given["key"]
        if not isinstance(key, str) or len(key) != 64 or not isinstance(given["store"], str):
            raise ValueError(
                f"{NAME}.key is {key!r}, not the 64 hexadecimal digits that save prints, "
                f"or store is no URL: {given['store']!r}"
            )

    @override
    def get_uris(self, runtime_env: Mapping[str, Any]) -> list[str]:
        """Return what Ray remembers a fetched snapshot by."""
        return [_SCHEME + runtime_env[NAME]["key"]]

    @override
    async def create(
        self,
        uri: str | None,
        runtime_env: Mapping[str, Any],
        context: Any,
        logger: logging.Logger,
    ) -> float:
        """Fetch the snapshot, in a thread: the agent has other workers to prepare.

        Returns:
            Bytes of the tree.
        """
        given = runtime_env[NAME]
        tree = await asyncio.to_thread(_fetched, given["store"], given["key"])
        logger.info("snapshot %s lies in %s", given["key"][:16], tree.folder)
        return float(tree.head.raw_bytes)

    @override
    def modify_context(
        self,
        uris: list[str],
        runtime_env: Mapping[str, Any],
        context: Any,
        logger: logging.Logger,
    ) -> None:
        """Put the tree in front of the worker's module path and programs."""
        key = runtime_env[NAME]["key"]
        tree = NodeCache().tree(key)
        if tree is None:
            raise StateError(f"snapshot {key[:16]} is no longer in the node cache; start again")
        environment = active_environment(sys.executable)
        context.env_vars.update(
            worker_variables(environment, tree, {**os.environ, **context.env_vars})
        )

    @override
    def delete_uri(self, uri: str, logger: logging.Logger) -> float:
        """Let Ray forget a snapshot; the tree stays, others on the node may use it."""
        return 0.0


def worker_variables(
    environment: Environment, tree: Tree, known: Mapping[str, str]
) -> dict[str, str]:
    """Return the variables that let a process find what lies in a tree; what ``known`` names comes after."""
    layers: dict[str, list[str]] = {"PATH": [], "PYTHONPATH": []}
    scripts = os.path.realpath(environment.interpreter.scripts)
    modules = {os.path.realpath(path) for path in environment.interpreter.targets} - {scripts}
    for number in tree.head.used:
        path = environment.targets[number].path
        if path == scripts:
            layers["PATH"].append(str(tree.layer(number)))
        elif path in modules:
            layers["PYTHONPATH"].append(str(tree.layer(number)))
    return {
        name: os.pathsep.join([*found, *filter(None, [known.get(name, "")])])
        for name, found in layers.items()
        if found
    }


def _fetched(url: str, key: str) -> Tree:
    environment, cache = active_environment(sys.executable), NodeCache()
    tree = cache.tree(key)
    if tree is None:
        with stage("environment") as tally, opened(url) as repository:
            tree = provide(cache, repository, key, environment.targets, fits=environment.check_fits)
            tally.add("store", repository.bytes_read)
            tally.note("packages", key)
    if tree is None:
        raise StateError(f"no snapshot {key} in {url}; save it first")
    environment.check_fits(tree.head)
    for number in tree.head.used:
        for path in Path(tree.layer(number)).glob("*.pth"):
            get_logger(__name__).warning("%s is not read by Ray workers", path.name)
    return tree
