"""Point the serving Deployment at the model that a run just promoted (`notify.promoted_command`).

Runs inside a job of the cluster with the service account `tuneserve-job`. The names of what is
changed come from the environment: TUNESERVE_DEPLOYMENT, TUNESERVE_NAMESPACE.
"""

from __future__ import annotations

import json
import os
import ssl
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")


def patch(model: str, release: str) -> dict[str, Any]:
    """The change: another model means other pods, which is a rolling update."""
    container = {"name": "vllm", "env": [{"name": "MODEL_DIR", "value": model}]}
    return {
        "metadata": {"annotations": {"kubernetes.io/change-cause": f"tuneserve {release}"}},
        "spec": {
            "template": {
                "metadata": {"annotations": {"tuneserve/release": release}},
                "spec": {"containers": [container]},
            }
        },
    }


def main() -> int:
    """Send it; the exit status is 0 when the cluster took it."""
    host = os.environ.get("KUBERNETES_SERVICE_HOST", "kubernetes.default.svc")
    server = f"https://{host}:{os.environ.get('KUBERNETES_SERVICE_PORT', '443')}"
    account = Path(os.environ.get("TUNESERVE_SERVICE_ACCOUNT", ACCOUNT))
    namespace = os.environ.get("TUNESERVE_NAMESPACE", "tuneserve")
    name = os.environ.get("TUNESERVE_DEPLOYMENT", "tuneserve-vllm")
    body = patch(os.environ["TUNESERVE_MODEL_DIR"], os.environ["TUNESERVE_RELEASE"])
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
