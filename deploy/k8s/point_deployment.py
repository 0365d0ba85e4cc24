"""Point the serving Deployment at the release that a run just promoted (`notify.promoted_command`).

Runs inside a job of the cluster with the service account `tuneserve-job`. The Deployment gets the
command that the release was proven with, from the release's report. The names of what is changed
come from the environment: TUNESERVE_DEPLOYMENT, TUNESERVE_NAMESPACE.
"""

from __future__ import annotations

import json
import os
import ssl
import sys
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tuneserve.places import run_root

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
PORT = 8000
GRACE_SECONDS = 60  # beside the time that answers get: preStop, and the end of the processes
_PROGRAM = 3  # python -m vllm.entrypoints.openai.api_server


def proven_command(release: str) -> list[str]:
    """The command line that the release was proven with.

    Raises:
        OSError, ValueError, KeyError: The report cannot be read, or holds none.
    """
    report = run_root() / "releases" / release / "report.json"
    return [str(part) for part in json.loads(report.read_text(encoding="utf-8"))["command"]]


def patch(release: str, served: str, command: Sequence[str]) -> dict[str, Any]:
    """The change: another release means other pods, which is a rolling update.

    Args:
        release: Its id.
        served: The served name, which the readiness probe asks for.
        command: What the release was proven with; a port takes the place of its unix socket.
    """
    given = dict(zip(command, command[1:], strict=False))
    at = command.index("--uds")
    arguments = [*command[_PROGRAM:at], *command[at + 2 :], "--host", "0.0.0.0", "--port", PORT]
    container: dict[str, Any] = {
        "name": "vllm",
        "command": [_literal(part) for part in command[:_PROGRAM]],
        "args": [_literal(part) for part in arguments],
        "env": [
            {"name": "SERVED_NAME", "value": served},
            {"name": "TUNESERVE_RELEASE", "value": release},
        ],
    }
    if "--gpu-memory-utilization" in given:  # a server on CPUs has no such share
        gpus = {"nvidia.com/gpu": given.get("--tensor-parallel-size", "1")}
        container["resources"] = {"requests": gpus, "limits": gpus}
    return {
        "metadata": {"annotations": {"kubernetes.io/change-cause": f"tuneserve {release}"}},
        "spec": {
            "template": {
                "metadata": {"annotations": {"tuneserve/release": release}},
                "spec": {
                    "terminationGracePeriodSeconds": int(given["--shutdown-timeout"])
                    + GRACE_SECONDS,
                    "containers": [container],
                },
            }
        },
    }


def _literal(part: object) -> str:
    """Kubernetes fills in $(NAME) in commands; $$ is a dollar."""
    return str(part).replace("$", "$$")


def main() -> int:
    """Send it; the exit status is 0 when the cluster took it."""
    host = os.environ.get("KUBERNETES_SERVICE_HOST", "kubernetes.default.svc")
    server = f"https://{host}:{os.environ.get('KUBERNETES_SERVICE_PORT', '443')}"
    account = Path(os.environ.get("TUNESERVE_SERVICE_ACCOUNT", ACCOUNT))
    namespace = os.environ.get("TUNESERVE_NAMESPACE", "tuneserve")
    name = os.environ.get("TUNESERVE_DEPLOYMENT", "tuneserve-vllm")
    release, served = os.environ["TUNESERVE_RELEASE"], os.environ["TUNESERVE_SERVED_NAME"]
    try:
        body = patch(release, served, proven_command(release))
    except (OSError, ValueError, KeyError) as error:
        sys.stderr.write(
            f"release {release} has no report with its command below {run_root()}: {error!r}\n"
        )
        return 1
    request = urllib.request.Request(
        f"{server}/apis/apps/v1/namespaces/{namespace}/deployments/{name}",
        json.dumps(body).encode(),
        {
            "Authorization": f"Bearer {(account / 'token').read_text().strip()}",
            "Content-Type": "application/strategic-merge-patch+json",
        },
        method="PATCH",
    )
    context = ssl.create_default_context(cafile=str(account / "ca.crt"))
    try:
        with urllib.request.urlopen(request, timeout=30, context=context):
            return 0
    except urllib.error.HTTPError as error:
        sys.stderr.write(f"deployment {name}: status {error.code}: {error.read()[:500]!r}\n")
    except OSError as error:
        sys.stderr.write(f"deployment {name}: {error}\n")
    return 1


if __name__ == "__main__":
    sys.exit(main())
