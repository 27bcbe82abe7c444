"""The templates of deploy/: pods by Kubernetes' own schemas, commands by what Bridle takes.

The custom resources' own fields are those of KubeRay's and JobSet's definitions, which no package
has; here stands what the templates rely on.
"""

from __future__ import annotations

import copy
import subprocess
from pathlib import Path
from typing import Any

import click
import kubernetes_validate
import pytest
import typer.main
import yaml

from bridle.cli.program import app

DEPLOY = Path(__file__).parents[2] / "deploy"
LATEST = kubernetes_validate.latest_version()


def loaded(name: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((DEPLOY / "kubernetes" / name).read_text())
    return found


def pods() -> list[dict[str, Any]]:
    """The pod templates of all manifests."""
    cluster, job = loaded("raycluster.yaml")["spec"], loaded("jobset.yaml")["spec"]
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    jobs = [each["template"]["spec"] for each in job["replicatedJobs"]]
    return [each["template"] for each in (*groups, *jobs)]


def valid(kind: str, version: str, spec: dict[str, Any]) -> None:
    document = {"apiVersion": version, "kind": kind, "metadata": {"name": "x"}, "spec": spec}
    kubernetes_validate.validate(document, LATEST, strict=True)


@pytest.mark.parametrize("template", pods())
def test_a_pod_is_valid_and_runs_without_privileges(template: dict[str, Any]) -> None:
    valid("Pod", "v1", template["spec"])
    for container in template["spec"]["containers"]:
        context = container["securityContext"]
        assert context["capabilities"] == {"drop": ["ALL"]}
        assert context["runAsNonRoot"]
        assert not context["allowPrivilegeEscalation"]
    broken = copy.deepcopy(template["spec"])
    broken["containers"][0]["comand"] = []
    with pytest.raises(kubernetes_validate.ValidationError):
        valid("Pod", "v1", broken)


def test_the_ranks_are_a_valid_indexed_job() -> None:
    for each in loaded("jobset.yaml")["spec"]["replicatedJobs"]:
        spec = each["template"]["spec"]
        valid("Job", "batch/v1", spec)
        assert spec["completionMode"] == "Indexed"
        assert spec["completions"] == spec["parallelism"]


def test_every_ray_pod_asks_for_the_token_and_agents_get_no_account() -> None:
    cluster = loaded("raycluster.yaml")
    assert (cluster["apiVersion"], cluster["kind"]) == ("ray.io/v1", "RayCluster")
    for template in pods():
        for container in template["spec"]["containers"]:
            given = {variable["name"]: variable for variable in container["env"]}
            assert given["RAY_AUTH_MODE"]["value"] == "token"
            assert given["RAY_AUTH_TOKEN"]["valueFrom"]["secretKeyRef"]["name"] == "bridle-ray"
    for group in cluster["spec"]["workerGroupSpecs"]:
        assert group["template"]["spec"]["automountServiceAccountToken"] is False


def trained_by(words: list[str]) -> None:
    """Raises for options that `bridle train` does not take."""
    group: Any = typer.main.get_command(app)
    _, train, rest = group.resolve_command(click.Context(group), words)
    assert train is not None
    train.make_context(train.name, rest)


def test_the_commands_are_those_that_train_takes(tmp_path: Path) -> None:
    (tmp_path / "run.toml").touch()
    (job,) = loaded("jobset.yaml")["spec"]["replicatedJobs"]
    (container,) = job["template"]["spec"]["template"]["spec"]["containers"]
    words = [
        word.replace("/runs/run.toml", f"{tmp_path}/run.toml") for word in container["command"]
    ]
    trained_by(words[words.index("bridle") + 1 :])

    script = (DEPLOY / "slurm" / "train.sbatch").read_text()
    subprocess.run(["bash", "-n", "-c", script], check=True)
    stands_in = f'srun() {{ printf "%s\\n" "$@"; }}; scontrol() {{ echo first; }}\n{script}'
    variables = {"SLURM_JOB_NODELIST": "first,second", "SLURM_NNODES": "2", "SLURM_JOB_ID": "7"}
    variables |= {"RUN_CONFIG": f"{tmp_path}/run.toml", "RUN_OUT": "out", "PATH": "/usr/bin:/bin"}
    done = subprocess.run(
        ["bash", "-c", stands_in], env=variables, capture_output=True, text=True, check=True
    )
    words = done.stdout.splitlines()
    assert "--rdzv-endpoint=first:29500" in words
    trained_by(words[words.index("bridle") + 1 :])
