"""Releases with real processes: supervisord, Caddy, the wrapper, and stubs in vLLM's place."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

import release_stub as stub
from release_house import House, keeper, processes_of, wait_for
from tuneserve.config import GatesSection
from tuneserve.errors import (
    DeviceBusy,
    GateRefused,
    InputError,
    OutOfMemory,
    RunFileError,
    ServerError,
)
from tuneserve.release import control, gateway, state
from tuneserve.release.champion import safely_measure
from tuneserve.release.layout import current_release, layout
from tuneserve.release.stage import release
from tuneserve.release.status_text import status_text
from tuneserve.release.supervisor import GATEWAY, server_program
from tuneserve.runfile import parse_run


def test_a_release_answers_at_one_address_and_is_reused(house: House) -> None:
    made = release(house.request(losses={"base": 3.0, "adapter": 1.0, "merged": 1.0}))
    assert made["endpoint"] == f"{house.url}/v1"
    assert made["losses"] == {"base": 3.0, "adapter": 1.0, "merged": 1.0, "served": 1.0}
    assert made["parity"]["whole"] == 8
    assert {gate["name"]: gate["decision"] for gate in made["gates"]} == dict.fromkeys(
        ["better than base", "merge keeps the tuning", "served keeps the tuning",
         "answers end", "no loops", "no gibberish"], "passed",
    )  # fmt: skip
    folder = Path(made["report_folder"])
    assert "**Passed** all 6 gates" in (folder / "gates.md").read_text()
    assert f"# default, release {made['release']}" in (folder / "README.md").read_text()
    answer = house.chat()
    assert answer.headers["x-tuneserve-release"] == made["release"]
    assert answer.json()["choices"][0]["message"]["content"] == f"{made['release']} " * 2
    assert httpx.get(f"{house.url}/health").status_code == 200
    started = time.monotonic()
    again = release(house.request(losses={"base": 3.0, "adapter": 1.0, "merged": 1.0}))
    assert again["reused"] and again["release"] == made["release"]
    assert time.monotonic() - started < 5
    shown = control.status()
    assert shown["endpoint"] == made["endpoint"]
    assert shown["names"]["default"]["state"] == "serving"
    assert shown["names"]["default"]["release"] == made["release"]
    assert shown["names"]["default"]["memory_bytes"] > 0


def test_promote_then_roll_back_without_losing_a_request(house: House) -> None:
    first = release(house.request("a", behaviour={"token_seconds": 0.02}))["release"]
    failures, seen, stop = [], set(), threading.Event()

    def client(ask: Callable[[dict[str, Any]], tuple[str, str]], stream: bool) -> None:
        body = {
            "model": "default",
            "messages": [{"role": "user", "content": "hi"}],
            "max_tokens": 5,
            "stream": stream,
        }
        while not stop.is_set():
            try:
                by, said = ask(body)
            except (openai.OpenAIError, httpx.HTTPError, ValueError, KeyError) as error:
                failures.append(repr(error))
                continue
            releases = set(said.split())
            if releases != {by} or len(said.split()) != 5:
                failures.append(said)
            seen.update(releases)

    ways = [_ask_by_openai(house), _ask_by_httpx(house)]
    clients = [threading.Thread(target=client, args=(ways[i % 2], i % 4 < 2)) for i in range(8)]
    for thread in clients:
        thread.start()
    try:
        second = release(house.request("b", behaviour={"token_seconds": 0.02}))["release"]
        control.rollback()
        control.promote_release(second, keep_warm=True)
        control.rollback()
    finally:
        stop.set()
        for thread in clients:
            thread.join()
    assert not failures, failures[:5]
    assert seen == {first, second}
    names = state.read(layout()).names["default"]
    assert names.active == first
    assert [item["release"] for item in names.history] == [first, second, first, second]
    wait_for(lambda: not keeper().members(server_program(second)))


def _ask_by_openai(house: House) -> Callable[[dict[str, Any]], tuple[str, str]]:
    client = openai.OpenAI(base_url=f"{house.url}/v1", api_key="none", max_retries=0, timeout=60)

    def ask(body: dict[str, Any]) -> tuple[str, str]:
        answer = client.chat.completions.with_raw_response.create(**body)
        parsed: Any = answer.parse()
        by = str(answer.headers["x-tuneserve-release"])
        if not body["stream"]:
            assert parsed.choices[0].finish_reason == "stop"
            return by, str(parsed.choices[0].message.content)
        choices = [chunk.choices[0] for chunk in parsed]
        assert choices[-1].finish_reason == "stop"
        return by, "".join(choice.delta.content for choice in choices)

    return ask


def _ask_by_httpx(house: House) -> Callable[[dict[str, Any]], tuple[str, str]]:
    client = httpx.Client(timeout=60)

    def ask(body: dict[str, Any]) -> tuple[str, str]:
        answer = client.post(f"{house.url}/v1/chat/completions", json=body)
        return answer.headers["x-tuneserve-release"], _answer(answer, bool(body["stream"]))

    return ask


def _answer(answer: httpx.Response, stream: bool) -> str:
    if answer.status_code != 200:
        raise ValueError(f"{answer.status_code} {answer.text}")
    if not stream:
        choice = answer.json()["choices"][0]
        assert choice["finish_reason"] == "stop"
        return str(choice["message"]["content"])
    lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
    if lines[-1] != "[DONE]":
        raise ValueError("the stream was cut")
    choices = [json.loads(line)["choices"][0] for line in lines[:-1]]
    assert choices[-1]["finish_reason"] == "stop"
    return "".join(choice["delta"]["content"] for choice in choices)


REFUSALS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"die": "ValueError: 9.0 GiB KV cache is needed"}, OutOfMemory, "KV cache is needed"),
    ({"die": "RuntimeError: some other reason"}, ServerError, "some other reason"),
    ({"names": ["somebody-else"]}, ServerError, "somebody-else"),
    ({"shift": 3}, GateRefused, "index 3"),
    ({"never_stop": True}, GateRefused, "ended by itself"),
    ({"nats": 9.0}, GateRefused, "better than base: served 9.0000, base 3.0000"),
]


def test_refused_candidates_leave_the_champion_and_no_process(house: House) -> None:
    losses = {"base": 3.0, "merged": 1.0}
    champion = release(house.request("a", losses=losses))["release"]
    before = state.read(layout()).names
    running = set(keeper().members(server_program(champion)))
    for number, (behaviour, error, words) in enumerate(REFUSALS):
        with pytest.raises(error, match=words):
            release(house.request(f"bad{number}", behaviour=behaviour, losses=losses))
        if {"shift", "never_stop", "nats"} & set(behaviour):  # the report names the gate
            assert "**Refused** by " in newest_report()
        assert state.read(layout()).names == before, behaviour
        assert current_release(layout(), "default") == champion
        assert set(keeper().members(server_program(champion))) == running
        assert set(keeper().all()) == {GATEWAY, server_program(champion)}
        assert house.chat().headers["x-tuneserve-release"] == champion


def test_a_changed_template_is_refused_by_parity_also_after_a_system_message(house: House) -> None:
    """Only the answer differs: of a single answer nothing was rewritten, so all of it counts."""
    dataset = stub.make_dataset(house.folder / "with-system", system="Be brief.")
    champion = release(house.request("a", dataset=dataset))["release"]
    chat = json.loads((dataset / "eval_messages.jsonl").read_text().splitlines()[0])["messages"]
    begins = len(stub.render(chat[:-1], generate=True))
    with pytest.raises(GateRefused, match=f"trained ids at index {begins + 2}") as caught:
        release(house.request("b", dataset=dataset, behaviour={"shift": begins + 2}))
    assert [(g["name"], g["passed"]) for g in caught.value.details["gates"]] == [("parity", False)]
    assert "**Refused** by 1 of 1 gates: parity." in newest_report()
    assert current_release(layout(), "default") == champion
    assert house.chat().headers["x-tuneserve-release"] == champion


def test_a_champion_that_cannot_be_measured_is_not_passed_by(house: House) -> None:
    losses = {"base": 3.0, "adapter": 1.0, "merged": 1.0}
    champion = release(house.request("a", losses=losses))["release"]
    config = house.folder / "a" / "config.json"
    known = config.read_text()
    config.write_text("{")  # what ends its answers cannot be read any more
    with pytest.raises(GateRefused, match="not worse than the champion: undecided") as caught:
        release(house.request("b", losses=losses))
    assert "gates.compare_champion: false" in caught.value.hint
    (gate,) = [g for g in caught.value.details["gates"] if not g["passed"]]
    assert gate["decision"] == "undecided" and champion in gate["found"]
    assert house.chat().headers["x-tuneserve-release"] == champion
    gates = GatesSection(compare_champion=False)
    second = release(house.request("b", losses=losses, gates=gates))
    assert house.chat().headers["x-tuneserve-release"] == second["release"]
    assert "not worse than the champion: not asked for in gates" in second["report"]
    config.write_text(known)


def newest_report() -> str:
    folders = sorted((layout().root / "releases").iterdir())
    return (folders[-1] / "gates.md").read_text()


def test_a_candidate_worse_than_the_champion_is_refused_on_the_same_conversations(
    house: House,
) -> None:
    losses = {"base": 9.0, "merged": 3.0}
    champion = release(house.request("a", losses=losses, behaviour={"nats": 2.0}))["release"]
    # 9 tokens of each answer's 8 bytes: (3.0 - 2.0) x 9 / 8 nats a byte more
    with pytest.raises(GateRefused, match=r"not worse than the champion: .*\+1\.1250"):
        release(house.request("b", losses=losses, behaviour={"nats": 3.0}))
    assert current_release(layout(), "default") == champion
    folder = sorted((layout().root / "releases").iterdir())[-1]
    known = json.loads((folder / "champion.json").read_text())
    assert known == {"release": champion, "nats": [pytest.approx(18.0)] * 8}
    gates = GatesSection(max_over_champion=1.2)
    made = release(house.request("b", losses=losses, behaviour={"nats": 3.0}, gates=gates))
    assert made["gates"][2]["name"] == "not worse than the champion"


def test_a_refused_first_candidate_leaves_nothing(house: House) -> None:
    with pytest.raises(GateRefused):
        release(house.request(behaviour={"never_stop": True}))
    assert not keeper().running()
    assert control.status()["endpoint"] is None
    assert not processes_of(house.folder)


def test_a_cap_on_answers_is_named_when_it_cuts(house: House) -> None:
    with pytest.raises(GateRefused, match="ended by itself within 16 tokens") as caught:
        release(house.request(behaviour={"never_stop": True}, max_tokens=16))
    assert caught.value.hint is not None and "serve.max_tokens is 16" in caught.value.hint
    assert caught.value.details["would_pass"] == ["perhaps serve.max_tokens: 64"]
    (gate,) = caught.value.details["gates"]
    assert (gate["name"], gate["would_pass"]) == ("answers end", "perhaps serve.max_tokens: 64")


def test_a_server_that_hangs_is_not_ready(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """E05: /health is 200 all the time."""
    from tuneserve.release import ready

    monkeypatch.setattr(ready.check_answers, "__kwdefaults__", {"timeout_seconds": 1.0})
    with pytest.raises(ServerError, match="answers /health, but a chat completion did not come"):
        release(house.request(behaviour={"hang": True}))
    assert not processes_of(house.folder)


def test_hold_keeps_requests_waiting_and_restores_the_champion(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Shorter than they are held: they have been sent, so that this limit is not theirs.
    monkeypatch.setattr(gateway, "_CLIENT_SEND_SECONDS", 1)
    first = release(house.request("a"))["release"]
    statuses: list[tuple[int, str]] = []

    def ask() -> None:
        answer = house.chat()
        statuses.append((answer.status_code, answer.headers["x-tuneserve-release"]))

    second_request = house.request("b", rollout="hold", behaviour={"start_seconds": 3})
    asking = threading.Thread(target=lambda: [ask() for _ in range(40) if not time.sleep(0.1)])
    ask()
    asking.start()
    second = release(second_request)["release"]
    asking.join()
    assert {status for status, _ in statuses} == {200}
    assert {by for _, by in statuses} == {first, second}
    with pytest.raises(GateRefused):
        release(house.request("c", rollout="hold", behaviour={"never_stop": True}))
    assert house.chat().headers["x-tuneserve-release"] == second
    assert state.read(layout()).names["default"].promoting is None


def test_a_second_release_of_the_name_is_refused_with_its_holder(house: House) -> None:
    with state.lock_name(layout(), "default", "releasing something"):
        with pytest.raises(DeviceBusy, match=rf"process {os.getpid()} \(releasing something"):
            release(house.request())
    assert not keeper().running()


def test_two_names_share_the_gateway(house: House) -> None:
    release(house.request("a"))
    other = release(house.request("b", name="other"))
    assert other["endpoint"] == f"{house.url}/other/v1"
    assert house.chat(path="/other/v1").headers["x-tuneserve-release"] == other["release"]
    assert house.chat(path="/missing/v1").status_code == 404
    with pytest.raises(RunFileError, match="the gateway serves"):
        release(house.request("c", name="third", port=stub.free_port()))
    control.down("default")
    shown = control.status()["names"]
    assert (shown["default"]["state"], shown["other"]["state"]) == ("down", "serving")
    assert house.chat().headers["x-tuneserve-release"] == other["release"]


def test_the_served_name_is_the_one_that_was_asked_for(house: House) -> None:
    """E06: never the model's folder, however that is written."""
    model = stub.make_model(house.folder / "support")
    serve = house.request("support").serve
    run = parse_run(
        {
            "name": "plain",
            "model": {"base": "somewhere"},
            "data": {"train": ["nothing"]},
            "engines": {"serve": {"python": house.python}},
        }
    )
    made = control.release_model_dir(Path(f"{model}/"), serve=serve, run=run)
    assert made["model"] == "default"
    launch = layout().conf / "programs" / f"{server_program(made['release'])}.json"
    command = json.loads(launch.read_text())["command"]
    assert command[command.index("--served-model-name") + 1] == "default"
    assert command[command.index("--model") + 1] == str(model)  # without the slash
    client = openai.OpenAI(base_url=made["endpoint"], api_key="none", max_retries=0)
    assert [each.id for each in client.models.list()] == [made["model"]]
    ask = [sys.executable, "-m", "tuneserve", "ask", "hi", "--json"]
    asked = json.loads(subprocess.run(ask, capture_output=True, check=True).stdout)
    assert (asked["model"], asked["finish_reason"]) == ("default", "stop")
    name = [sys.executable, "-m", "tuneserve", "release", str(model), "--name", f"{model}/"]
    refused = subprocess.run(name, capture_output=True, text=True, check=False)
    assert refused.returncode == 2 and "name" in refused.stderr


def test_release_without_a_dataset_says_what_is_skipped_and_what_ran(
    house: House, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    model = stub.make_model(house.folder / "model")
    run = parse_run(
        {
            "name": "plain",
            "model": {"base": "somewhere"},
            "data": {"train": ["nothing"]},
            "serve": {"port": house.port},
            "engines": {"serve": {"python": house.python}},
        }
    )
    made = control.release_model_dir(model, name="plain", run=run)
    assert made["model"] == "plain"
    assert "parity with the trained ids: no dataset was given" in caplog.text
    assert (
        "proofs that ran: its own process names the model; one greedy answer (ended" in caplog.text
    )
    assert "skipped: loss of the served model" in made["report"]


def test_rollback_without_history_says_so(house: House) -> None:
    made = release(house.request())
    before = state.read(layout())
    with pytest.raises(InputError, match="no release before .* the only one that ever") as caught:
        control.rollback()
    assert caught.value.exit_status == 2 and made["release"] in caught.value.message
    assert "`tuneserve down --name default`" in caught.value.hint
    assert state.read(layout()) == before


def test_a_warm_release_is_rolled_back_to_at_once(house: House) -> None:
    first = release(house.request("a", behaviour={"start_seconds": 3}))["release"]
    second = release(house.request("b", keep_warm=True))["release"]
    shown = control.status()
    assert shown["names"]["default"]["warm"] == first
    assert shown["names"]["default"]["warm_memory_bytes"] > 2**20
    assert f"kept warm: {first}" in status_text(shown)
    started = time.monotonic()
    control.rollback()
    assert time.monotonic() - started < 3
    assert house.chat().headers["x-tuneserve-release"] == first
    assert not keeper().members(server_program(second))


def test_there_are_never_three_servers_of_a_name(house: House) -> None:
    first = release(house.request("a", keep_warm=True))["release"]
    second = release(house.request("b", keep_warm=True))["release"]
    both = {GATEWAY, server_program(first), server_program(second)}
    assert {name for name, info in keeper().all().items() if info.up} == both
    # While the third one starts the second serves, and the first, kept warm until now, has ended.
    request = house.request("c", keep_warm=True, behaviour={"never_stop": True})
    with pytest.raises(GateRefused):
        release(request)
    assert not keeper().members(server_program(first))
    assert house.chat().headers["x-tuneserve-release"] == second
    assert state.read(layout()).names["default"].warm is None
    control.rollback(keep_warm=True)  # a restart, as nothing was warm any more
    assert state.read(layout()).names["default"].warm == second
    assert house.chat().headers["x-tuneserve-release"] == first


def test_rollback_of_a_release_that_was_held_needs_no_memory_for_two(
    house: House, caplog: pytest.LogCaptureFixture
) -> None:
    first = release(house.request("a"))["release"]
    second = release(house.request("b", rollout="hold"))["release"]
    stop, failures, most = threading.Event(), [], 0

    def ask() -> None:
        while not stop.is_set():
            answer = house.chat(1)
            if answer.status_code != 200:
                failures.append(answer.text)

    asking = threading.Thread(target=ask)
    rolling = threading.Thread(target=control.rollback, kwargs={"keep_warm": True})
    asking.start()
    rolling.start()
    while rolling.is_alive():
        alive = [bool(keeper().members(server_program(each))) for each in (first, second)]
        most = max(most, sum(alive))
    stop.set()
    asking.join()
    assert most == 1 and not failures
    assert f"{second} is not kept warm: serve.rollout is hold" in caplog.text
    assert house.chat().headers["x-tuneserve-release"] == first
    # What does not come up any more is not forgotten, and what served goes on.
    stub.make_model(house.folder / "b", die="RuntimeError: broken")
    with pytest.raises(ServerError, match="broken"):
        control.rollback()
    assert house.chat().headers["x-tuneserve-release"] == first
    assert keeper().info(server_program(second)) is not None


def test_status_and_logs_tell_what_an_operator_asks(house: House) -> None:
    first = release(house.request("a"))["release"]
    second = release(house.request("b"))["release"]
    for _ in range(12):
        house.chat()
    wait_for(lambda: control.status()["names"]["default"]["requests_per_second"] >= 0.2)
    text = status_text(control.status())
    assert f"default (default): serving, release {second}" in text
    assert re.search(r"healthy, \d+\.\d MiB, 0 requests running, 0\.[2-9]\d? requests/s", text)
    assert re.search(rf"before: {first} \(2\S+ to 2\S+\); `tuneserve rollback` goes back", text)
    command = [sys.executable, "-m", "tuneserve", "logs", "--follow"]
    following = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert following.stdout is not None
    try:
        with layout().server_log(second).open("a") as log:
            log.write("a line from now\n")
        assert any(line == "a line from now\n" for line in following.stdout)
    finally:
        following.kill()
        following.wait()
        following.stdout.close()
    assert control.log_files("access") == [layout().logs / "access.log"]
    assert control.log_files(first) == [layout().server_log(first)]
    with pytest.raises(InputError, match="the stage train has no log"):
        control.log_files("train")


def test_a_champion_that_is_down_keeps_nobody_out(house: House) -> None:
    losses = {"base": 3.0, "adapter": 1.0, "merged": 1.0}
    champion = release(house.request("a", losses=losses))["release"]
    stub.make_model(house.folder / "a", die="RuntimeError: broken")
    session = keeper()._session(server_program(champion))
    assert session is not None
    os.kill(session, signal.SIGKILL)
    wait_for(lambda: control.status()["names"]["default"]["state"] != "serving")
    second = release(house.request("b", losses=losses))
    assert house.chat().headers["x-tuneserve-release"] == second["release"]
    assert f"not worse than the champion: {champion} does not answer" in newest_report()


@pytest.mark.parametrize("comes_back", [True, False])
def test_a_champion_that_ends_while_it_is_measured_is_waited_for(
    house: House, monkeypatch: pytest.MonkeyPatch, comes_back: bool
) -> None:
    """One crash must not let a worse candidate through."""
    losses = {"base": 3.0, "adapter": 1.0, "merged": 1.0}
    champion = release(house.request("a", losses=losses))["release"]
    measured = []

    def killed_once(*arguments: Any) -> Any:
        measured.append(arguments[2])
        if len(measured) == 1:
            if not comes_back:
                stub.make_model(house.folder / "a", die="RuntimeError: broken")
            session = keeper()._session(server_program(champion))
            assert session is not None
            os.kill(session, signal.SIGKILL)
        return safely_measure(*arguments)

    monkeypatch.setattr("tuneserve.release.proving.safely_measure", killed_once)
    if comes_back:
        made = release(house.request("b", losses=losses))
        assert measured == [champion, champion]
        found = {gate["name"]: gate["decision"] for gate in made["gates"]}
        assert found["not worse than the champion"] == "passed"
        return
    with pytest.raises(GateRefused, match="not worse than the champion: undecided"):
        release(house.request("b", losses=losses, ready_timeout_seconds=10))
    assert measured == [champion] and current_release(layout(), "default") == champion
