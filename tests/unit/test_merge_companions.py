"""Small files of a merged folder: which source wins, what is repaired, what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tuneserve.errors import AdapterError, ModelError
from tuneserve.merge.companions import Companions, check_vocabulary, collect
from tuneserve.merge.vocabulary import read_vocabulary

CONFIG = {"model_type": "llama", "eos_token_id": 2, "tie_word_embeddings": True, "vocab_size": 9}


def folder(path: Path, **files: Any) -> Path:
    path.mkdir()
    for name, value in files.items():
        text = value if isinstance(value, str) else json.dumps(value)
        (path / name.replace("__", ".")).write_text(text)
    return path


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return folder(
        tmp_path / "base",
        config__json=CONFIG,
        tokenizer__json="base tokenizer",
        tokenizer_config__json="{}",
        special_tokens_map__json="base only",
        chat_template__jinja="base template",
        generation_config__json={"eos_token_id": [2, 5]},
        LICENSE="licence",
        README__md="card of the base",
        modeling_x__py="code",
    )


def files(base: Path, adapter: Path, changes: dict[str, Any] | None = None) -> Companions:
    return collect(base, CONFIG, changes or {}, adapter, None)


def test_tokenizer_and_template_come_from_training_as_a_set(base: Path, tmp_path: Path) -> None:
    adapter = folder(
        tmp_path / "adapter", tokenizer__json="trained", chat_template__jinja="edited {{ x }}"
    )
    found = files(base, adapter)
    assert found.files["tokenizer.json"] == b"trained"
    assert found.files["chat_template.jinja"] == b"edited {{ x }}"
    # Files of the base's tokenizer that training did not write would mix two tokenizers.
    assert "special_tokens_map.json" not in found.files
    assert found.tokenizer_from == "adapter"
    assert found.files["LICENSE"] == b"licence" and found.files["modeling_x.py"] == b"code"
    assert "README.md" not in found.files
    assert found.files["config.json"] == (base / "config.json").read_bytes()


def test_an_adapter_from_elsewhere_gets_the_bases_tokenizer_and_it_is_said(
    base: Path, tmp_path: Path
) -> None:
    found = files(base, folder(tmp_path / "adapter"))
    assert found.files["tokenizer.json"] == b"base tokenizer"
    assert found.tokenizer_from == "base"
    assert "holds no tokenizer" in found.notes[0]


def test_config_changes_reach_nested_text_configs(base: Path, tmp_path: Path) -> None:
    config = {**CONFIG, "text_config": {"vocab_size": 9, "tie_word_embeddings": True}}
    del config["vocab_size"]
    changes = {"vocab_size": 12, "tie_word_embeddings": False}
    found = collect(base, config, changes, folder(tmp_path / "adapter"), None)
    written = json.loads(found.files["config.json"])
    assert written["text_config"] == {"vocab_size": 12, "tie_word_embeddings": False}
    assert written["tie_word_embeddings"] is False and "vocab_size" not in written


@pytest.mark.parametrize(
    ("generation", "expected"),
    [
        # An explicit greedy config keeps being greedy; the fields that contradict it go.
        (
            {"do_sample": False, "temperature": 0.9, "top_p": 0.6, "eos_token_id": [2, 5]},
            {"do_sample": False, "eos_token_id": [2, 5]},
        ),
        # Sampling fields without the flag mean sampling.
        (
            {"temperature": 0.6, "eos_token_id": [2, 5]},
            {"temperature": 0.6, "eos_token_id": [2, 5], "do_sample": True},
        ),
        ({"length_penalty": 2.0, "eos_token_id": [5, 2]}, {"eos_token_id": [5, 2]}),
        ({"pad_token_id": -1, "eos_token_id": [5, 2]}, {"eos_token_id": [5, 2]}),
        # An end id of the base that training's file lost comes back.
        ({"eos_token_id": 7}, {"eos_token_id": [7, 2, 5]}),
        ({}, {"eos_token_id": [2, 5]}),
    ],
)
def test_generation_configs_are_made_valid_with_all_end_ids(
    generation: dict[str, Any], expected: dict[str, Any], base: Path, tmp_path: Path
) -> None:
    adapter = folder(tmp_path / "adapter", tokenizer__json="t", generation_config__json=generation)
    found = files(base, adapter)
    assert json.loads(found.files["generation_config.json"]) == expected
    assert found.notes


def test_the_trainings_generation_config_counts_without_its_tokenizer(
    base: Path, tmp_path: Path
) -> None:
    adapter = folder(tmp_path / "adapter", generation_config__json={"eos_token_id": 7, "top_k": 3})
    found = files(base, adapter)
    assert found.tokenizer_from == "base"
    written = json.loads(found.files["generation_config.json"])
    assert written == {"eos_token_id": [7, 2, 5], "top_k": 3, "do_sample": True}


@pytest.mark.parametrize("broken", [b"{", b"[1]", b"null", b"\xff\xfe"])
@pytest.mark.parametrize("where", ["adapter", "base", "both"])
def test_a_generation_config_that_cannot_be_read_is_said_and_hides_no_other(
    where: str, broken: bytes, base: Path, tmp_path: Path
) -> None:
    adapter = folder(tmp_path / "adapter", tokenizer__json="t")
    (adapter / "generation_config.json").write_text('{"eos_token_id": 7}')
    (base / "generation_config.json").write_text('{"eos_token_id": 9}')
    for each in (adapter, base):
        if where in (each.name, "both"):
            (each / "generation_config.json").write_bytes(broken)
    found = files(base, adapter)
    ends = {"adapter": [9, 2], "base": [7, 2]}.get(where)  # 2 is in config.json
    written = found.files.get("generation_config.json")
    assert (json.loads(written)["eos_token_id"] if written else None) == ends
    said = [note for note in found.notes if note.endswith("is not a JSON object: left out")]
    assert len(said) == {"adapter": 1, "base": 0, "both": 2}[where]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ([-1, None, "3", 4], [4, 2, 5]),
        (-1, [2, 5]),
        ("</s>", [2, 5]),
        ([5, 5, 2], [5, 5, 2]),
        (None, [2, 5]),
    ],
)
def test_end_ids_that_are_none_are_removed(
    given: Any, expected: list[int], base: Path, tmp_path: Path
) -> None:
    generation = {"eos_token_id": given}
    adapter = folder(tmp_path / "adapter", tokenizer__json="t", generation_config__json=generation)
    written = files(base, adapter).files["generation_config.json"]
    assert json.loads(written)["eos_token_id"] == expected


def test_a_valid_generation_config_passes_byte_for_byte(base: Path, tmp_path: Path) -> None:
    text = '{"do_sample": true,   "temperature": 0.6, "eos_token_id": [2, 5]}'
    adapter = folder(tmp_path / "adapter", tokenizer__json="t", generation_config__json=text)
    found = files(base, adapter)
    assert found.files["generation_config.json"] == text.encode()
    assert not found.notes


def test_token_ids_without_a_row_are_refused(tmp_path: Path) -> None:
    tokenizer = {
        "model": {"vocab": {"a": 0, "b": 1}},
        "added_tokens": [{"id": 11, "content": "<x>"}],
    }
    files = {"tokenizer.json": json.dumps(tokenizer).encode()}
    found = Companions(files, "adapter", (), read_vocabulary(files).highest)
    check_vocabulary(found, 12, tmp_path, tmp_path)  # padded embeddings have more rows than tokens
    with pytest.raises(AdapterError, match="ids up to 11, the merged embedding has 11 rows"):
        check_vocabulary(found, 11, tmp_path, tmp_path)


def test_an_edited_template_alone_goes_over_the_bases_tokenizer(base: Path, tmp_path: Path) -> None:
    (base / "chat_template.json").write_text('{"chat_template": "older"}')
    adapter = folder(tmp_path / "adapter", chat_template__jinja="edited {{ x }}")
    found = files(base, adapter)
    assert found.files["chat_template.jinja"] == b"edited {{ x }}"
    assert found.files["tokenizer.json"] == b"base tokenizer"
    assert found.files["special_tokens_map.json"] == b"base only"
    assert "chat_template.json" not in found.files  # of the base: a loader might prefer it
    assert found.tokenizer_from == "base"
    assert found.notes[0].endswith("the base's is taken, with the chat template there")


@pytest.mark.parametrize(
    ("field", "expected"),
    [
        ("edited", {"chat_template.jinja": b"edited"}),
        (
            [
                {"name": "default", "template": "edited"},
                {"name": "rag", "template": "with documents"},
                {"name": "../../escape", "template": "no"},
            ],
            {
                "chat_template.jinja": b"edited",
                "additional_chat_templates/rag.jinja": b"with documents",
            },
        ),
    ],
)
def test_settings_without_a_vocabulary_are_no_tokenizer(
    field: Any, expected: dict[str, bytes], base: Path, tmp_path: Path
) -> None:
    """Their template counts all the same."""
    adapter = folder(
        tmp_path / "adapter",
        tokenizer_config__json={"chat_template": field},
        special_tokens_map__json="adapter's",
    )
    found = files(base, adapter)
    assert found.files["tokenizer_config.json"] == b"{}"  # the base's, with its vocabulary
    assert found.files["special_tokens_map.json"] == b"base only"
    templates = {n: d for n, d in found.files.items() if "chat_template" in n}
    assert templates == expected


@pytest.mark.parametrize(
    "name",
    [
        "tiktoken.model", "qwen.tiktoken", "bpe.codes", "vocab.bpe", "source.spm", "vocab.txt",
        "tokenizer.model", "spiece.model", "tekken.json",
    ],
)  # fmt: skip
def test_every_kind_of_vocabulary_is_copied(name: str, base: Path, tmp_path: Path) -> None:
    adapter = folder(tmp_path / "adapter")
    (adapter / name).write_bytes(b"tokens")
    found = files(base, adapter)
    assert found.files[name] == b"tokens"
    assert found.tokenizer_from == "adapter"
    assert "tokenizer.json" not in found.files


def test_a_named_folder_without_a_tokenizer_is_refused(base: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="nothing: holds no tokenizer"):
        collect(base, CONFIG, {}, folder(tmp_path / "a"), folder(tmp_path / "nothing"))


FAST = {"model": {"vocab": {"a": 0, "<end>": 8}}, "added_tokens": [{"id": 6, "content": "<im>"}]}


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"eos_token": "<end>"}, [2, 5, 8]),  # from the vocabulary
        ({"eos_token": {"content": "<im>"}}, [2, 5, 6]),  # from the added tokens
        (
            {"eos_token": "<x>", "added_tokens_decoder": {"7": {"content": "<x>"}}},
            [2, 5, 7],
        ),
        ({"eos_token": "not known"}, [2, 5]),
        ({}, [2, 5]),
    ],
)
def test_the_tokenizers_own_end_is_an_end(
    settings: dict[str, Any], expected: list[int], base: Path, tmp_path: Path
) -> None:
    """Training ends its answers with it: a server that does not know it runs on."""
    adapter = folder(tmp_path / "adapter", tokenizer__json=FAST, tokenizer_config__json=settings)
    found = files(base, adapter)
    assert json.loads(found.files["generation_config.json"])["eos_token_id"] == expected


def test_the_tokenizers_end_counts_without_any_generation_config(tmp_path: Path) -> None:
    """config.json would be all that a server has: there the end is the base's."""
    base = folder(tmp_path / "base", config__json=CONFIG)
    settings = {"eos_token": "<im>"}
    adapter = folder(tmp_path / "a", tokenizer__json=FAST, tokenizer_config__json=settings)
    found = collect(base, {**CONFIG, "pad_token_id": 0}, {}, adapter, None)
    written = json.loads(found.files["generation_config.json"])
    assert written == {"pad_token_id": 0, "eos_token_id": [2, 6]}
    same = collect(base, {**CONFIG, "eos_token_id": [2, 6]}, {}, adapter, None)
    assert "generation_config.json" not in same.files


def test_ends_of_a_nested_text_config_are_ends(base: Path, tmp_path: Path) -> None:
    config = {**CONFIG, "text_config": {"eos_token_id": [2, 106]}}
    found = collect(base, config, {}, folder(tmp_path / "adapter"), None)
    assert json.loads(found.files["generation_config.json"])["eos_token_id"] == [2, 5, 106]


def sentencepiece_model(count: int) -> bytes:
    """A message of `count` pieces (field 1: text, score, type) and a field that is none."""
    found = b""
    for number in range(count):
        text = f"piece{number}".encode()
        piece = bytes([0x0A, len(text)]) + text + b"\x15\x00\x00\x00\x00" + b"\x18\x01"
        found += bytes([0x0A, len(piece)]) + piece
    return found + b"\x12\x03\x18\xe8\x07"  # trainer_spec with vocab_size 1000


@pytest.mark.parametrize(
    ("name", "data", "highest"),
    [
        ("tokenizer.model", sentencepiece_model(40), 39),
        ("tokenizer.model", sentencepiece_model(40)[:-11], 38),  # cut short
        ("added_tokens.json", b'{"<a>": 50, "<b>": 41}', 50),
        ("vocab.json", b'{"x": 0, "y": 44}', 44),
        ("tokenizer_config.json", b'{"added_tokens_decoder": {"43": {"content": "<p>"}}}', 43),
        ("vocab.txt", b"[PAD]\n[UNK]\na\n", 2),
        ("tiktoken.model", b"IQ== 0\nIg== 77\n", 77),
        ("qwen.tiktoken", b"IQ== 0\nIg== 78\n", 78),
        ("tokenizer.json", b'{"model": {"vocab": [["a", -1.0], ["b", -2.0]]}}', 1),
        ("tokenizer.json", b"not JSON", None),
        ("merges.txt", b"a b\n", None),
    ],
)
def test_the_highest_id_is_found_in_every_file(
    name: str, data: bytes, highest: int | None, tmp_path: Path
) -> None:
    low = {"tokenizer.json": b'{"model": {"vocab": {"a": 0}}}'} if highest else {}
    vocabulary = read_vocabulary({**low, name: data})
    assert vocabulary.highest == highest
    if highest is not None:
        found = Companions({}, "adapter", (), vocabulary.highest)
        check_vocabulary(found, highest + 1, tmp_path, tmp_path)
        with pytest.raises(AdapterError, match=f"ids up to {highest}, .* has {highest} rows"):
            check_vocabulary(found, highest, tmp_path, tmp_path)


def test_a_sentencepiece_model_is_read_as_its_library_reads_it(tmp_path: Path) -> None:
    import sentencepiece

    text = tmp_path / "text.txt"
    text.write_text("the merged model answers as the trained one did\n" * 50)
    sentencepiece.SentencePieceTrainer.train(
        input=str(text), model_prefix=str(tmp_path / "m"), vocab_size=40, minloglevel=2,
        hard_vocab_limit=False,
    )  # fmt: skip
    library = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "m.model"))
    vocabulary = read_vocabulary({"tokenizer.model": (tmp_path / "m.model").read_bytes()})
    size = library.get_piece_size()
    assert vocabulary.highest == size - 1
    assert vocabulary.ids == {library.id_to_piece(i): i for i in range(size)}
    assert vocabulary.ends(b'{"eos_token": "</s>"}') == [library.eos_id()]


def test_ids_without_a_row_that_the_base_has_too_are_its_own_affair(
    base: Path, tmp_path: Path
) -> None:
    """As in gemma-3-1b-it: 262144 rows, and a token for images with the id 262144."""
    (base / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"a": 0}}}))
    (base / "added_tokens.json").write_text('{"<image_soft_token>": 9}')
    found = files(base, folder(tmp_path / "adapter"))
    (note,) = check_vocabulary(found, 9, base, tmp_path)
    assert "ids up to 9, the embedding has 9 rows" in note
    assert check_vocabulary(found, 10, base, tmp_path) == ()
    more = {"model": {"vocab": {"a": 0}}, "added_tokens": [{"id": 10, "content": "<new>"}]}
    trained = files(base, folder(tmp_path / "trained", tokenizer__json=more))
    with pytest.raises(AdapterError, match="ids up to 10, the merged embedding has 9 rows"):
        check_vocabulary(trained, 9, base, tmp_path)


def test_added_tokens_without_their_vocabulary_are_not_dropped(base: Path, tmp_path: Path) -> None:
    (base / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"a": 0, "b": 7}}}))
    settings = {"added_tokens_decoder": {"8": {"content": "<tool>"}}}
    for number, given in enumerate(
        ({"added_tokens__json": {"<tool>": 8}}, {"tokenizer_config__json": settings})
    ):
        adapter = folder(tmp_path / f"adapter{number}", **given)
        with pytest.raises(AdapterError, match="up to id 8 and holds no vocabulary") as caught:
            files(base, adapter)
        assert "--tokenizer-from" in caught.value.hint
    # The base's own added tokens, saved once more, are none that get lost.
    same = folder(tmp_path / "same", added_tokens__json={"b": 7})
    assert files(base, same).tokenizer_from == "base"
    # With the whole tokenizer elsewhere, the adapter's remains do not matter.
    whole = {"model": {"vocab": {"a": 0, "b": 7, "<tool>": 8}}}
    elsewhere = folder(tmp_path / "elsewhere", tokenizer__json=whole)
    found = collect(base, CONFIG, {}, adapter, elsewhere)
    assert found.highest_id == 8
