"""Requests that wait at a switch: how long, and what is said when that is not long enough."""

from __future__ import annotations

import math
import re
import threading

import httpx
import pytest

from release_house import House, keeper, wait_for
from tuneserve.release import control, promote, state
from tuneserve.release.layout import layout
from tuneserve.release.stage import release
from tuneserve.release.supervisor import GATEWAY


def held_seconds() -> int:
    return int(state.read(layout()).gateway["hold_seconds"])


def test_a_hold_that_is_too_short_is_said_before_and_when_it_passes(
    house: House, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    answers: list[httpx.Response] = []
    asking = threading.Thread(target=lambda: answers.append(house.chat()))
    hold = promote.Servers.hold

    def hold_and_ask(self: promote.Servers, name: str) -> None:
        hold(self, name)
        if not asking.ident:
            asking.start()

    monkeypatch.setattr(promote.Servers, "hold", hold_and_ask)
    first = release(house.request("a", hold_seconds=1))["release"]
    slow = {"rollout": "hold", "hold_seconds": 1, "behaviour": {"start_seconds": 4}}
    second = release(house.request("b", **slow))["release"]
    asking.join()
    assert answers[0].status_code == 503
    assert "`tuneserve status`" in answers[0].json()["error"]["message"]
    assert "requests have been held for 1 s (serve.hold_seconds)" in caplog.text
    took = state.read(layout()).releases[second].seconds_held
    assert took >= 4
    caplog.clear()
    control.rollback()  # it too stops the other one first
    found = re.search(r"default: the last switch took .* serve.hold_seconds to (\d+) ", caplog.text)
    assert found and int(found[1]) == math.ceil(1.25 * took)
    assert house.chat().headers["x-tuneserve-release"] == first
    caplog.clear()
    release(house.request("b", **slow | {"hold_seconds": 200}))
    assert "hold_seconds" not in caplog.text
    assert held_seconds() == 200


def test_names_share_the_longest_hold_and_the_gateway_goes_on(house: House) -> None:
    release(house.request("a"))
    assert held_seconds() == 20 + 30  # drain and ready
    session = keeper()._session(GATEWAY)
    release(house.request("b", name="other", hold_seconds=5))
    assert held_seconds() == 50 and keeper()._session(GATEWAY) == session
    release(house.request("b", name="other", hold_seconds=70))
    assert held_seconds() == 70 and keeper()._session(GATEWAY) != session
    control.down("other")
    release(house.request("a", hold_seconds=10))
    assert held_seconds() == 10  # nobody else's requests are held


def test_an_answer_under_way_ends_before_the_gateway_does(house: House) -> None:
    release(house.request(behaviour={"token_seconds": 0.1}))
    answers: list[httpx.Response] = []
    asking = threading.Thread(target=lambda: answers.append(house.chat(70)))
    asking.start()
    wait_for(lambda: control.status()["names"]["default"]["requests_running"] == 1)
    keeper().stop(GATEWAY)
    asking.join()
    assert answers[0].json()["usage"]["completion_tokens"] == 70
