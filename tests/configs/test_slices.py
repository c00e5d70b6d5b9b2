"""configs/ for TPU slices of several hosts: all hosts run one engine, and the first one serves.

`kubectl` knows the JobSet's own fields only in a cluster that has it, so what JobSet's documentation says of names and
variables is held here: pods are called JOBSET-JOB-0-INDEX.SUBDOMAIN, and their index is a variable of every container.
"""

import os
import re
import subprocess

import pytest
import yaml

from tests.configs.test_recipes import CONFIGS, options_of, read

START = CONFIGS / "tpu-vm/start"


def jobset() -> tuple[dict, dict]:
    """The JobSet and its service."""
    text = (CONFIGS / "kubernetes/tpu-slice/jobset.yaml").read_text(encoding="utf-8")
    return tuple(yaml.safe_load_all(text))


def test_the_pods_of_a_jobset_are_the_hosts_of_one_slice():
    jobs, service = jobset()
    [job] = jobs["spec"]["replicatedJobs"]
    count, template = job["template"]["spec"]["completions"], job["template"]["spec"]["template"]
    [server], selector = template["spec"]["containers"], template["spec"]["nodeSelector"]
    assert job["replicas"] == 1 and job["template"]["spec"] | {"template": 0} == {
        "completionMode": "Indexed",
        "completions": count,
        "parallelism": count,
        "backoffLimit": 0,
        "template": 0,
    }
    options, engine = options_of([arg.replace("$(JOB_COMPLETION_INDEX)", "3") for arg in server["args"]])
    rows, columns = selector["cloud.google.com/gke-tpu-topology"].split("x")
    chips = int(server["resources"]["limits"]["google.com/tpu"])
    assert engine.parallel.tensor_parallel_size == count * chips == int(rows) * int(columns)
    first = f"{jobs['metadata']['name']}-{job['name']}-0-0.{jobs['spec']['network']['subdomain']}"
    assert (engine.parallel.nnodes, engine.parallel.node_rank, engine.parallel.master_addr) == (count, 3, first)
    [mount] = [each for each in server["volumeMounts"] if each.get("readOnly")]
    files = {f"{mount['mountPath']}/{name}" for name in ("group", "api-keys")}
    assert {engine.parallel.group_secret_file, options.api_key_file} == files
    labels = template["metadata"]["labels"] | {"batch.kubernetes.io/job-completion-index": "0"}
    assert service["spec"]["selector"] == labels, "none but the first pod gets requests"
    assert service["metadata"]["name"] != jobs["spec"]["network"]["subdomain"], "JobSet makes a service of that name"


def test_a_jobset_and_a_leaderworkerset_start_the_same_engine():
    group = read("kubernetes/tpu-slice/leaderworkerset.yaml")["spec"]["leaderWorkerTemplate"]
    pod, [job] = group["leaderTemplate"]["spec"], jobset()[0]["spec"]["replicatedJobs"]
    own = job["template"]["spec"]["template"]["spec"]
    own_only, probes = {"restartPolicy"}, {"startupProbe", "livenessProbe", "readinessProbe", "args"}
    [server], [own_server] = pod.pop("containers"), own.pop("containers")
    assert pod == {name: value for name, value in own.items() if name not in own_only}
    assert all(own_server[name] == value for name, value in server.items() if name not in probes)
    differ = ("--nnodes", "--node-rank", "--master-addr")
    same = lambda args: [arg for arg in args if not arg.startswith(differ)]
    assert same(server["args"]) == same(own_server["args"])


@pytest.mark.parametrize("index", ["0", "1"])
def test_only_the_first_pods_readiness_is_the_servers(index, monkeypatch):
    [job] = jobset()[0]["spec"]["replicatedJobs"]
    [server] = job["template"]["spec"]["template"]["spec"]["containers"]
    [_, _, code] = server["readinessProbe"]["exec"]["command"]
    asked = []
    monkeypatch.setattr("urllib.request.urlopen", lambda url, timeout: asked.append(url))
    monkeypatch.setenv("JOB_COMPLETION_INDEX", index)
    exec(code)
    assert asked == (["http://127.0.0.1:8000/ready"] if index == "0" else [])


def started(tmp_path, answers, *arguments, files=("group", "api-keys")):
    """What the script says on a host whose metadata server gives these answers, and what it starts."""
    folder = tmp_path / "home of a user"
    folder.mkdir()
    (folder / "start").write_text(START.read_text(encoding="utf-8"), encoding="utf-8")
    for name in files:
        (folder / name).write_text("secret\n", encoding="utf-8")
    lines = [f"*/{name}) echo '{answer}' ;;" for name, answer in answers.items()]
    curl = ["#!/bin/sh", 'for url; do :; done; case "$url" in', *lines, "*) exit 22 ;; esac"]
    for name, text in {"curl": "\n".join(curl), "jaxpaged": '#!/bin/sh\nprintf "%s\\n" "$@"'}.items():
        (tmp_path / name).write_text(f"{text}\n", encoding="utf-8")
        (tmp_path / name).chmod(0o755)
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    command = ["bash", str(folder / "start"), *arguments]
    return folder, subprocess.run(command, env=environment, capture_output=True, text=True, timeout=30)


@pytest.mark.parametrize("form", ["unknown:unknown:{}", "{}"])
def test_every_host_of_a_slice_finds_its_place_and_the_first_host(tmp_path, form):
    """Metadata servers know two forms of the list (jax's `GceTpuCluster` reads the same two)."""
    hosts = ",".join(form.format(f"10.0.0.{i}") for i in (5, 9, 2, 7))
    answers = {"agent-worker-number": "2", "worker-network-endpoints": hosts}
    folder, done = started(tmp_path, answers, "Qwen/Qwen3-235B-A22B", "-tp", "16", "--quantization", "int8")
    assert done.returncode == 0, done.stderr
    options, engine = options_of(done.stdout.splitlines())
    assert engine.model.model == "Qwen/Qwen3-235B-A22B" and engine.parallel.tensor_parallel_size == 16
    assert (engine.parallel.nnodes, engine.parallel.node_rank, engine.parallel.master_addr) == (4, 2, "10.0.0.5")
    assert engine.parallel.group_secret_file == f"{folder}/group" and options.api_key_file == f"{folder}/api-keys"
    assert (folder / "group").stat().st_mode & 0o777 == 0o600
    [advised] = re.findall(r"bash start (.*)'", START.read_text(encoding="utf-8"))
    assert options_of(["serve", *advised.split()])[1].parallel.tensor_parallel_size == 16


def test_a_slice_of_one_host_needs_no_group(tmp_path):
    answers = {"agent-worker-number": "0", "worker-network-endpoints": "10.0.0.5"}
    _, done = started(tmp_path, answers, "demo")
    assert options_of(done.stdout.splitlines())[1].parallel.nnodes == 1


@pytest.mark.parametrize(
    ("answers", "arguments", "files", "says"),
    [
        ({}, ["demo"], ("group", "api-keys"), "does not say agent-worker-number; is it a TPU VM?"),
        ({"agent-worker-number": "0"}, ["demo"], ("group", "api-keys"), "does not say worker-network-endpoints"),
        ({}, [], ("group", "api-keys"), "usage: start MODEL"),
        ({}, ["demo"], ("api-keys",), "group is missing or empty"),
    ],
)
def test_a_host_that_cannot_start_says_why_and_starts_nothing(tmp_path, answers, arguments, files, says):
    _, done = started(tmp_path, answers, *arguments, files=files)
    assert done.returncode and says in done.stderr and not done.stdout
