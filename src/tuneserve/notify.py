"""Tell a webhook how a run ended, with what the gates found.

The body is one JSON object whose `text` Slack, Mattermost and Teams show as it is; the other
fields are for programs. A notification that cannot be delivered is logged and changes nothing.
"""

from __future__ import annotations

import http.client
import json
import logging
import os
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any

from tuneserve.errors import ServiceError
from tuneserve.policy import NotifySection

log = logging.getLogger(__name__)

_TRIES = 3
_TIMEOUT_SECONDS = 10.0
_FIRST_PAUSE_SECONDS = 1.0
_LONGEST_PAUSE_SECONDS = 60.0
_COMMAND_SECONDS = 600.0
# Of the answers that put the fault on our side, these ask to be tried again (RFC 9110, 8470, 6585).
_LATER = (408, 425, 429)


def notify(section: NotifySection, event: str, facts: Mapping[str, Any]) -> bool:
    """Post one notification; whether the webhook took it.

    Args:
        section: Where the URL is found, and which events are told.
        event: promoted, refused, failed or unchanged.
        facts: What is known of the run; `name` and `served` at least.
    """
    if event not in section.events or not section.url_env:
        return False
    url = os.environ.get(section.url_env, "")
    if not url.startswith(("https://", "http://")):
        log.warning("no notification: %s holds no http(s) address", section.url_env)
        return False
    body = json.dumps({"text": text_of(event, facts), "event": event, **facts}, default=str)
    pause = 0.0
    for attempt in range(_TRIES):
        time.sleep(pause)
        pause = _FIRST_PAUSE_SECONDS * 2**attempt
        try:
            request = urllib.request.Request(
                url, body.encode(), {"Content-Type": "application/json"}, method="POST"
            )
            with urllib.request.urlopen(request, timeout=_TIMEOUT_SECONDS):
                return True
        except urllib.error.HTTPError as error:
            why = f"status {error.code}"
            if error.code < 500 and error.code not in _LATER:
                break
            pause = _asked_pause(error.headers.get("Retry-After"), pause)
        except (OSError, ValueError, http.client.HTTPException) as error:
            why = type(error).__name__  # its text may hold the URL, which is a secret
    log.warning("the webhook of %s did not take the notification: %s", section.url_env, why)
    return False


def _asked_pause(retry_after: str | None, usual: float) -> float:
    """Seconds until the webhook wants to be asked again, within reason (RFC 9110, 10.2.3)."""
    try:
        if retry_after is None:
            return usual
        if not retry_after.strip().isdigit():
            retry_after = str(parsedate_to_datetime(retry_after).timestamp() - time.time())
        return min(max(float(retry_after), 0.0), _LONGEST_PAUSE_SECONDS)
    except ValueError:
        return usual


def run_command(command: Sequence[str], model: Path, release: str, served: str) -> None:
    """Run the command of `notify.promoted_command`.

    Raises:
        ServiceError: It cannot be started, takes too long, or fails.
    """
    told = {
        "TUNESERVE_MODEL_DIR": str(model),
        "TUNESERVE_RELEASE": release,
        "TUNESERVE_SERVED_NAME": served,
    }
    try:
        done = subprocess.run(
            list(command),
            env={**os.environ, **told},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=_COMMAND_SECONDS,
        )
        why = f"ended with status {done.returncode}: {done.stdout.strip()[-500:]}"
        if done.returncode == 0:
            return
    except OSError as error:
        why = f"cannot be started ({error.strerror})"
    except subprocess.TimeoutExpired:
        why = f"took longer than {_COMMAND_SECONDS:.0f} s"
    raise ServiceError(
        f"{release} serves, but notify.promoted_command ({command[0]}) {why}",
        hint="mend the command and run again: the release is not made a second time",
    )


def text_of(event: str, facts: Mapping[str, Any]) -> str:
    """The notification for people, in a few lines."""
    head = f"{facts['name']} ({facts['served']}): "
    lines = [
        head
        + {
            "promoted": f"release {facts.get('release')} serves now",
            "refused": "the new model was refused; what was serving goes on serving",
            "failed": f"failed during {facts.get('stage') or 'start'}",
            "unchanged": facts.get("note") or "nothing to do",
        }[event]
    ]
    if event in ("refused", "failed") and facts.get("error"):
        lines.append(str(facts["error"]))
    for rung in facts.get("rungs") or ():
        why = f": {rung['reason']}" if rung["reason"] else ""
        lines.append(f"{rung['method']}: {rung['decision']}{why}")
    losses = {k: v for k, v in (facts.get("losses") or {}).items() if isinstance(v, float)}
    if losses:
        lines.append(
            "held-out loss: " + ", ".join(f"{name} {loss:.4f}" for name, loss in losses.items())
        )
    for gate in facts.get("gates") or ():
        verdict = "passed" if gate["passed"] else "REFUSED"
        lines.append(f"{gate['name']}: {verdict} (found {gate['found']}, wanted {gate['wanted']})")
    if facts.get("link"):
        lines.append(str(facts["link"]))
    return "\n".join(lines)
