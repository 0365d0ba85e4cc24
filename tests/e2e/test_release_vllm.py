"""Releases with a real vLLM: its proofs, and the clients people use."""

from __future__ import annotations

import functools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pyarrow.parquet as parquet
import pytest

from pico import conversations
from tuneserve.config import GatesSection, ServeSection
from tuneserve.data.stage import run
from tuneserve.release import control
from tuneserve.release.layout import layout
from tuneserve.release.parity import tokenize
from tuneserve.release.request import ReleaseRequest
from tuneserve.release.sessions import session_members
from tuneserve.release.stage import release
from tuneserve.release.supervisor import Keeper, server_program
from tuneserve.release.unixhttp import ask
from tuneserve.runfile import parse_run
from tuneserve.stages import StageContext

pytestmark = pytest.mark.slow

# Ids, labels and the loss of the model on them, by transformers alone.
_REFERENCE = """
import json, sys
import pyarrow as pa, pyarrow.parquet as parquet, torch
from pathlib import Path
from transformers import AutoModelForCausalLM, AutoTokenizer
model_path, chats_path, out = sys.argv[1], sys.argv[2], Path(sys.argv[3])
tokenizer = AutoTokenizer.from_pretrained(model_path)
model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
rows, chats, nats, tokens, per_row = [], [], 0.0, 0, []
for number, messages in enumerate(json.loads(Path(chats_path).read_text())):
    render = lambda m, **o: tokenizer.apply_chat_template(m, tokenize=True, return_dict=False, **o)
    ids, labels = render(messages), None
    labels = [-100] * len(ids)
    for turn, message in enumerate(messages):
        if message["role"] == "assistant":
            start = len(render(messages[:turn], add_generation_prompt=True))
            end = len(render(messages[: turn + 1]))
            while tokenizer.decode(ids[end - 1 : end]).isspace():
                end -= 1
            labels[start:end] = ids[start:end]
    before = (nats, tokens)
    with torch.no_grad():
        logprobs = model(torch.tensor([ids])).logits[0].double().log_softmax(-1)
    for position in range(1, len(ids)):
        if labels[position] != -100:
            nats -= logprobs[position - 1, labels[position]].item()
            tokens += 1
    source = f"chats.jsonl:{number + 1}"
    per_row.append((source, nats - before[0], tokens - before[1]))
    rows.append({"input_ids": ids, "labels": labels, "source": source})
    chats.append({"source": source, "messages": messages, "tools": None})
schema = pa.schema([("input_ids", pa.list_(pa.int32())), ("labels", pa.list_(pa.int32())),
                    ("source", pa.string())])
parquet.write_table(pa.Table.from_pylist(rows, schema=schema), out / "eval.parquet")
(out / "eval_messages.jsonl").write_text("".join(json.dumps(c) + "\\n" for c in chats))
losses = {"rows": len(rows), "supervised_tokens": tokens, "base": 6.2, "adapter": None,
          "merged": nats / tokens,
          "per_row": {"source": [s for s, _, _ in per_row], "merged": [n for _, n, _ in per_row],
                      "base": [6.2 * t for _, _, t in per_row]}}
(out / "losses.json").write_text(json.dumps(losses))
"""


# An adapter as PEFT saves it, with updates that leave the model what it was.
_ADAPTER = """
import sys
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM
torch.manual_seed(5)
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
model = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))
for name, parameter in model.named_parameters():
    if "lora_B" in name:
        parameter.data.mul_(0.02)
model.save_pretrained(sys.argv[2])
"""


def merged(base: Path, folder: Path) -> Path:
    """The base with an adapter merged into it by the command that users run."""
    adapter, out = folder / "adapter", folder / "merged"
    offline = {**os.environ, "HF_HUB_OFFLINE": "1"}
    make = [sys.executable, "-c", _ADAPTER, str(base), str(adapter)]
    merge = [sys.executable, "-m", "tuneserve", "merge", "--base", str(base)]
    merge += ["--adapter", str(adapter), "--out", str(out), "--tokenizer-from", str(base)]
    for command in (make, merge):
        done = subprocess.run(command, capture_output=True, text=True, env=offline, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
    return out


class House:
    """A run root with a pico model, merged by us, and its held-out rows."""

    def __init__(self, folder: Path, pico: Path) -> None:
        self.folder, self.pico = folder, pico
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = int(probe.getsockname()[1])
        self.facts = folder / "facts"
        self.facts.mkdir()
        chats = folder / "chats.json"
        chats.write_text(json.dumps(conversations(8, seed=9)))
        subprocess.run(
            [sys.executable, "-c", _REFERENCE, str(pico), str(chats), str(self.facts)],
            check=True,
            capture_output=True,
            env={**os.environ, "HF_HUB_OFFLINE": "1"},
        )

    def request(self, model: str, **changes: Any) -> ReleaseRequest:
        serve = {
            "port": self.port,
            "max_model_len": 512,
            "drain_timeout_seconds": 60,
            "tool_parser": "hermes",
        }
        return ReleaseRequest(
            model=self.pico,
            artifact=f"merged-{model}",
            serve=ServeSection.model_validate({**serve, **changes}),
            gates=GatesSection(parity_chats=4),
            dataset=self.facts,
            evaluation=self.facts,
        )

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@pytest.fixture(scope="module")
def house(pico_model: Path) -> Iterator[House]:
    folder = Path(tempfile.mkdtemp(prefix="ts-"))
    before = os.environ.get("TUNESERVE_HOME")
    os.environ["TUNESERVE_HOME"] = str(folder / "home")
    try:
        yield House(folder, merged(pico_model, folder))
    finally:
        control.down()
        if before is None:
            del os.environ["TUNESERVE_HOME"]
        else:
            os.environ["TUNESERVE_HOME"] = before
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def first(house: House) -> dict[str, Any]:
    return release(house.request("first"))


def wait_for(condition: Callable[[], Any], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.1)


def test_proofs_hold_against_the_real_server(first: dict[str, Any]) -> None:
    assert first["parity"]["chats"] == 4 and first["parity"]["whole"] == 4
    losses = first["losses"]
    # the same ids, float32 in transformers against bfloat16 in vLLM
    assert losses["served"] == pytest.approx(losses["merged"], rel=0.03)
    passed = {gate["name"] for gate in first["gates"] if gate["decision"] == "passed"}
    assert {"better than base", "served keeps the tuning", "answers end", "no loops"} <= passed
    assert len(passed) == len(first["gates"])
    assert first["memory_bytes"] > 2**29


def test_openai_client_unchanged(house: House, first: dict[str, Any]) -> None:
    client = openai.OpenAI(base_url=first["endpoint"], api_key="none", max_retries=0)
    chat: Any = [{"role": "user", "content": "What colour is the lamp?"}]
    assert [model.id for model in client.models.list()] == ["default"]
    create: Any = client.chat.completions.create
    answer = create(model="default", messages=chat, temperature=0, logprobs=True, top_logprobs=3)
    choice = answer.choices[0]
    assert choice.finish_reason == "stop" and choice.message.content
    assert choice.logprobs and choice.logprobs.content
    assert len(choice.logprobs.content[0].top_logprobs) == 3
    parts = list(create(model="default", messages=chat, temperature=0, stream=True))
    text = "".join(p.choices[0].delta.content or "" for p in parts if p.choices)
    assert text == choice.message.content
    # A model this small would fill free JSON with line breaks until its tokens are spent.
    bias = {str(id): -100 for id in blanks(house, first["release"])}
    create = functools.partial(create, temperature=0, max_tokens=100, logit_bias=bias)
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    form: Any = {"type": "json_schema", "json_schema": {"name": "o", "schema": schema}}
    made = create(model="default", messages=chat, response_format=form)
    assert isinstance(json.loads(made.choices[0].message.content or "")["ok"], bool)
    function = {"name": "look", "parameters": schema, "strict": True}
    tools: Any = [{"type": "function", "function": function}]
    called = create(model="default", messages=chat, tools=tools, tool_choice="required")
    calls: Any = called.choices[0].message.tool_calls
    assert called.choices[0].finish_reason == "tool_calls"
    assert calls[0].function.name == "look" and "ok" in json.loads(calls[0].function.arguments)
    assert create(model="default", messages=chat, tools=tools).choices
    with pytest.raises(openai.NotFoundError):
        create(model="somebody-else", messages=chat)


@pytest.mark.full
def test_end_ids_and_sampling_defaults_reach_the_server(
    house: House, first: dict[str, Any], tmp_path: Path
) -> None:
    """An answer ends at an id that config.json alone names; serve.max_tokens holds for everyone."""

    def ask_for_fifty(endpoint: str, name: str, **more: Any) -> dict[str, Any]:
        chat = [{"role": "user", "content": "What colour is the lamp?"}]
        body = {"model": name, "messages": chat, "max_tokens": 50, "return_token_ids": True, **more}
        answer = httpx.post(f"{endpoint}/chat/completions", json=body, timeout=120)
        return dict(answer.raise_for_status().json()["choices"][0])

    whole = ask_for_fifty(first["endpoint"], "default", temperature=0)["token_ids"]
    assert len(whole) > 3
    model = tmp_path / "model"
    shutil.copytree(house.pico, model)
    config = json.loads((model / "config.json").read_text())
    own = {"eos_token_id": config["eos_token_id"]}
    (model / "generation_config.json").write_text(json.dumps(own))
    config["eos_token_id"] = [own["eos_token_id"], whole[2]]
    (model / "config.json").write_text(json.dumps(config))
    sampling = {"temperature": 0.0, "top_k": 5, "min_p": 0.1, "repetition_penalty": 1.0}
    serve = {"name": "ends", "port": house.port, "max_model_len": 512, "max_tokens": 7, **sampling}
    made = release(ReleaseRequest(model, serve=ServeSection.model_validate(serve)))
    try:
        ended = ask_for_fifty(made["endpoint"], "ends")
        assert ended["finish_reason"] == "stop"
        assert ended["token_ids"] == whole[: whole.index(whole[2]) + 1]
        long = ask_for_fifty(made["endpoint"], "ends", ignore_eos=True)
        assert (long["finish_reason"], len(long["token_ids"])) == ("length", 7)
    finally:
        control.down("ends")


def test_langchain_unchanged(house: House, first: dict[str, Any]) -> None:
    from langchain_openai import ChatOpenAI

    options: dict[str, Any] = {"temperature": 0, "max_retries": 0, "api_key": "none"}
    model = ChatOpenAI(model="default", base_url=first["endpoint"], **options)
    question = "What colour is the lamp?"
    answer = model.invoke(question)
    assert answer.content and answer.response_metadata["finish_reason"] == "stop"
    assert answer.usage_metadata and answer.usage_metadata["output_tokens"] > 1
    assert "".join(str(part.content) for part in model.stream(question)) == answer.content
    bias: dict[int, int] = {id: -100 for id in blanks(house, first["release"])}
    short = ChatOpenAI(
        model="default", base_url=first["endpoint"], max_tokens=100, logit_bias=bias, **options
    )
    schema = {
        "title": "look",
        "description": "Look at it.",
        "type": "object",
        "properties": {"ok": {"type": "boolean"}},
        "required": ["ok"],
        "additionalProperties": False,
    }
    made: Any = short.with_structured_output(schema, method="json_schema").invoke(question)
    assert isinstance(made["ok"], bool)
    called: Any = short.bind_tools([schema], tool_choice="required", strict=True).invoke(question)
    assert called.tool_calls[0]["name"] == "look" and "ok" in called.tool_calls[0]["args"]


def blanks(house: House, release_id: str) -> list[int]:
    body = {"model": "default", "prompt": "\n \t\r", "add_special_tokens": False}
    socket_path = layout().socket(release_id)
    return list(ask(socket_path, "POST", "/tokenize", body, timeout_seconds=30).json()["tokens"])


def test_conversations_with_tools_have_the_servers_ids(
    house: House, first: dict[str, Any], tmp_path: Path
) -> None:
    """What the data gate made of tools, calls, results and text parts, against the server's own."""
    lamp = {"name": "lamp", "parameters": {"type": "object", "properties": {"on": {}}}}
    call = {
        "name": "lamp",
        "arguments": '{"on": true, "id": "007", "in": {"room": "caf\u00e9"}}',
    }
    parts = [{"type": "text", "text": "Light,"}, {"type": "text", "text": "please."}]
    turns: list[dict[str, Any]] = [
        {"role": "system", "content": "You switch lamps."},
        {"role": "user", "content": parts},
        {"role": "assistant", "tool_calls": [{"id": "a1", "type": "function", "function": call}]},
        {"role": "tool", "tool_call_id": "a1", "content": '{"done": true}'},
        {"role": "assistant", "content": "It is on."},
    ]
    rows = [{"messages": turns, "tools": [{"type": "function", "function": lamp}]}]
    rows.append({"messages": turns[1:2] + turns[4:], "tools": rows[0]["tools"]})
    rows.append({"messages": turns[1:2] + turns[4:]})
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    spec = {
        "name": "tools",
        "model": {"base": str(house.pico)},
        "data": {"train": [str(data)], "eval_fraction": 0, "max_length": 512},
    }
    out, work = tmp_path / "out", tmp_path / "work"
    out.mkdir()
    work.mkdir()
    run(StageContext(parse_run(spec), house.pico, {}, out, work))
    ids = parquet.read_table(out / "train.parquet")["input_ids"].to_pylist()
    sent = [json.loads(line) for line in (out / "train_messages.jsonl").read_text().splitlines()]
    socket_path = layout().socket(first["release"])
    for row, chat, original in zip(ids, sent, rows, strict=True):
        tools = chat["tools"]
        assert tokenize(socket_path, "default", chat["messages"], tools, generate=False) == row
        # The user's own messages, as an application would send them.
        turns = original["messages"]
        assert tokenize(socket_path, "default", turns, original.get("tools"), generate=False) == row


def test_a_client_cannot_bring_its_own_template(house: House, first: dict[str, Any]) -> None:
    body = {
        "model": "default",
        "messages": [{"role": "user", "content": "x"}],
        "chat_template": "{{ ''.__class__.__mro__ }}",
    }
    assert httpx.post(f"{house.url}/v1/chat/completions", json=body, timeout=60).status_code == 400


def test_a_dead_engine_core_is_noticed(house: House, first: dict[str, Any]) -> None:
    keeper = Keeper(layout())
    program = server_program(first["release"])
    session = keeper._session(program)
    assert session is not None
    core = [
        pid
        for pid in session_members(session)
        if b"EngineCore" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]
    os.kill(core[0], signal.SIGKILL)
    wait_for(lambda: not session_members(session), 60)
    wait_for(lambda: keeper._session(program) != session, 30)
