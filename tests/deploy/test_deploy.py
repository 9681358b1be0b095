"""The files of `deploy/` without the network: schemas that are installed here, a shell that parses
the script, and commands that our own command line reads and that fit the machines of their file.

What needs more tools is `with_tools.py` (`make test-deploy`).
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import ray
import ray.autoscaler
import yaml

from stepwell.backends.engines import vllm
from stepwell.backends.engines.routes import TESTED
from stepwell.cli.main import command_parser
from stepwell.cluster.placement import Node, plan
from stepwell.config.load import load_config
from tests.helpers import reserved_port

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
DOCKERFILES = ["Dockerfile", "Dockerfile.cpu"]


@pytest.fixture(autouse=True)
def _from_the_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("STEPWELL_ADMIN_KEY", "k" * 32)


def text(name: str) -> str:
    return (DEPLOY / name).read_text()


def manifests() -> dict[str, Any]:
    return {m["kind"]: m for m in yaml.safe_load_all(text("kuberay.yaml")) if m}


def fits(command: str, nodes: list[Node]) -> None:
    """`command` is one of ours, its configuration holds, and every GPU of `nodes` gets a part."""
    program, *argv = shlex.split(command)
    assert program == "stepwell"
    args, rest = command_parser().parse_known_args(argv)
    config = load_config(args.config, [*args.overrides, *rest], here=False)
    planned = plan(config, nodes)
    assert sum(planned.bundles) == sum(node.gpus for node in nodes) > 0


def nodes_of(gpus: list[int]) -> list[Node]:
    return [Node(f"10.0.0.{k}", str(k), n, is_driver=not k) for k, n in enumerate(gpus)]


def test_the_ray_cluster_is_one_to_rays_own_schema_and_its_command_fits_it() -> None:
    cluster = yaml.safe_load(text("ray-cluster.yaml"))
    folder = Path(ray.autoscaler.__file__).parent
    schema = json.loads((folder / "ray-schema.json").read_text())
    jsonschema.validate(cluster, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(cluster | {"min_workers": 3}, schema)
    workers = len(cluster["provider"]["worker_ips"])
    (command,) = re.findall(r"ray exec .* '(stepwell train .*)'", text("ray-cluster.yaml"))
    fits(command, nodes_of([8] * (1 + workers)))
    assert cluster["docker"]["image"] == f"stepwell:{VERSION}"


def test_ray_itself_prepares_the_cluster() -> None:
    from ray.autoscaler._private.util import prepare_config, validate_config

    prepared = prepare_config(yaml.safe_load(text("ray-cluster.yaml")))
    validate_config(prepared)
    (node_type,) = prepared["available_node_types"].values()
    assert node_type["max_workers"] == 3


def test_the_job_on_kubernetes_trains_on_all_gpus_of_its_cluster(tmp_path: Path) -> None:
    found = manifests()
    job = found["RayJob"]["spec"]
    cluster = job["rayClusterSpec"]
    (group,) = cluster["workerGroupSpecs"]
    (worker,) = group["template"]["spec"]["containers"]
    gpus = int(worker["resources"]["limits"]["nvidia.com/gpu"])
    nodes = nodes_of([0, *[gpus] * group["replicas"]])
    mounts = cluster["headGroupSpec"]["template"]["spec"]["containers"][0]["volumeMounts"]
    (folder,) = [m["mountPath"] for m in mounts if m["name"] == "config"]
    (tmp_path / "run.yaml").write_text(found["ConfigMap"]["data"]["run.yaml"])
    assert f"{folder}/run.yaml" in job["entrypoint"]
    fits(job["entrypoint"].replace(folder, str(tmp_path)), nodes)
    images = {
        worker["image"],
        cluster["headGroupSpec"]["template"]["spec"]["containers"][0]["image"],
    }
    assert images == {f"stepwell:{VERSION}"}
    assert cluster["rayVersion"] == ray.__version__


def test_names_within_the_manifest_lead_somewhere() -> None:
    found = manifests()
    cluster = found["RayJob"]["spec"]["rayClusterSpec"]
    head = cluster["headGroupSpec"]["template"]
    assert found["Service"]["spec"]["selector"].items() <= head["metadata"]["labels"].items()
    ports = {p["containerPort"] for p in head["spec"]["containers"][0]["ports"]}
    assert {p["targetPort"] for p in found["Service"]["spec"]["ports"]} <= ports
    for template in (head, cluster["workerGroupSpecs"][0]["template"]):
        volumes = {v["name"] for v in template["spec"]["volumes"]}
        mounts = template["spec"]["containers"][0]["volumeMounts"]
        assert {m["name"] for m in mounts} == volumes
        claims = [
            v["persistentVolumeClaim"]["claimName"]
            for v in template["spec"]["volumes"]
            if "persistentVolumeClaim" in v
        ]
        assert claims == [found["PersistentVolumeClaim"]["metadata"]["name"]]
        (of_key,) = [
            e["valueFrom"]["secretKeyRef"]
            for e in template["spec"]["containers"][0]["env"]
            if "valueFrom" in e
        ]
        configs = [v["configMap"]["name"] for v in template["spec"]["volumes"] if "configMap" in v]
        assert configs == [found["ConfigMap"]["metadata"]["name"]]
        made = f"create secret generic {of_key['name']} --from-literal={of_key['key']}="
        assert made in text("kuberay.yaml")


@pytest.mark.parametrize("name", DOCKERFILES)
def test_images_pin_what_they_are_made_from_and_copy_what_is_here(name: str) -> None:
    lines = re.sub(r"\\\n", " ", text(name)).splitlines()
    (base,) = [line.split()[1] for line in lines if line.startswith("FROM ")]
    assert re.fullmatch(r"\S+:\d+\.\d+\.\d+-\S+", base), "a whole version"
    words = {line.split()[0] for line in lines if line.strip() and not line.startswith("#")}
    assert words <= {"FROM", "SHELL", "RUN", "ARG", "WORKDIR", "COPY", "ENV", "CMD"}
    assert "-c constraints.txt" in text(name)
    ignored = text(f"{name}.dockerignore").split()
    assert {".git", "runs", ".venv*"} <= {*ignored}
    assert "constraints.txt" not in ignored


@pytest.mark.parametrize("name", DOCKERFILES)
def test_images_have_the_programs_that_ray_calls_in_them(name: str) -> None:
    """`ray up`'s head starts the other nodes from its own container, `ray exec --tmux` the run; and
    a job of KubeRay is submitted to a dashboard, which Ray alone is without."""
    commands = re.sub(r"\\\n", " ", text(name))
    (packages,) = re.findall(r"apt-get install (.*?)&&", commands)
    assert {"openssh-client", "rsync", "tmux"} <= {*packages.split()}
    (installed,) = re.findall(r"/opt/stepwell/bin/pip install (.*?)&&", commands)
    assert "ray[default]" in shlex.split(installed)


def test_the_commands_beside_the_manifest_are_about_its_job() -> None:
    job = manifests()["RayJob"]["metadata"]["name"]
    commands = re.findall(r"^#   kubectl -n (\S+) (.*?)(?:   .*)?$", text("kuberay.yaml"), re.M)
    assert {namespace for namespace, _ in commands} == {"stepwell"}
    # The submitter, a Job of the RayJob's name, follows its log; the head's log has Ray's lines.
    # A RayJob that has ended stays, and to apply it again changes nothing.
    assert {f"logs -f job/{job}", f"delete rayjob {job}"} <= {command for _, command in commands}


def test_the_images_engine_is_the_tested_one_at_the_path_that_the_manifest_names() -> None:
    assert f"ARG ENGINE=sglang=={TESTED}" in text("Dockerfile")
    assert f"ENGINE=vllm=={vllm.TESTED}" in text("Dockerfile")
    engine = re.findall(r"python3 -m venv (/opt/engine)\b", text("Dockerfile"))
    assert f"engine: {{ python: {engine[0]}/bin/python }}" in text("kuberay.yaml")
    assert f"ray[default]=={ray.__version__}" in text("ray-cluster.yaml")


def test_the_slurm_script_is_bash_and_asks_for_what_its_run_uses() -> None:
    subprocess.run(["bash", "-n", DEPLOY / "slurm.sh"], check=True)
    options = dict(re.findall(r"^#SBATCH --([a-z-]+)=(\S+)$", text("slurm.sh"), re.MULTILINE))
    (command,) = re.findall(r"sbatch deploy/slurm\.sh (.*)", text("slurm.sh"))
    gpus = [int(options["gpus-per-node"])] * int(options["nodes"])
    fits(f"stepwell train {command} cluster.address=auto", nodes_of(gpus))
    assert options["ntasks-per-node"] == "1"


SRUN = """#!/bin/bash
# srun of one machine: the options away, the command here.
while [[ "$1" == --* ]]; do shift; done
exec "$@"
"""


@pytest.mark.long
@pytest.mark.timeout(400)
def test_the_slurm_script_trains_over_two_nodes_and_leaves_nothing(tmp_path: Path) -> None:
    """Slurm's two commands are of this machine alone: both its nodes are here."""
    for name, script in (
        ("srun", SRUN),
        ("scontrol", "#!/bin/bash\necho localhost\necho localhost\n"),
    ):
        (tmp_path / name).write_text(script)
        (tmp_path / name).chmod(0o755)
    held = reserved_port()
    environment = {
        **os.environ,
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "SLURM_JOB_NODELIST": "localhost[1-2]",
        "SLURM_JOB_ID": str(os.getpid()),
        "STEPWELL_VENV": str(Path(sys.executable).parents[1]),
        "STEPWELL_RAY_PORT": str(held.getsockname()[1]),
    }
    run = f"run.dir={tmp_path / 'run'}"
    keys = ("trainer.total_steps=1", "validation.before_train=false", "data.val.size=8")
    process = subprocess.Popen(
        ["bash", DEPLOY / "slurm.sh", "--config", "quickstart", run, *keys],
        env=environment,
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=300)
    finally:
        held.close()
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, output
    assert json.loads((tmp_path / "run/summary.json").read_text())["optimizer_steps"] == 1
    assert not list(tmp_path.glob(".stepwell-ray-*.token"))
