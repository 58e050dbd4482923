"""Files of the page on several hosts that no test can start here: what Kubernetes and Slurm are told is whole."""

import json
import re
import shlex

import pytest
import yaml

from omniload.mix.runtime import RuntimeConfig
from tests.docs.snippets import ROOT, blocks_of

BLOCKS = blocks_of(ROOT / "docs/how-to/running/several-hosts.md")
MANIFESTS = {
    keys["kind"]: keys
    for keys in (
        yaml.safe_load(block.text) for block in BLOCKS if block.text.startswith("apiVersion: ")
    )
}

REQUIRED = {
    "RayJob": {"entrypoint", "rayClusterSpec"},
    "rayClusterSpec": {"headGroupSpec", "workerGroupSpecs"},
    "headGroupSpec": {"rayStartParams", "template"},
    "workerGroupSpec": {"groupName", "rayStartParams", "template"},
    "PyTorchJob": {"pytorchReplicaSpecs"},
    "replica": {"replicas", "template"},
    "container": {"name", "image"},
}
"""Keys that an object has, in each version of KubeRay's and Kubeflow's v1: older ones ask for ``rayStartParams``."""
ALLOWED = {
    "RayJob": {"shutdownAfterJobFinishes", "ttlSecondsAfterFinished", "backoffLimit"},
    "rayClusterSpec": {"rayVersion", "enableInTreeAutoscaling"},
    "headGroupSpec": set(),
    "workerGroupSpec": {"replicas", "minReplicas", "maxReplicas", "numOfHosts"},
    "PyTorchJob": {"nprocPerNode"},
    "replica": {"restartPolicy"},
    "container": {"command", "resources", "volumeMounts", "env"},
}
"""Keys that it may have besides: an API server drops one that it does not know, unsaid."""
RAY_START = {"num-cpus", "num-gpus", "resources", "memory", "object-store-memory", "labels"}
"""Options of ``ray start`` that KubeRay leaves to the user."""


def require_keys(kind, found):
    assert REQUIRED[kind] <= found.keys() <= REQUIRED[kind] | ALLOWED[kind], kind


def require_pod(template):
    """Require that containers are named and every mount has a volume, with amounts that Kubernetes reads."""
    pod = template["spec"]
    assert pod.keys() <= {"containers", "volumes"}
    volumes = {volume["name"] for volume in pod.get("volumes", ())}
    for container in pod["containers"]:
        require_keys("container", container)
        mounts = [each["name"] for each in container.get("volumeMounts", ())]
        assert set(mounts) <= volumes
        for amount in container["resources"]["limits"].values():
            assert re.fullmatch(r"\d+(Mi|Gi)?", str(amount))


def groups():
    return MANIFESTS["RayJob"]["spec"]["rayClusterSpec"]["workerGroupSpecs"]


def test_the_rayjob_has_what_kuberay_asks_for_and_nothing_that_it_does_not_know():
    job = MANIFESTS["RayJob"]
    assert (job["apiVersion"], job.keys()) == (
        "ray.io/v1",
        {"apiVersion", "kind", "metadata", "spec"},
    )
    require_keys("RayJob", job["spec"])
    cluster = job["spec"]["rayClusterSpec"]
    require_keys("rayClusterSpec", cluster)
    require_keys("headGroupSpec", cluster["headGroupSpec"])
    for group in groups():
        require_keys("workerGroupSpec", group)
    for group in (cluster["headGroupSpec"], *groups()):
        told = group["rayStartParams"]
        # KubeRay's values are texts, and each is a word of a shell's command line.
        assert told.keys() <= RAY_START
        assert all(isinstance(value, str) for value in told.values())
        require_pod(group["template"])


def test_the_job_starts_as_many_ranks_on_as_many_hosts_as_it_has_gpus_for():
    resources = {group["groupName"]: group["rayStartParams"].get("resources") for group in groups()}
    hosts = next(group for group in groups() if group["groupName"] == "hosts")
    limits = hosts["template"]["spec"]["containers"][0]["resources"]["limits"]

    (told,) = shlex.split(resources["hosts"])
    assert json.loads(told) == {"ranks": limits["nvidia.com/gpu"]}
    assert resources["readers"] is None
    entrypoint = MANIFESTS["RayJob"]["spec"]["entrypoint"]
    assert entrypoint == f"python launch.py {hosts['replicas']}"


def test_the_readers_of_the_rayjob_are_nodes_that_the_loaders_of_its_mix_ask_for():
    page = (ROOT / "docs/how-to/running/several-hosts.md").read_text()
    (told,) = re.findall(r"`(place: \{loaders: .*?\}\})`", page)
    runtime = yaml.safe_load(told) | {"kind": "ray", "address": "auto"}
    place = RuntimeConfig.model_validate(runtime).place.loaders
    limits = {
        group["groupName"]: group["template"]["spec"]["containers"][0]["resources"]["limits"]
        for group in groups()
    }

    assert place.without_gpu
    assert "nvidia.com/gpu" in limits["hosts"]
    assert "nvidia.com/gpu" not in limits["readers"]
    assert limits["readers"]["cpu"] >= place.cpus


def test_the_pytorchjob_has_a_master_and_workers_as_the_training_operator_asks_for():
    job = MANIFESTS["PyTorchJob"]
    assert job["apiVersion"] == "kubeflow.org/v1"
    require_keys("PyTorchJob", job["spec"])
    specs = job["spec"]["pytorchReplicaSpecs"]
    assert specs.keys() == {"Master", "Worker"}
    for replica in specs.values():
        require_keys("replica", replica)
        require_pod(replica["template"])
        (container,) = replica["template"]["spec"]["containers"]
        assert container["name"] == "pytorch"  # by which the operator finds it
        assert job["spec"]["nprocPerNode"] == str(
            container["resources"]["limits"]["nvidia.com/gpu"]
        )
    assert specs["Master"]["replicas"] == 1


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("nodes", r"\d+"),
        ("ntasks-per-node", "1"),
        ("cpus-per-task", r"\d+"),
        ("gpus-per-node", r"\d+"),
    ],
)
def test_slurm_is_asked_for_one_task_a_node_which_starts_the_ranks_of_that_node(option, value):
    (script,) = (block.text for block in BLOCKS if block.text.startswith("#!/bin/bash"))

    assert re.search(rf"^#SBATCH --{option}={value}$", script, re.MULTILINE)
