"""Recipes to operate a server: their options exist, their probes ask what is answered, their durations agree."""

import json
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from jaxpaged.config import EngineConfig
from jaxpaged.engine.observability.trace_export import CLOSING_SECONDS
from jaxpaged.engine.process.core_child import SECONDS_TO_END
from jaxpaged.engine.process.core_process import LAST_STEP_SECONDS
from jaxpaged.entrypoints.cli import command_line
from jaxpaged.entrypoints.cli.serve import split_options
from jaxpaged.entrypoints.http.health import OPEN_PATHS
from jaxpaged.entrypoints.http.server import ABORT_SECONDS
from jaxpaged.entrypoints.http.transport.listener import CLOSING_TIMEOUT
from jaxpaged.serving.options import ServerOptions

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "configs"
DOCKERFILE = CONFIGS / "container/Dockerfile"
OTHERS_FLAGS = {  # docker's, kubectl's, prometheus', ray's, systemctl's, useradd's, ...
    "--accelerator",
    "--address",
    "--autoscaling-config",
    "--cluster",
    "--command",
    "--config.file",
    "--device",
    "--disable-usage-stats",
    "--enable-autoscaling",
    "--fail",
    "--from",
    "--from-file",
    "--gid",
    "--gpus",
    "--group",
    "--head",
    "--header",
    "--home-dir",
    "--interval",
    "--literal",
    "--location",
    "--machine-type",
    "--max-nodes",
    "--max-time",
    "--min-nodes",
    "--network",
    "--no-create-home",
    "--no-install-recommends",
    "--now",
    "--port-forward",
    "--privileged",
    "--retries",
    "--rm",
    "--show-error",
    "--silent",
    "--start-period",
    "--stop-timeout",
    "--target",
    "--timeout",
    "--tmux",
    "--uid",
    "--user",
    "--user-group",
    "--worker",
    "--yes",
}
ENDING = ABORT_SECONDS + CLOSING_TIMEOUT + LAST_STEP_SECONDS + 1 + SECONDS_TO_END + CLOSING_SECONDS
"""What a server may need to end after `shutdown_timeout`, if everything takes as long as it may."""


# ---- reading


def unit() -> dict[str, list[str]]:
    """The settings of the systemd unit's service, each with its values in order."""
    settings: dict[str, list[str]] = {}
    section = ""
    for line in (CONFIGS / "systemd/jaxpaged.service").read_text(encoding="utf-8").splitlines():
        if line.startswith("["):
            section = line
        elif line and not line.startswith("#") and section == "[Service]":
            name, _, value = line.partition("=")
            settings.setdefault(name, []).append(value)
    return settings


def instructions() -> list[tuple[str, str]]:
    """(name, arguments) of the Dockerfile."""
    text = re.sub(r"^\s*#.*\n", "", DOCKERFILE.read_text(encoding="utf-8"), flags=re.M)
    lines = re.sub(r"\\\n\s*", " ", text).splitlines()
    return [tuple(line.split(maxsplit=1)) for line in lines if line]


def read(path: str):
    return yaml.safe_load((CONFIGS / path).read_text(encoding="utf-8"))


def deployment() -> dict:
    return read("kubernetes/cpu/deployment.yaml")


def container() -> dict:
    [only] = deployment()["spec"]["template"]["spec"]["containers"]
    return only


def container_on(kind: str) -> dict:
    """That of the Deployment as it is for "tpu" or "gpu"."""
    [only] = read(f"kubernetes/{kind}/patch.yaml")["spec"]["template"]["spec"]["containers"]
    return {**container(), **only}


def commands() -> Iterator[tuple[str, list[str]]]:
    """(where it stands, what follows `jaxpaged`)"""
    own_file = str(CONFIGS / "systemd/serve.yaml")
    [start] = unit()["ExecStart"]
    yield "systemd", [own_file if word == "/etc/jaxpaged/serve.yaml" else word for word in shlex.split(start)][1:]
    [in_image] = [json.loads(arguments) for name, arguments in instructions() if name == "CMD"]
    yield "container", in_image
    yield "kubernetes", container()["args"]
    yield "kubernetes on TPUs", container_on("tpu")["args"]
    yield "kubernetes on GPUs", container_on("gpu")["args"]


def options_of(arguments: list[str]) -> tuple[ServerOptions, EngineConfig]:
    """Raises SystemExit or ConfigError for what the command would refuse."""
    server, engine = split_options(command_line().parse_args(arguments))
    return ServerOptions.from_options(server), EngineConfig.from_options(**engine)


COMMANDS = dict(commands())


# ---- commands


@pytest.mark.parametrize("where", COMMANDS)
def test_the_command_is_one(where):
    server, engine = options_of(COMMANDS[where])
    assert server.port == 8000 and engine.model.model
    assert (server.host == "0.0.0.0") == (where != "systemd"), "a container is reached from outside of it"
    assert server.api_key == (), "a key in the arguments is in the list of processes"


@pytest.mark.parametrize("arguments", [["serve", "--prot", "1"], ["serve", "--shutdown-timeout", "soon"]])
def test_a_wrong_command_would_be_noticed(arguments, capsys):
    with pytest.raises(SystemExit):
        options_of(arguments)


def test_every_flag_that_is_named_anywhere_exists():
    parser = command_line()
    serve = next(action for action in parser._actions if action.dest == "command").choices["serve"]
    known = set(serve._option_string_actions) | OTHERS_FLAGS
    for path in CONFIGS.rglob("*"):
        if path.is_file():
            named = set(re.findall(r"(?<![\w-])--[a-z][a-z.-]*[a-z]", path.read_text(encoding="utf-8")))
            assert named <= known, f"{path.name} names {named - known}"


# ---- probes


def test_probes_ask_what_is_answered_without_a_key():
    """What each asks: http/health.py. With keys, every other path is refused."""
    from tests.entrypoints.http.live_server import live_server

    probes = {name: container()[f"{name}Probe"] for name in ("startup", "liveness", "readiness")}
    assert {name: probe["httpGet"]["path"] for name, probe in probes.items()} == {
        "startup": "/startup",
        "liveness": "/health",
        "readiness": "/ready",
    }
    [check] = [json.loads(arguments.split("CMD ")[1]) for name, arguments in instructions() if name == "HEALTHCHECK"]
    assert "http://127.0.0.1:8000/health" in check[2]
    ports = {port["name"]: port["containerPort"] for port in container()["ports"]}
    with live_server(keys=["secret"]) as (url, _):
        for probe in probes.values():
            assert ports[probe["httpGet"]["port"]] == 8000 and probe["httpGet"]["path"] in OPEN_PATHS
            assert status_of(url + probe["httpGet"]["path"]) == 200
        exec(check[2].replace("http://127.0.0.1:8000", url))
        assert status_of(f"{url}/metrics") == 401


def status_of(url):
    import urllib.error
    import urllib.request

    try:
        with urllib.request.urlopen(url, timeout=20) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code


def test_a_server_that_starts_is_given_minutes_and_one_that_heals_is_left_alone():
    startup, liveness, readiness = (container()[f"{name}Probe"] for name in ("startup", "liveness", "readiness"))
    assert startup["periodSeconds"] * startup["failureThreshold"] >= 900
    assert liveness["periodSeconds"] * liveness["failureThreshold"] >= 30
    assert readiness["failureThreshold"] == 1


# ---- durations


def test_nobody_kills_a_server_that_ends():
    server, _ = options_of(COMMANDS["systemd"])
    assert float(unit()["TimeoutStopSec"][0]) >= server.shutdown_timeout + ENDING
    pod = deployment()["spec"]["template"]["spec"]
    delay = container()["lifecycle"]["preStop"]["exec"]["command"]
    assert delay[0] == "sleep"
    for where in ("kubernetes", "kubernetes on TPUs", "kubernetes on GPUs"):
        server, _ = options_of(COMMANDS[where])
        assert pod["terminationGracePeriodSeconds"] >= float(delay[1]) + server.shutdown_timeout + ENDING
    server, _ = options_of(COMMANDS["container"])
    [advised] = re.findall(r"--stop-timeout (\d+)", DOCKERFILE.read_text(encoding="utf-8"))
    assert float(advised) >= server.shutdown_timeout + ENDING


def test_systemd_leaves_the_engines_process_to_the_server():
    settings = unit()
    assert settings["KillMode"] == ["mixed"] and settings["KillSignal"] == ["SIGTERM"]
    assert settings["OOMPolicy"] == ["continue"] and settings["Restart"] == ["on-failure"]
    assert "MemoryDenyWriteExecute" not in settings, "XLA writes machine code"


# ---- secrets and rights


def test_keys_come_from_where_they_are_kept():
    [credential] = unit()["LoadCredential"]
    name, _, path = credential.partition(":")
    server, _ = options_of(COMMANDS["systemd"])
    assert server.api_key_file == f"%d/{name}" and path.startswith("/etc/")
    [keys] = [each for each in deployment()["spec"]["template"]["spec"]["volumes"] if each["name"] == "api-keys"]
    [mount] = [each for each in container()["volumeMounts"] if each["name"] == "api-keys"]
    comment = (CONFIGS / "kubernetes/cpu/kustomization.yaml").read_text(encoding="utf-8")
    secret, key = re.search(r"create secret generic (\S+) --from-file=([\w-]+)=", comment).groups()
    assert keys["secret"]["secretName"] == secret and mount["readOnly"]
    for where in ("kubernetes", "kubernetes on TPUs", "kubernetes on GPUs"):
        assert options_of(COMMANDS[where])[0].api_key_file == f"{mount['mountPath']}/{key}"


def test_nobody_is_root_and_what_is_written_has_a_place():
    pod = deployment()["spec"]["template"]["spec"]["securityContext"]
    image_users = {arguments for name, arguments in instructions() if name == "USER"}
    assert pod["runAsNonRoot"] and image_users == {f"{pod['runAsUser']}:{pod['runAsGroup']}"}
    own = container()["securityContext"]
    assert own["readOnlyRootFilesystem"] and not own["allowPrivilegeEscalation"]
    assert own["capabilities"] == {"drop": ["ALL"]}
    writable = {mount["mountPath"] for mount in container()["volumeMounts"] if not mount.get("readOnly")}
    [folders] = [arguments for name, arguments in instructions() if name == "ENV" and "XDG_CACHE_HOME" in arguments]
    settings = dict(pair.split("=", 1) for pair in folders.split())
    assert writable == {"/cache", "/tmp"}
    assert all(settings[name].startswith("/cache") for name in ("HOME", "XDG_CACHE_HOME", "HF_HOME"))
    environment = dict(pair.split("=", 1) for pair in unit()["Environment"][0].split())
    assert unit()["CacheDirectory"] == ["jaxpaged"] and unit()["DynamicUser"] == ["yes"]
    assert all(environment[name].startswith("/var/cache/jaxpaged") for name in ("HOME", "XDG_CACHE_HOME", "HF_HOME"))


# ---- images


def test_the_image_is_made_of_files_and_extras_that_exist():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    stages, current = set(), ""
    sent = (DOCKERFILE.with_name("Dockerfile.dockerignore")).read_text(encoding="utf-8").splitlines()
    for name, arguments in instructions():
        if name == "FROM":
            base, _, stage = arguments.partition(" AS ")
            assert base in stages or base.startswith("python:3.12-"), f"{base} is no stage before {stage}"
            stages.add(stage)
            current = stage
        elif name == "COPY" and arguments.startswith("--from="):
            assert arguments.split()[0].removeprefix("--from=") in stages
        elif name == "COPY":
            for source in arguments.split()[:-1]:
                assert (ROOT / source).exists() and f"!{source}" in sent
        elif name == "RUN" and "pip install" in arguments:
            [extras] = re.findall(r'"\.\[([\w,-]+)\]"', arguments)
            assert set(extras.split(",")) <= set(project["optional-dependencies"]), f"in {current}"
    assert {"cpu", "tpu", "gpu"} <= stages
    assert sent[1] == "*", "nothing is sent but what is named"


# ---- what belongs together in Kubernetes


def test_the_parts_find_one_another():
    for folder in ("cpu", "tpu", "gpu"):
        for name in read(f"kubernetes/{folder}/kustomization.yaml")["resources"]:
            assert (CONFIGS / "kubernetes" / folder / name).exists()
        [image] = read(f"kubernetes/{folder}/kustomization.yaml")["images"]
        assert image["name"] == container()["image"] and image["newTag"] == folder
    template = deployment()["spec"]["template"]
    labels, ports = template["metadata"]["labels"], {port["name"] for port in container()["ports"]}
    service = read("kubernetes/cpu/service.yaml")["spec"]
    assert service["selector"] == labels == deployment()["spec"]["selector"]["matchLabels"]
    assert {port["targetPort"] for port in service["ports"]} == ports
    for kind in ("tpu", "gpu"):
        patch = read(f"kubernetes/{kind}/patch.yaml")
        assert patch["metadata"]["name"] == deployment()["metadata"]["name"]
        assert container_on(kind)["name"] == container()["name"]
    mounted = {mount["name"] for mount in container()["volumeMounts"]}
    assert mounted == {volume["name"] for volume in template["spec"]["volumes"]}


def test_one_engine_uses_all_chips_of_its_host():
    _, engine = options_of(COMMANDS["kubernetes on TPUs"])
    chips = container_on("tpu")["resources"]["limits"]["google.com/tpu"]
    selector = read("kubernetes/tpu/patch.yaml")["spec"]["template"]["spec"]["nodeSelector"]
    rows, columns = selector["cloud.google.com/gke-tpu-topology"].split("x")
    assert engine.parallel.tensor_parallel_size == int(chips) == int(rows) * int(columns)


def test_one_engine_uses_all_gpus_of_its_node():
    _, engine = options_of(COMMANDS["kubernetes on GPUs"])
    resources = container_on("gpu")["resources"]
    comment = (CONFIGS / "kubernetes/gpu/kustomization.yaml").read_text(encoding="utf-8")
    kind, count = re.search(r"type=([\w-]+),count=(\d+)", comment).groups()
    assert {str(engine.parallel.tensor_parallel_size), count} == {resources["limits"]["nvidia.com/gpu"]}
    pod = read("kubernetes/gpu/patch.yaml")["spec"]["template"]["spec"]
    assert pod["nodeSelector"] == {"cloud.google.com/gke-accelerator": kind}


def test_hosts_of_a_slice_run_one_command_and_only_the_first_serves():
    group = read("kubernetes/tpu-slice/leaderworkerset.yaml")["spec"]["leaderWorkerTemplate"]
    first, other = (group[f"{name}Template"]["spec"] for name in ("leader", "worker"))
    [server], [follower] = first["containers"], other["containers"]
    assert server["args"] == follower["args"] and {**first, "containers": 0} == {**other, "containers": 0}
    given = {"LWS_GROUP_SIZE": str(group["size"]), "LWS_WORKER_INDEX": "3", "LWS_LEADER_ADDRESS": "first.example"}
    arguments = [re.sub(r"\$\((\w+)\)", lambda name: given[name[1]], argument) for argument in server["args"]]
    options, engine = options_of(arguments)
    rows, columns = first["nodeSelector"]["cloud.google.com/gke-tpu-topology"].split("x")
    chips = int(server["resources"]["limits"]["google.com/tpu"])
    assert engine.parallel.tensor_parallel_size == group["size"] * chips == int(rows) * int(columns)
    assert (engine.parallel.nnodes, engine.parallel.node_rank, engine.parallel.master_addr) == (4, 3, "first.example")
    [mount] = [each for each in server["volumeMounts"] if each.get("readOnly")]
    files = {f"{mount['mountPath']}/{name}" for name in ("group", "api-keys")}
    assert {engine.parallel.group_secret_file, options.api_key_file} == files
    probes = ("startupProbe", "livenessProbe", "readinessProbe")
    assert not follower["ports"] and not any(follower[name] for name in probes)
    assert {server[name]["httpGet"]["path"] for name in probes} == {"/startup", "/health", "/ready"}
    service = read("kubernetes/cpu/service.yaml")["spec"]
    assert service["selector"] == group["leaderTemplate"]["metadata"]["labels"]
    assert service["selector"] != group["workerTemplate"]["metadata"]["labels"]


def test_prometheus_keeps_the_pods_of_the_deployment():
    [job] = read("prometheus/prometheus-kubernetes.yml")["scrape_configs"]
    kept = [rule for rule in job["relabel_configs"] if rule.get("action") == "keep"]
    name, port = (rule["regex"] for rule in kept)
    labels = deployment()["spec"]["template"]["metadata"]["labels"]
    assert labels["app.kubernetes.io/name"] == name and port in {each["name"] for each in container()["ports"]}
    [alone] = read("prometheus/prometheus.yml")["scrape_configs"]
    assert alone["job_name"] == job["job_name"] == "jaxpaged", "alert rules ask for that job"
