"""The cluster's files: checked against Kubernetes' own schemas, and what a promotion changes."""

from __future__ import annotations

import importlib.util
import io
import json
import re
import urllib.request
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from tuneserve.config import ServeSection
from tuneserve.release import vllm_command
from tuneserve.release.capacity import Capacity
from tuneserve.release.layout import layout
from tuneserve.release.model_files import ModelFacts

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
KUBERNETES = sorted((DEPLOY / "k8s").glob("*.yaml"))
HOME = "/var/lib/tuneserve"


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


def serving() -> dict[str, Any]:
    (found,) = [
        document
        for document in manifests()
        if document["kind"] == "Deployment" and document["metadata"]["name"] == "tuneserve-vllm"
    ]
    return found


def test_the_serving_deployment_is_ready_only_when_a_token_came_out() -> None:
    vllm = serving()
    pod = vllm["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    probe = container["readinessProbe"]["exec"]["command"][-1]
    compile(probe, "probe", "exec")
    assert "/v1/completions" in probe and '"max_tokens": 1' in probe
    assert vllm["spec"]["strategy"]["rollingUpdate"] == {"maxSurge": 1, "maxUnavailable": 0}
    startup = container["startupProbe"]
    assert startup["periodSeconds"] * startup["failureThreshold"] >= 900  # compiling takes minutes
    assert pod["terminationGracePeriodSeconds"] > ServeSection().drain_timeout_seconds + 10
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


MODEL = Path("/var/lib/tuneserve/store/quantized-1")


FACTS = ModelFacts(MODEL, 10**9, 1024, 4096, (2,), MODEL / "chat_template.jinja", True)


def proven(serve: ServeSection, room: Capacity, facts: ModelFacts = FACTS) -> list[str]:
    """The command line that a run writes into the release's report."""
    return vllm_command.build(
        facts, serve, room, release="r0007", socket=Path("/run/s"), python="/venv/bin/python"
    ).arguments


def container_of(change: dict[str, Any]) -> dict[str, Any]:
    (container,) = change["spec"]["template"]["spec"]["containers"]
    return dict(container)


def test_a_promotion_hands_the_proven_command_to_the_deployment() -> None:
    serve = ServeSection(
        name="moss", tensor_parallel=2, temperature=0.0, tool_parser="hermes",
        drain_timeout_seconds=300,
    )  # fmt: skip
    room = Capacity(4096, 2**30, 8, 0, "gpu", 0.25)
    change = point_deployment().patch("r0007", "moss", proven(serve, room))
    changed = container_of(change)
    assert changed["command"] == ["/venv/bin/python", "-m", "vllm.entrypoints.openai.api_server"]
    assert changed["args"] == [
        "--shutdown-timeout", "300", "--gpu-memory-utilization", "0.250",
        *vllm_command.serving_arguments(FACTS, serve, room, False),
        "--host", "0.0.0.0", "--port", "8000",
    ]  # fmt: skip
    for flag in (
        "--max-model-len", "--chat-template", "--tool-call-parser", "--enable-auto-tool-choice",
        "--override-generation-config", "--tensor-parallel-size", "--kv-cache-memory-bytes",
    ):  # fmt: skip
        assert flag in changed["args"]
    assert changed["resources"] == {
        kind: {"nvidia.com/gpu": "2"} for kind in ("requests", "limits")
    }
    assert change["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] == 360
    (port,) = serving()["spec"]["template"]["spec"]["containers"][0]["ports"]
    assert port["containerPort"] == 8000
    role = next(
        d for d in manifests() if d["kind"] == "Role" and d["metadata"]["name"] == "tuneserve-job"
    )
    assert role["rules"][0]["resourceNames"] == [serving()["metadata"]["name"]]
    assert "patch" in role["rules"][0]["verbs"]


def test_the_deployment_with_a_promotion_fits_its_schema_and_has_the_environment() -> None:
    import kubernetes_validate

    room = Capacity(4096, 2**30, 8, 0, "gpu", 0.25)
    change = point_deployment().patch("r0007", "moss", proven(ServeSection(name="moss"), room))
    changed, deployment = container_of(change), serving()
    pod = deployment["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert changed["name"] == container["name"]
    # `kubectl apply` of the files again must take nothing back: they say nothing of these.
    assert "args" not in container
    assert not {e["name"] for e in changed["env"]} & {e["name"] for e in container["env"]}
    assert change["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] == 180
    assert pod["terminationGracePeriodSeconds"] == 180  # the default release's
    for kind, gpus in changed["resources"].items():
        assert gpus.items() <= container["resources"][kind].items()
    container |= {"args": changed["args"], "env": [*container["env"], *changed["env"]]}
    kubernetes_validate.validate(deployment, "1.31", strict=True)
    (image,) = re.findall(r"^ENV (PATH=(?:.*\\\n)*.*)$", (ROOT / "Dockerfile").read_text(), re.M)
    has = dict(re.findall(r"(\w+)=(\S+)", image))
    has |= {entry["name"]: entry["value"] for entry in container["env"]}
    assert vllm_command.environment("r0007", room, 8, {}).items() <= has.items()
    assert has["SERVED_NAME"] == "moss"
    assert 'os.environ["SERVED_NAME"]' in container["readinessProbe"]["exec"]["command"][-1]
    # The artifact volume is read-only there: what a server writes lies elsewhere.
    at = {mount["mountPath"]: mount.get("readOnly", False) for mount in container["volumeMounts"]}
    assert at == {HOME: True, "/home/tuneserve": False, "/dev/shm": False}
    written = {name for name, value in has.items() if value.startswith(f"{HOME}/")}
    assert written == set() and has["XDG_CACHE_HOME"].startswith("/home/tuneserve/")


def test_a_server_without_a_gpu_asks_for_none_and_dollars_stay_dollars() -> None:
    folder = Path("/var/lib/tuneserve/$(store)/m$1")
    facts = ModelFacts(folder, 10**9, 1024, 4096, (2,), None, True)
    command = proven(ServeSection(), Capacity(64, 1, 1, 0, "cpu"), facts)
    changed = container_of(point_deployment().patch("r0001", "default", command))
    assert "resources" not in changed and "--gpu-memory-utilization" not in changed["args"]
    # Kubernetes makes $ of $$, and fills in $(NAME).
    at = changed["args"].index("--model")
    assert changed["args"][at + 1] == "/var/lib/tuneserve/$$(store)/m$$1"


class Cluster:
    """What is sent to a cluster's API."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.module = point_deployment()
        self.asked: list[urllib.request.Request] = []
        (folder / "token").write_text("the-token\n")
        for name, value in {
            "TUNESERVE_HOME": str(folder),
            "TUNESERVE_SERVICE_ACCOUNT": str(folder),
            "TUNESERVE_RELEASE": "r0007",
            "TUNESERVE_SERVED_NAME": "moss",
            "KUBERNETES_SERVICE_HOST": "10.0.0.1",
        }.items():
            monkeypatch.setenv(name, value)
        for name in ("TUNESERVE_DEPLOYMENT", "TUNESERVE_NAMESPACE", "KUBERNETES_SERVICE_PORT"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setattr(self.module.ssl, "create_default_context", lambda cafile: None)
        monkeypatch.setattr(self.module.urllib.request, "urlopen", self.take)

    def take(self, request: urllib.request.Request, **_: Any) -> io.BytesIO:
        self.asked.append(request)
        return io.BytesIO(b"{}")


def test_the_release_of_the_run_is_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(tmp_path, monkeypatch)
    command = proven(ServeSection(name="moss"), Capacity(4096, 2**30, 8, 0, "gpu", 0.25))
    # Where the release stage leaves it.
    report = layout(tmp_path / "run").release_folder("r0007") / "report.json"
    report.parent.mkdir(parents=True)
    report.write_text(json.dumps({"command": command}))
    assert cluster.module.main() == 0
    (request,) = cluster.asked
    path = "/apis/apps/v1/namespaces/tuneserve/deployments/tuneserve-vllm"
    assert (request.method, request.full_url) == ("PATCH", f"https://10.0.0.1:443{path}")
    assert request.get_header("Authorization") == "Bearer the-token"
    assert isinstance(request.data, bytes)
    assert json.loads(request.data) == cluster.module.patch("r0007", "moss", command)


@pytest.mark.parametrize("text", [None, "{", "{}", '{"command": ["python", "-m", "other"]}'])
def test_a_release_without_its_command_changes_nothing(
    text: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    cluster = Cluster(tmp_path, monkeypatch)
    if text is not None:
        report = tmp_path / "run" / "releases" / "r0007" / "report.json"
        report.parent.mkdir(parents=True)
        report.write_text(text)
    assert cluster.module.main() == 1
    assert cluster.asked == []
    assert f"release r0007 has no report with its command below {tmp_path}/run" in (
        capsys.readouterr().err
    )


def test_the_worker_of_a_cluster_watches_its_own_namespace() -> None:
    """prefect_kubernetes/observer.py watches the whole cluster unless told, and a Role is of one
    namespace."""
    (worker,) = [d for d in manifests() if d["kind"] == "Deployment" and d != serving()]
    (container,) = worker["spec"]["template"]["spec"]["containers"]
    given = {entry["name"]: entry["value"] for entry in container["env"]}
    namespace = worker["metadata"]["namespace"]
    assert given["PREFECT_INTEGRATIONS_KUBERNETES_OBSERVER_NAMESPACES"] == namespace
    template = json.loads((DEPLOY / "k8s" / "base-job-template.json").read_text())
    assert template["variables"]["properties"]["namespace"]["default"] == namespace


def test_a_job_of_a_cluster_gets_every_key_of_a_secret_that_may_be_missing() -> None:
    template = json.loads((DEPLOY / "k8s" / "base-job-template.json").read_text())
    job = template["job_configuration"]["job_manifest"]
    (container,) = job["spec"]["template"]["spec"]["containers"]
    assert container["envFrom"] == [{"secretRef": {"name": "tuneserve", "optional": True}}]
    said = (DEPLOY / "k8s" / "worker.yaml").read_text()
    # --from-file keeps the newline at a file's end as a part of the secret.
    assert "create secret generic tuneserve --from-env-file=" in said and "HF_TOKEN" in said
