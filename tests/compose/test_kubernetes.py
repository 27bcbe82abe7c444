"""The manifests are valid by Kubernetes' schemas, and their commands are Bridle's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

FOLDER = Path(__file__).parents[2] / "deploy" / "kubernetes"
VERSION = "1.33"
KUBERAY = "ray.io/v1"


def resources() -> dict[str, dict[str, Any]]:
    kustomization = yaml.safe_load((FOLDER / "kustomization.yaml").read_text())
    return {
        f"{name}:{document['kind']}": document
        for name in kustomization["resources"]
        for document in yaml.safe_load_all((FOLDER / name).read_text())
    }


RESOURCES = resources()
OURS = [name for name, one in RESOURCES.items() if one["apiVersion"] != KUBERAY]


def pods(value: Any) -> Iterator[dict[str, Any]]:
    """Every pod's specification in a resource."""
    if isinstance(value, dict):
        if "containers" in value:
            yield value
        for part in value.values():
            yield from pods(part)
    elif isinstance(value, list):
        for part in value:
            yield from pods(part)


ALL_PODS = [pod for one in RESOURCES.values() for pod in pods(one)]


@pytest.mark.parametrize("name", OURS)
def test_it_is_valid_by_kubernetes_own_schema(name: str) -> None:
    document = RESOURCES[name]
    kubernetes_validate.validate(document, VERSION, strict=True)
    if "spec" in document:
        wrong = document | {"spec": document["spec"] | {"replicsa": 3}}
        with pytest.raises(kubernetes_validate.ValidationError):
            kubernetes_validate.validate(wrong, VERSION, strict=True)


def test_the_pods_of_rays_resource_are_valid_as_pods() -> None:
    (ray,) = (one for one in RESOURCES.values() if one["apiVersion"] == KUBERAY)
    found = list(pods(ray))
    assert len(found) == 2
    for spec in found:
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, "spec": spec}
        kubernetes_validate.validate(pod, VERSION, strict=True)


def test_every_command_is_one_of_bridles_with_options_that_it_has(
    require_command: Callable[[list[str]], None],
) -> None:
    commands = [c["command"] for pod in ALL_PODS for c in pod["containers"] if "command" in c]
    assert len(commands) == 3
    for program, *arguments in commands:
        assert program == "bridle"
        require_command(arguments)


def test_no_pod_runs_as_root_or_may_become_it() -> None:
    assert len(ALL_PODS) == 5
    for pod in ALL_PODS:
        assert pod["securityContext"]["runAsNonRoot"] is True
        # KubeRay's autoscaler, which asks the cluster for more pods, runs in the head's.
        head = pod["containers"][0]["name"] == "head"
        assert pod["automountServiceAccountToken"] is head
        for container in pod["containers"]:
            security = container["securityContext"]
            assert security == {
                "allowPrivilegeEscalation": False,
                "capabilities": {"drop": ["ALL"]},
            }


def test_pods_of_sessions_hold_no_key_of_proxy_engine_or_store() -> None:
    (ray,) = (one for one in RESOURCES.values() if one["apiVersion"] == KUBERAY)
    for pod in pods(ray):
        for container in pod["containers"]:
            secrets = [each["valueFrom"]["secretKeyRef"] for each in container["env"][1:]]
            assert secrets == [{"name": "bridle-keys", "key": "ray"}]
