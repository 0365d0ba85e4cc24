"""The run file: all problems at once, with field paths; nothing is guessed."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from tuneserve.config import RunFile
from tuneserve.errors import RunFileError
from tuneserve.runfile import load_run_file, parse_run
from tuneserve.sizes import parse_card, parse_size

ROOT = Path(__file__).parents[2]
GOOD: dict[str, Any] = {
    "name": "demo",
    "model": {"base": "org/name"},
    "data": {"train": "train.jsonl"},
}


def wrong(**changes: Any) -> RunFileError:
    data = copy.deepcopy(GOOD)
    for path, value in changes.items():
        node = data
        *parents, last = path.split("__")
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = value
    with pytest.raises(RunFileError) as caught:
        parse_run(data)
    return caught.value


def test_all_wrong_fields_are_reported_at_once_with_their_paths() -> None:
    error = wrong(
        name="Bad Name", train__lora__r=0, data__max_rejected=2, serve__prot=80, quantize__bits=3
    )
    assert set(error.details["fields"]) == {
        "name",
        "train.lora.r",
        "data.max_rejected",
        "serve.prot",
        "quantize.bits",
    }
    assert "5 fields are wrong" in error.message
    assert "serve.prot: there is no such field" in error.message
    assert error.hint and error.exit_status == 2


def test_a_missing_section_is_named() -> None:
    with pytest.raises(RunFileError, match="model: is missing"):
        parse_run({"name": "a", "data": {"train": "x"}})


def test_a_micro_batch_that_does_not_divide_is_refused() -> None:
    error = wrong(train__effective_batch=10, train__micro_batch=4)
    assert "effective_batch 10 is not a multiple of micro_batch 4" in error.message


@pytest.mark.parametrize("size", [0, 48, 256, "64 weights"])
def test_group_sizes_that_vllm_does_not_serve_are_refused(size: Any) -> None:
    assert wrong(quantize__group_size=size).details["fields"] == ["quantize.group_size"]


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("24GiB", 24 * 2**30),
        ("700 MiB", 700 * 2**20),
        ("1.5GB", 1_500_000_000),
        ("24G", 24 * 2**30),
        ("700m", 700 * 2**20),
        ("0.5T", 2**39),
        ("64K", 2**16),
        ("1_000_000_000", 10**9),
        (12, 12),
    ],
)
def test_sizes(text: Any, count: int) -> None:
    assert parse_size(text) == count


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("24", "'24' is 24 bytes, and a card has 1 GiB or more; write 24GiB"),
        ("24564", "write 24564MiB"),  # as nvidia-smi counts
        ("900MiB", "'900MiB' is 943,718,400 bytes, and a card has 1 GiB or more; write 24GiB"),
        ("24 gibi", "is not a size; write it like 24GiB"),
        ("", "is not a size; write it like 24GiB"),  # a shell's variable that is not set
        ("0", "write 24GiB"),
        ("000", "write 24GiB"),
        ("24000TiB", "no card has so many; write 24GiB"),
    ],
)
def test_a_card_of_less_than_a_gib_is_none(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        parse_card(text)


@pytest.mark.parametrize(("text", "size"), [("24G", 24 * 2**30), ("1GiB", 2**30), ("4TiB", 2**42)])
def test_a_cards_size(text: str, size: int) -> None:
    assert parse_card(text) == size


@pytest.mark.parametrize("text", ["24 gibi", "-3GiB", "GiB", "nan", "_1", "1_", "1__0"])
def test_what_is_no_size_is_refused(text: str) -> None:
    assert wrong(merge__max_memory=text).details["fields"] == ["merge.max_memory"]


@pytest.mark.parametrize(
    ("content", "where"),
    [
        ("name: a\nname: b\n", ":2:1: the key 'name' occurs twice"),
        ("name: [a\n", ":2:1: "),
        ("- a\n", "holds a list"),
        ("", "run.yaml: is empty"),
        ("# name: a\n", "run.yaml: is empty"),
    ],
)
def test_broken_yaml_says_where(tmp_path: Path, content: str, where: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(content)
    with pytest.raises(RunFileError) as caught:
        load_run_file(path)
    assert f"{path}" in caught.value.message and where in caught.value.message


def test_wrong_fields_are_named_with_their_places_and_what_was_meant(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(
        "name: a\n"
        "model: {base: org/name}\n"
        "data:\n"
        "  train:\n"
        "    - a.jsonl\n"
        "    - true\n"
        "train:\n"
        "  learning_rat: 1e-4\n"
        "  lora:\n"
        "    r: 0\n"
        "  max_length: 512\n"
        "  zzz: 1\n"
        "serv: {port: 80}\n"
        "gates: {}\n"
    )
    with pytest.raises(RunFileError) as caught:
        load_run_file(path)
    head, *lines = caught.value.message.split("\n  ")
    assert head == f"{path}: 6 fields are wrong"
    said = {line.removeprefix(f"{path}:") for line in lines if line.startswith(f"{path}:")}
    assert len(said) == 6
    assert said >= {
        "8:3: train.learning_rat: there is no such field; did you mean train.learning_rate?",
        "11:3: train.max_length: there is no such field; did you mean data.max_length?",
        "12:3: train.zzz: there is no such field",
        "13:1: serv: there is no such field; did you mean serve?",
    }
    assert {line.split(": ")[:2] == ["10:5", "train.lora.r"] for line in said} == {True, False}
    assert {line.split(": ")[:2] == ["6:7", "data.train.1"] for line in said} == {True, False}


def test_a_missing_field_has_the_place_of_its_section(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("name: a\n\nmodel: {revision: main}\n")
    with pytest.raises(RunFileError) as caught:
        load_run_file(path)
    assert caught.value.message == (
        f"{path}: 2 fields are wrong\n  {path}:3:1: model.base: is missing\n  data: is missing"
    )
    assert caught.value.details == {"fields": ["model.base", "data"]}


def test_lines_are_found_in_a_text_of_aliases_within_aliases(tmp_path: Path) -> None:
    """Forty levels of two would be 10^12 places."""
    path = tmp_path / "run.yaml"
    levels = "".join(f"k{n}: &k{n} [*k{n - 1}, *k{n - 1}]\n" for n in range(1, 41))
    path.write_text(f"k0: &k0 [1, 1]\n{levels}")
    with pytest.raises(RunFileError, match=re.escape(f"{path}:41:1: k40: there is no such field")):
        load_run_file(path)


def test_a_run_without_a_text_has_the_suggestion_alone() -> None:
    error = wrong(serve__prot=80)
    assert error.message.endswith("serve.prot: there is no such field; did you mean serve.port?")


def test_yaml_can_not_make_python_objects(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("name: !!python/object/apply:os.system ['true']\n")
    with pytest.raises(RunFileError, match="could not determine a constructor"):
        load_run_file(path)


def test_a_missing_run_file_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(RunFileError, match="cannot be read") as caught:
        load_run_file(tmp_path / "none.yaml")
    assert caught.value.hint


def test_paths_are_taken_from_the_run_files_folder(tmp_path: Path) -> None:
    (tmp_path / "base").mkdir()
    path = tmp_path / "run.yaml"
    path.write_text(
        "name: a\nmodel: {base: base, chat_template: t.jinja}\n"
        "data: {train: [d/*.jsonl, 's3://bucket/x.jsonl', /abs/x.jsonl]}\nstore: {root: store}\n"
        "engines: {train: {python: venv/bin/python}}\n"
    )
    run = load_run_file(path)
    assert run.model.base == str(tmp_path / "base")
    assert run.model.chat_template == str(tmp_path / "t.jinja")
    assert run.data.train == [f"{tmp_path}/d/*.jsonl", "s3://bucket/x.jsonl", "/abs/x.jsonl"]
    assert run.store.root == str(tmp_path / "store")
    assert run.engines.train.python == str(tmp_path / "venv/bin/python")
    assert run.engines.merge.python is None


def test_a_hub_id_stays_a_hub_id(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("name: a\nmodel: {base: org/name}\ndata: {train: x.jsonl}\n")
    assert load_run_file(path).model.base == "org/name"


def test_every_field_is_described_and_frozen() -> None:
    def walk(model: type[BaseModel], path: str) -> list[str]:
        missing = []
        assert model.model_config["frozen"] and model.model_config["extra"] == "forbid"
        for name, field in model.model_fields.items():
            if not field.description:
                missing.append(f"{path}{name}")
            if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
                missing += walk(field.annotation, f"{path}{name}.")
        return missing

    assert walk(RunFile, "") == []


def test_every_shipped_run_file_loads() -> None:
    files = sorted((ROOT / "deploy" / "runs").glob("*.yaml"))
    assert files
    for file in files:
        run = load_run_file(file)
        assert all(Path(p).exists() for p in [*run.data.train, *run.data.eval]), file


@pytest.mark.parametrize(
    "address",
    [
        "https://me:s3cret@example.org/chats.jsonl",
        "https://hf_s3cret@huggingface.co/org/name",
        "s3://AKIA:s3cret@bucket/chats.jsonl",
        "https://b.s3.amazonaws.com/c.jsonl?X-Amz-Credential=a&X-Amz-Signature=s3cret",
        "https://acc.blob.core.windows.net/c/d.jsonl?sv=2024&sig=s3cret",
        "https://example.org/chats.jsonl?token=s3cret",
        "https://example.org/chats.jsonl?a=b&access_token=s3cret",
        "https://example.org/chats.jsonl?accessToken=s3cret",
        "https://example.org/chats.jsonl?x-api-key=s3cret",
        "https://example.org/chats.jsonl?clientSecret=s3cret",
        "https://example.org/chats.jsonl?secret_key=s3cret",
        "https://example.org/chats.jsonl?key=s3cret",
        "simplecache::https://me:s3cret@example.org/chats.jsonl",
    ],
)
def test_an_address_with_a_secret_is_refused_without_repeating_it(address: str) -> None:
    error = wrong(
        data__train=["fine.jsonl", address],
        data__eval=address,
        model__base=address,
        model__chat_template=address,
        serve__host=address,
        serve__tls_certificate=address,
        serve__tls_key=address,
        engines__quantize={"python": address},
        store__root=address,
        store__remote=address,
        notify__promoted_command=["curl", address],
    )
    fields = [
        "model.base",
        "model.chat_template",
        "data.train.1",
        "data.eval.0",
        "serve.host",
        "serve.tls_certificate",
        "serve.tls_key",
        "engines.quantize.python",
        "store.root",
        "store.remote",
        "notify.promoted_command.1",
    ]
    assert error.message.count("carries a ") == len(fields)
    assert error.details["fields"] == fields
    assert "credentials in the environment" in error.message and "s3cret" not in str(error)
    with pytest.raises(ValueError) as plain:  # as Prefect checks a form
        RunFile.model_validate({**GOOD, "data": {"train": [address]}})
    assert "s3cret" not in str(plain.value)


@pytest.mark.parametrize(
    ("word", "refused"),
    [
        ("--url=https://me:s3cret@example.org/", True),
        ("curl -d x 'https://example.org/?token=s3cret'; echo", True),
        ('wget "https://s3cret@example.org/hook"', True),
        ("curl https://me:$PASSWORD@example.org/?token=${TOKEN}", False),
        ("curl https://example.org/?a=b; mail me@example.org?token=1", False),
    ],
)
def test_a_commands_words_may_hold_addresses(word: str, refused: bool) -> None:
    command = ["sh", "-c", word]
    if refused:
        error = wrong(notify__promoted_command=command)
        assert error.details["fields"] == ["notify.promoted_command.2"]
        assert "credentials in the environment" in error.message and "s3cret" not in str(error)
    else:
        run = parse_run({**GOOD, "notify": {"promoted_command": command}})
        assert run.notify.promoted_command == command


@pytest.mark.parametrize(
    "address",
    [
        "s3://bucket/prefix/*.jsonl",
        "s3://bucket/part-?.jsonl",
        "abfss://container@account.dfs.core.windows.net/chats",
        "hdfs://user@host:8020/chats.jsonl",
        "https://example.org/chats.jsonl?download=1&version=3",
        "hf://datasets/org/name@main/train.jsonl",
        "https://example.org/chats.jsonl?max_tokens=512&tokenizer=llama&tokenized=1",
        "https://example.org/chats.jsonl?password_protected=0",
        "https://example.org/files?key=datasets%2Ftrain.jsonl",
        "https://example.org/files?key=train.jsonl.gz",
        "s3://b/d=0?/tokenizer=llama/*.parquet",
        "s3://b/d=0?/token=llama/*.parquet",
        "me:you@home.jsonl",
        "http://[::1/broken",
    ],
)
def test_an_address_without_a_secret_is_taken_as_it_is(address: str) -> None:
    run = parse_run({**GOOD, "data": {"train": address}, "store": {"remote": address}})
    assert run.data.train == [address] and run.store.remote == address


@pytest.mark.parametrize("address", ["s3://bucket/store", "s3://AKIAxyz@bucket", "file:///store"])
def test_an_address_is_no_folder_for_a_store(address: str) -> None:
    error = wrong(store__root=address)
    assert error.details["fields"] == ["store.root"]
    assert "store.root: takes a folder of this machine, not an address; store.remote" in str(error)
    assert address not in str(error)


@pytest.mark.parametrize("root", ["store", "~/my store", "/a:b/c", "a@b", "c:/store"])
def test_a_folder_for_a_store(root: str) -> None:
    assert parse_run({**GOOD, "store": {"root": root}}).store.root == root
