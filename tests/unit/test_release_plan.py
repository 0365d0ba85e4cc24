"""What is decided before a server starts: command, capacity, model folder, sockets, key."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tuneserve.config import GatesSection, ServeSection
from tuneserve.errors import InputError, ModelError, OutOfMemory, RunFileError
from tuneserve.release import keys, state, vllm_command
from tuneserve.release.capacity import (
    CPU_PROCESSES_BYTES,
    Capacity,
    FreeMemory,
    check_room,
    plan_capacity,
    wait_for_room,
)
from tuneserve.release.heldout import Row
from tuneserve.release.hold import expected_seconds
from tuneserve.release.layout import choose_sockets_folder, layout, point
from tuneserve.release.model_files import read_model, write_generation
from tuneserve.release.request import ReleaseRequest, check_tools
from tuneserve.release.supervisor import clean_environment

GIB = 2**30


def model(folder: Path, **config: Any) -> Path:
    folder.mkdir(exist_ok=True)
    smollm = {
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "hidden_size": 576,
        "max_position_embeddings": 8192,
        "eos_token_id": 2,
        "dtype": "bfloat16",
        **config,
    }
    (folder / "config.json").write_text(json.dumps(smollm))
    (folder / "generation_config.json").write_text('{"eos_token_id": [2, 7], "temperature": 0.2}')
    (folder / "tokenizer_config.json").write_text("{}")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "model.safetensors").write_bytes(b"\0" * 1000)
    return folder


def cpu(free_gib: float) -> FreeMemory:
    return FreeMemory("cpu", int(free_gib * GIB), 24 * GIB)


def test_model_facts(tmp_path: Path) -> None:
    facts = read_model(model(tmp_path / "m", quantization_config={"quant_method": "gptq"}))
    # 2 x 30 layers x 3 heads x 64 numbers x 2 bytes
    assert facts.kv_bytes_per_token == 23040
    assert facts.stop_ids == (2, 7)
    assert facts.sampling == {"temperature": 0.2}
    assert facts.quantization == "gptq"
    assert facts.weights_bytes == 1000
    assert facts.chat_template == tmp_path / "m/chat_template.jinja"


def test_end_ids_that_the_server_would_not_find_are_written_for_it(tmp_path: Path) -> None:
    folder = model(tmp_path / "m", eos_token_id=[2, 9], text_config=None)
    facts = read_model(folder)
    assert facts.stop_ids == (2, 7, 9)
    release = tmp_path / "r0001"
    assert write_generation(facts, release) == release
    written = json.loads((release / "generation_config.json").read_text())
    assert written == {"eos_token_id": [2, 7, 9], "temperature": 0.2}
    room = Capacity(64, 1, 1, 0, "cpu")
    arguments = vllm_command.serving_arguments(facts, ServeSection(), room, False, release)
    assert arguments[arguments.index("--generation-config") + 1] == str(release)
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == [2, 7]
    # Without the file vLLM takes those of config.json; with all ids in it, those of the file.
    (folder / "generation_config.json").unlink()
    assert write_generation(read_model(folder), tmp_path / "r0002") is None
    (folder / "generation_config.json").write_text('{"eos_token_id": [9, 2, 5]}')
    assert write_generation(read_model(folder), tmp_path / "r0002") is None
    (folder / "generation_config.json").write_text("{}")
    assert read_model(folder).generation == {"eos_token_id": [2, 9]}
    assert not (tmp_path / "r0002").exists()


def test_vllm_reads_the_end_ids_that_were_written(tmp_path: Path) -> None:
    """By the function whose result it takes a request's stop tokens from."""
    config = pytest.importorskip("vllm.transformers_utils.config")

    def stops(folder: Path | None) -> Any:
        found = config.try_get_generation_config(str(folder), trust_remote_code=False)
        return found.to_diff_dict()["eos_token_id"]

    facts = read_model(model(tmp_path / "m", eos_token_id=9))
    assert stops(facts.path) == [2, 7]  # vLLM does not look into config.json beside it
    assert stops(write_generation(facts, tmp_path / "r")) == [2, 7, 9]


def test_a_model_without_a_template_is_refused(tmp_path: Path) -> None:
    """E02: every chat request would be refused by a server that says it is healthy."""
    folder = model(tmp_path / "m")
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(ModelError, match="no chat template"):
        read_model(folder)
    (folder / "tokenizer_config.json").write_text('{"chat_template": "{{ messages }}"}')
    assert read_model(folder).chat_template is None


def test_pickles_and_remote_code_are_refused(tmp_path: Path) -> None:
    folder = model(tmp_path / "m", auto_map={"AutoModel": "evil.Model"})
    (folder / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ModelError, match=r"pytorch_model.bin is a pickle; config.json names code"):
        read_model(folder)
    (folder / "pytorch_model.bin").unlink()
    with pytest.raises(ModelError, match="auto_map"):
        read_model(folder)
    assert read_model(folder, trust_remote_code=True).has_template


def test_the_command(tmp_path: Path) -> None:
    facts = read_model(model(tmp_path / "m"))
    sampling = {"top_k": 20, "min_p": 0.05, "repetition_penalty": 1.1, "max_tokens": 256}
    serve = ServeSection(name="moss", temperature=0.0, drain_timeout_seconds=33, **sampling)
    room = Capacity(2048, 512 * 2**20, 8, 0, "cpu")
    socket_path = Path("/run/ts/r/r0001-aa/s")
    built = vllm_command.build(
        facts, serve, room, release="r0001-aa", socket=socket_path, python="/usr/bin/python3"
    )
    given = dict(zip(built.arguments, built.arguments[1:], strict=False))
    assert built.arguments[:3] == ["/usr/bin/python3", "-m", "vllm.entrypoints.openai.api_server"]
    assert given["--uds"] == str(socket_path)
    assert given["--served-model-name"] == "moss"
    assert given["--model"] == str(facts.path)
    assert given["--max-model-len"] == "2048"
    assert given["--kv-cache-memory-bytes"] == str(512 * 2**20)
    assert given["--shutdown-timeout"] == "33"
    assert given["--chat-template"] == str(facts.chat_template)
    assert given["--load-format"] == "safetensors"
    assert given["--generation-config"] == str(facts.path)  # sampling and end ids
    overrides = {
        "temperature": 0.0,
        "top_k": 20,
        "min_p": 0.05,
        "repetition_penalty": 1.1,
        "max_new_tokens": 256,
    }
    assert json.loads(given["--override-generation-config"]) == overrides
    assert "--enforce-eager" in built.arguments
    assert "--quantization" not in built.arguments  # read from the checkpoint, never contradicted
    assert not {"--tool-call-parser", "--enable-auto-tool-choice"} & set(built.arguments)
    assert "--trust-remote-code" not in built.arguments
    assert built.environment["VLLM_NO_USAGE_STATS"] == "1"
    assert built.environment["DO_NOT_TRACK"] == "1"
    assert built.environment["HF_HUB_OFFLINE"] == "1"
    assert built.environment["VLLM_CPU_INT4_W4A8"] == "0"
    assert built.environment["TUNESERVE_RELEASE"] == "r0001-aa"
    assert built.environment["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    bound = vllm_command.environment("r", room, 8, {"VLLM_CPU_OMP_THREADS_BIND": "0-3"})
    assert "OMP_NUM_THREADS" not in bound and "VLLM_CPU_OMP_THREADS_BIND" not in bound
    assert vllm_command.environment("r", room, 8, {})["OMP_NUM_THREADS"] == "7"
    assert vllm_command.sampling_defaults(facts, serve) == overrides
    assert vllm_command.sampling_defaults(facts, ServeSection()) == {"temperature": 0.2}


def test_a_server_of_several_gpus(tmp_path: Path) -> None:
    facts = read_model(model(tmp_path / "m", intermediate_size=1536, vocab_size=49152))
    serve = ServeSection(tensor_parallel=3, max_model_len=1024)
    room = Capacity(64, 1, 1, 0, "gpu")
    arguments = vllm_command.serving_arguments(facts, serve, room, False)
    assert arguments[arguments.index("--tensor-parallel-size") + 1] == "3"
    alone = vllm_command.serving_arguments(facts, ServeSection(), room, False)
    assert "--tensor-parallel-size" not in alone
    free = FreeMemory("gpu", 20 * GIB, 24 * GIB)
    one = plan_capacity(facts, ServeSection(max_model_len=1024), {}, free)
    three = plan_capacity(facts, serve, {}, free)
    assert three.kv_cache_bytes == pytest.approx(one.kv_cache_bytes / 3)  # one of 3 KV heads each
    with pytest.raises(RunFileError, match="9 attention heads cannot be shared evenly"):
        plan_capacity(facts, ServeSection(tensor_parallel=2), {}, free)
    with pytest.raises(RunFileError, match="there is none"):
        plan_capacity(facts, serve, {}, cpu(20))


def test_a_candidate_asks_for_no_more_of_a_gpu_than_it_needs(tmp_path: Path) -> None:
    # vLLM's default would ask for 92 % of the card, which the champion already uses.
    facts = replace(read_model(model(tmp_path / "m")), weights_bytes=6 * GIB)
    hints = {"kv_cache_bytes": int(1.5 * GIB)}
    room = plan_capacity(facts, ServeSection(), hints, FreeMemory("gpu", 12 * GIB, 40 * GIB))
    assert room.device_share == 0.25  # 6 of weights, 2.5 of workspace, 1.5 of KV cache, of 40
    large = plan_capacity(facts, ServeSection(), hints, FreeMemory("gpu", 12 * GIB, 90 * GIB))
    assert large.device_share == 0.125  # the same, and 3.75 of workspace, of 90
    options: dict[str, Any] = {"release": "r", "socket": Path("/s"), "python": "p"}
    built = vllm_command.build(facts, ServeSection(), room, **options)
    at = built.arguments.index("--gpu-memory-utilization")
    assert built.arguments[at + 1] == "0.250"
    on_cpu = replace(room, device="cpu")
    assert (
        "--gpu-memory-utilization"
        not in vllm_command.build(facts, ServeSection(), on_cpu, **options).arguments
    )


def test_tool_flags_come_together_and_gpu_compiles(tmp_path: Path) -> None:
    """E08: one flag without the other makes every request with tools fail."""
    facts = read_model(model(tmp_path / "m"))
    serve = ServeSection(tool_parser="hermes")
    arguments = vllm_command.serving_arguments(facts, serve, Capacity(64, 1, 1, 0, "gpu"), True)
    assert "--enable-auto-tool-choice" in arguments
    assert arguments[arguments.index("--tool-call-parser") + 1] == "hermes"
    assert "--enforce-eager" not in arguments
    assert "--trust-remote-code" in arguments


def test_a_socket_path_over_the_kernels_limit_is_refused(tmp_path: Path) -> None:
    facts = read_model(model(tmp_path / "m"))
    with pytest.raises(RunFileError, match="120 bytes"):
        vllm_command.build(
            facts,
            ServeSection(),
            Capacity(64, 1, 1, 0, "cpu"),
            release="r",
            socket=Path("/" + "x" * 119),
            python="p",
        )


def test_data_with_tools_needs_a_parser() -> None:
    """E08."""
    row = Row([1], [-100], "t.jsonl:4", [{"role": "user", "content": "x"}], [{"type": "function"}])
    with pytest.raises(RunFileError, match=r"t.jsonl:4 has tools"):
        check_tools([row], ServeSection())
    check_tools([row], ServeSection(tool_parser="hermes"))


def test_capacity_takes_the_plans_numbers(tmp_path: Path) -> None:
    facts = read_model(model(tmp_path / "m"))
    hints = {"max_model_len": 1024, "kv_cache_bytes": 100 * 2**20}
    room = plan_capacity(facts, ServeSection(), hints, cpu(20))
    assert (room.max_model_len, room.kv_cache_bytes) == (1024, 100 * 2**20)
    own = plan_capacity(facts, ServeSection(max_model_len=256), hints, cpu(20))
    assert own.max_model_len == 256


def test_capacity_has_room_for_the_chats_asked_for(tmp_path: Path) -> None:
    facts = read_model(model(tmp_path / "m"))
    room = plan_capacity(facts, ServeSection(max_concurrent_chats=4), {}, cpu(20))
    # 2048 tokens and one block more, 23,040 bytes each, four times
    assert room.kv_cache_bytes == 4 * 2176 * 23040
    assert room.chats == 4.0
    assert room.needed_bytes == 1000 + CPU_PROCESSES_BYTES + room.kv_cache_bytes
    tight = plan_capacity(facts, ServeSection(max_concurrent_chats=4), {}, cpu(2.9))
    assert 1 <= tight.chats < 4


def test_too_long_a_context_says_what_fits(tmp_path: Path) -> None:
    """E01."""
    facts = read_model(model(tmp_path / "m", max_position_embeddings=200_000))
    with pytest.raises(OutOfMemory) as caught:
        plan_capacity(facts, ServeSection(max_model_len=100_000), {}, cpu(3.0))
    fits = caught.value.details["fits_tokens"]
    assert 0 < fits < 100_000 and str(fits) in caught.value.hint
    room = plan_capacity(facts, ServeSection(max_model_len=fits), {}, cpu(3.0))
    assert room.max_model_len == fits
    with pytest.raises(ModelError, match="max_position_embeddings"):
        plan_capacity(
            read_model(model(tmp_path / "n")), ServeSection(max_model_len=9000), {}, cpu(20)
        )


def test_where_no_length_fits_no_length_is_advised(tmp_path: Path) -> None:
    """E01: 2 x 4000 layers x 64 heads x 128 numbers x 2 bytes are 125 MiB a token."""
    wide = {"num_attention_heads": 64, "num_key_value_heads": 64, "hidden_size": 8192}
    facts = read_model(model(tmp_path / "m", num_hidden_layers=4000, **wide))
    with pytest.raises(OutOfMemory, match="one chat of 2048 tokens needs 265.6 GiB") as caught:
        plan_capacity(facts, ServeSection(), {}, cpu(20))
    assert caught.value.details["fits_tokens"] == 0
    assert caught.value.hint == (
        "free memory, or serve a smaller model; no serve.max_model_len is short enough"
    )
    assert caught.value.expected == "265.6 GiB of room"


def test_memory_held_by_a_dying_process_is_waited_for(caplog: pytest.LogCaptureFixture) -> None:
    """E07."""
    caplog.set_level("INFO")
    need = Capacity(64, 1, 1, 10 * GIB, "gpu")
    held = FreeMemory("gpu", 2 * GIB, 80 * GIB, ("process 7 (python): 70 GiB",))
    readings = [held, held, FreeMemory("gpu", 60 * GIB, 80 * GIB)]
    wait_for_room(
        need,
        lambda: readings.pop(0),
        limit_seconds=60,
        rollout="blue_green",
        beside=None,
        sleep=lambda _: None,
    )
    assert not readings
    assert "held by process 7 (python): 70 GiB" in caplog.text


def test_memory_that_does_not_come_back_is_refused_with_numbers_and_holders() -> None:
    need = Capacity(64, 1, 1, 10 * GIB, "gpu")
    held = FreeMemory("gpu", 2 * GIB, 80 * GIB, ("process 7 (python): 70 GiB",))
    with pytest.raises(OutOfMemory, match=r"10.0 GiB and 2.0 GiB of 80.0 GiB GPU.*process 7") as e:
        wait_for_room(
            need,
            lambda: held,
            limit_seconds=3,
            rollout="blue_green",
            beside="r1",
            sleep=lambda _: None,
        )
    assert "rollout: hold" in e.value.hint
    check_room(need, FreeMemory("gpu", 10 * GIB, 80 * GIB), rollout="hold", beside=None)


def test_sockets_go_where_their_paths_are_short_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert choose_sockets_folder(Path("/srv/ts/run")) == Path("/srv/ts/run/sockets")
    monkeypatch.setattr("tempfile.gettempdir", lambda: "/tmp")
    far = choose_sockets_folder(Path("/srv") / ("x" * 80))
    assert far.parent == Path("/tmp") and far.name.startswith(f"tuneserve-{os.geteuid()}-")
    monkeypatch.setattr("tempfile.gettempdir", lambda: "/" + "y" * 90)
    with pytest.raises(InputError, match="TMPDIR|at most 107"):
        choose_sockets_folder(Path("/srv") / ("x" * 80))


def test_socket_folder_is_private_and_remembered(tmp_path: Path) -> None:
    places = layout(tmp_path / "run")
    assert places.sockets.stat().st_mode & 0o777 == 0o700
    assert layout(tmp_path / "run") == places
    places.sockets.chmod(0o755)
    with pytest.raises(InputError, match="mode 755"):
        layout(tmp_path / "run")


def test_a_link_is_never_missing(tmp_path: Path) -> None:
    link = tmp_path / "link"
    point(link, "one")
    point(link, "two")
    assert os.readlink(link) == "two"
    assert [entry.name for entry in tmp_path.iterdir()] == ["link"]


def test_the_key_follows_what_answers_and_not_where(tmp_path: Path) -> None:
    folder = model(tmp_path / "m")
    key = ReleaseRequest(folder, serve=ServeSection(port=1000)).key
    elsewhere = ServeSection(port=2000, rollout="hold", hold_seconds=7)
    assert ReleaseRequest(folder, serve=elsewhere).key == key
    assert ReleaseRequest(folder, serve=ServeSection(top_k=3)).key != key
    assert ReleaseRequest(folder, serve=ServeSection(temperature=0.5)).key != key
    assert ReleaseRequest(folder, gates=GatesSection(must_beat_base=False)).key != key
    (folder / "model.safetensors").write_bytes(b"\1" * 1000)
    assert ReleaseRequest(folder, serve=ServeSection(port=1000)).key != key


def test_daemons_get_no_secrets(tmp_path: Path) -> None:
    places = layout(tmp_path)
    left = {"PATH": "/bin", "TUNESERVE_RUN_ROOT": str(tmp_path)}
    given = {"PATH": "/bin", "MY_API_KEY": "x", "HF_TOKEN": "y", "DB_PASSWORD": "z"}
    assert clean_environment(given, places) == left
    key = keys.add_key(places.keys, "LLM_KEY")
    named = {"LLM_KEY": "a newer one", "DOOR": key, "HEADER": f"Authorization: Bearer {key}"}
    assert clean_environment({**given, **named}, places) == left


def test_requests_are_held_as_long_as_a_switch_may_take() -> None:
    assert ServeSection().longest_hold_seconds == 120 + 900
    serve = ServeSection(drain_timeout_seconds=0, ready_timeout_seconds=1800)
    assert serve.longest_hold_seconds == 1800
    assert ServeSection(hold_seconds=60).longest_hold_seconds == 60


def test_how_long_a_switch_will_take_is_what_the_last_one_took() -> None:
    known = state.State()
    first, second, third = (known.add("moss", f"{n}" * 8, "/m", "") for n in range(3))
    assert expected_seconds(known, "moss") == 0.0
    first.seconds_to_ready, second.seconds_to_ready, second.seconds_held = 40.0, 50.0, 70.0
    known.names["moss"] = state.Name(active=first.id)
    assert expected_seconds(known, "moss") == 40.0
    known.names["moss"] = state.Name(active=third.id, history=[{"release": second.id}])
    assert expected_seconds(known, "moss") == 70.0
