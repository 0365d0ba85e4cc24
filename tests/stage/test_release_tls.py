"""HTTPS through the real gateway, with its own authority and with certificate files."""

from __future__ import annotations

import json
import shutil
import socket
import ssl
from pathlib import Path

import httpx
import openai
import pytest

from release_house import House, keeper
from tuneserve.ask import ask_endpoint
from tuneserve.errors import RunFileError
from tuneserve.release import control
from tuneserve.release.layout import layout
from tuneserve.release.stage import release
from tuneserve.release.status_text import status_text

HOST = "models.lan"
KEY = "tsk-0123456789-never-to-be-seen"
BODY = {"model": "default", "messages": [{"role": "user", "content": "my private words"}]}


def trusting(root: str | Path) -> ssl.SSLContext:
    """A client that trusts this authority and no other."""
    return ssl.create_default_context(cafile=str(root))


def post(
    house: House, context: ssl.SSLContext, *, host: str = HOST, key: str = KEY
) -> httpx.Response:
    """A request for `host`, whose name no resolver here knows: it is reached by its address."""
    with httpx.Client(verify=context, timeout=30) as client:
        return client.post(
            f"https://127.0.0.1:{house.port}/v1/chat/completions?api_key={KEY}",
            json=BODY,
            headers={"Host": host, "Authorization": f"Bearer {key}"},
            extensions={"sni_hostname": HOST},
        )


def test_https_with_the_gateways_own_authority_and_with_files(
    house: House, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("DOOR_API_KEY", KEY)
    made = release(house.request(host=HOST, tls="internal", api_key_env="DOOR_API_KEY"))
    assert made["endpoint"] == f"https://{HOST}:{house.port}/v1"
    shown = control.status()
    assert shown["tls_root"] in status_text(shown)
    ours = trusting(shown["tls_root"])
    answer = post(house, ours)
    assert answer.status_code == 200
    assert answer.headers["x-tuneserve-release"] == made["release"]
    assert post(house, ours, key="x" * 31).status_code == 401
    assert post(house, ours, host="other.lan").status_code == 421
    with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
        post(house, ssl.create_default_context())
    # Without a body: one that nobody reads would end the connection before the answer is read.
    plain = httpx.get(f"http://127.0.0.1:{house.port}/v1/models")
    assert plain.status_code == 400  # words in the clear go nowhere
    check_what_is_kept(house)

    # The same with files, as from a company's own authority.
    made_by_caddy = layout().root / "caddy" / "certificates" / "local" / HOST
    files = {"tls_certificate": tmp_path / "tls.crt", "tls_key": tmp_path / "tls.key"}
    for name, path in files.items():
        shutil.copy(made_by_caddy / f"{HOST}.{'crt' if name.endswith('e') else 'key'}", path)
    given = {name: str(path) for name, path in files.items()}
    changed = house.request(host=HOST, api_key_env="DOOR_API_KEY", **given)
    again = release(changed)
    assert again["release"] == made["release"] and again["reused"]  # the gateway alone is anew
    assert control.status()["tls_root"] is None
    with socket.create_connection(("127.0.0.1", house.port)) as raw:
        with ours.wrap_socket(raw, server_hostname=HOST) as inside:
            served = inside.getpeercert(binary_form=True)
    leaf, end, _ = files["tls_certificate"].read_text().partition("-----END CERTIFICATE-----")
    assert served == ssl.PEM_cert_to_DER_cert(leaf + end)  # the chain's first
    assert post(house, ours).status_code == 200


def check_what_is_kept(house: House) -> None:
    """The access log has the request, and neither key, query nor words; no file but one has the
    key; private keys are their owner's alone."""
    places = layout()
    lines = [json.loads(line) for line in (places.logs / "access.log").read_text().splitlines()]
    seen = [(line["status"], line["request"]["uri"]) for line in lines]
    assert (200, "/v1/chat/completions?") in seen and (401, "/v1/chat/completions?") in seen
    assert not {"headers", "tls", "body"} & {key for line in lines for key in line["request"]}
    for path in house.folder.rglob("*"):
        if path.is_file() and path != places.keys:
            data = path.read_bytes()
            assert KEY.encode() not in data and b"my private words" not in data, path
            if path.suffix == ".key":
                assert path.stat().st_mode & 0o077 == 0, path


def test_the_openai_client_over_https_on_this_machine(house: House) -> None:
    made = release(house.request(host="localhost", tls="internal"))
    assert made["endpoint"] == f"https://localhost:{house.port}/v1"
    root = control.status()["tls_root"]
    client = openai.OpenAI(
        base_url=made["endpoint"],
        api_key="none",
        max_retries=0,
        http_client=openai.DefaultHttpxClient(verify=trusting(root)),
    )
    answer = client.chat.completions.create(model="default", messages=BODY["messages"])  # type: ignore
    assert answer.choices[0].finish_reason == "stop"
    assert ask_endpoint("hi")["answer"] == f"{made['release']} " * 256
    # Nobody else is let in: the name is this machine's, and no key was asked for.
    table = Path("/proc/net/tcp").read_text() + Path("/proc/net/tcp6").read_text()
    port = f":{house.port:04X}"
    bound = [
        line.split()[1] for line in table.splitlines() if line.split()[3] == "0A" and port in line
    ]
    assert bound and all(
        address.startswith("0100007F") or "01000000:" in address for address in bound
    )


def test_certificates_that_clients_would_refuse_are_refused_before_anything_starts(
    house: House, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("DOOR_API_KEY", KEY)
    release(house.request(host=HOST, tls="internal", api_key_env="DOOR_API_KEY"))
    made = layout().root / "caddy" / "certificates" / "local" / HOST
    certificate, key = made / f"{HOST}.crt", made / f"{HOST}.key"
    broken = tmp_path / "broken.pem"
    broken.write_text("nothing\n")
    other = layout().root / "caddy" / "pki" / "authorities" / "local" / "root.key"
    before = keeper()._session("gateway")
    for host, pair, words in (
        ("else.lan", (certificate, key), "not valid for 'else.lan'"),
        (HOST, (certificate, other), "mismatch|MISMATCH"),
        (HOST, (broken, key), "PEM"),
        (HOST, (tmp_path / "none", key), "No such file"),
    ):
        fields = {"tls_certificate": str(pair[0]), "tls_key": str(pair[1])}
        with pytest.raises(RunFileError, match=words):
            release(house.request(host=host, api_key_env="DOOR_API_KEY", **fields))
    with pytest.raises(RunFileError, match="no certificate can name"):
        release(house.request(host="0.0.0.0", tls="internal", api_key_env="DOOR_API_KEY"))
    assert keeper()._session("gateway") == before
    assert post(house, trusting(control.status()["tls_root"])).status_code == 200
