"""The files of `deploy/` by the tools that are made for them: `make test-deploy`.

shellcheck, hadolint, kubernetes-validate (Kubernetes' own schemas) from PyPI, in the environment
that this file is run in; KubeRay's CRDs from a clone (`KUBERAY_GIT`).
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
KUBERNETES = "1.34"
TAG = "v1.7.0"
"""KubeRay's release whose CRDs the manifest is held to."""
MANIFESTS = [m for m in yaml.safe_load_all((DEPLOY / "kuberay.yaml").read_text()) if m]


def run(*command: str | Path) -> None:
    tool = Path(sys.executable).with_name(str(command[0]))
    done = subprocess.run([tool, *command[1:]], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_slurm_script_passes_shellcheck() -> None:
    run("shellcheck", DEPLOY / "slurm.sh")


@pytest.mark.parametrize("name", ["Dockerfile", "Dockerfile.cpu"])
def test_dockerfiles_pass_hadolint(name: str) -> None:
    run("hadolint", DEPLOY / name)


def pods() -> Iterator[dict[str, Any]]:
    """Templates of Ray's pods, as pods."""
    for manifest in MANIFESTS:
        cluster = manifest.get("spec", {}).get("rayClusterSpec")
        groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]] if cluster else []
        for number, group in enumerate(groups):
            meta = {"name": f"pod-{number}", **group["template"].get("metadata", {})}
            yield {"apiVersion": "v1", "kind": "Pod", "metadata": meta} | {
                "spec": group["template"]["spec"]
            }


def test_core_objects_and_pods_fit_kubernetes_schemas() -> None:
    core = [m for m in MANIFESTS if m["apiVersion"] == "v1"]
    checked = [*core, *pods()]
    assert len(checked) == 5
    for manifest in checked:
        kubernetes_validate.validate(manifest, KUBERNETES, strict=True)


def test_the_job_fits_kuberays_own_schema() -> None:
    job = next(m for m in MANIFESTS if m["kind"] == "RayJob")
    path = f"{TAG}:ray-operator/config/crd/bases/ray.io_rayjobs.yaml"
    git = ("git", "-C", os.environ["KUBERAY_GIT"], "show", path)
    crd = yaml.safe_load(subprocess.run(git, capture_output=True, text=True, check=True).stdout)
    (version,) = [v for v in crd["spec"]["versions"] if f"ray.io/{v['name']}" == job["apiVersion"]]
    schema = closed(version["schema"]["openAPIV3Schema"])
    check = jsonschema.Draft202012Validator(schema)
    check.validate(job)
    job["spec"]["rayClusterSpec"]["workerGroupSpecs"][0]["replica"] = 4
    with pytest.raises(jsonschema.ValidationError, match="replica"):
        check.validate(job)


def closed(schema: Any) -> Any:
    """A CRD's structural schema as JSON schema that refuses fields that it does not name, as
    `kubectl --validate=strict` does."""
    if isinstance(schema, list):
        return [closed(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    made = {key: closed(value) for key, value in schema.items()}
    is_object = isinstance(made.get("properties"), dict) and made["properties"]
    is_open = "additionalProperties" in made or made.get("x-kubernetes-preserve-unknown-fields")
    if is_object and not is_open:
        made["additionalProperties"] = False
    if made.get("x-kubernetes-int-or-string"):
        made.pop("type", None)
    return made
