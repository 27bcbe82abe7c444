"""The templates of training on many machines.

A JobSet's pods are checked by Kubernetes' own schemas, and the commands, Slurm's too, by what
Bridle takes.

No package has JobSet's own definition.
"""

from __future__ import annotations

import copy
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

DEPLOY = Path(__file__).parents[2] / "deploy"
LATEST = kubernetes_validate.latest_version()


def loaded(name: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((DEPLOY / "kubernetes" / name).read_text())
    return found


def pods() -> list[dict[str, Any]]:
    """The pod templates of the ranks."""
    jobs = loaded("jobset.yaml")["spec"]["replicatedJobs"]
    return [each["template"]["spec"]["template"] for each in jobs]


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


def test_the_commands_are_those_that_train_takes(
    require_command: Callable[[list[str]], None], tmp_path: Path
) -> None:
    (tmp_path / "run.toml").touch()
    (job,) = loaded("jobset.yaml")["spec"]["replicatedJobs"]
    (container,) = job["template"]["spec"]["template"]["spec"]["containers"]
    words = [
        word.replace("/runs/run.toml", f"{tmp_path}/run.toml") for word in container["command"]
    ]
    require_command(words[words.index("bridle") + 1 :])

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
    require_command(words[words.index("bridle") + 1 :])
