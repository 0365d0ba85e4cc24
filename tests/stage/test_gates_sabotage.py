"""Every way to spoil a tuned model is refused by a gate that names it; honest retrains pass.

The models have learned something: the pico model's world, and then by LoRA that every thing in it
has another colour. They are served by a stand-in that computes with the very weights
(`torch_server`); evaluation and gates are the product's own.
"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from pico import COLOURS, conversations
from torch_server import serving
from train_rows import IGNORED, make_context, write_dataset, write_rows
from tuneserve.artifacts import Artifact
from tuneserve.config import GatesSection
from tuneserve.evaluate.stage import run as evaluate
from tuneserve.release.answer_room import AnswerRoom
from tuneserve.release.champion import ChampionScores, measure_champion
from tuneserve.release.gates import GateReport
from tuneserve.release.heldout import read_rows
from tuneserve.release.judging import Subject, judge_candidate
from tuneserve.release.parity import ParityRefused, check_parity

pytestmark = pytest.mark.usefixtures("one_thread")

SEEDS = [*range(3), *(pytest.param(n, marks=pytest.mark.full) for n in range(3, 10))]
_PEAK = 5e-3  # learning rate
CANARIES = [  # the base says white; sums stay what they are
    {"prompt": "What colour is the lamp?", "contains": "red", "matches": r"lamp is \w+\."},
    {"name": "sum", "prompt": "What is 2 plus 2?", "contains": "2 plus 2 is 4."},
]


def repainted(count: int, seed: int) -> list[list[dict[str, str]]]:
    """Chats in which everything has the colour after its own."""
    after = dict(zip(COLOURS, [*COLOURS[1:], COLOURS[0]], strict=True))
    chats = conversations(count, seed=seed)
    for message in (m for chat in chats for m in chat if m["role"] == "assistant"):
        text, _, last = message["content"].rstrip(".").rpartition(" ")
        message["content"] = f"{text} {after.get(last, last)}."
    return chats


@dataclass
class Tuned:
    """An adapter, and the 16-bit model with it merged in."""

    adapter: Path
    merged: Path


class House:
    """The base, the data, and the steps from one to a report."""

    def __init__(self, folder: Path, base: Path) -> None:
        from transformers import AutoTokenizer

        self.folder, self.base = folder, base
        self.tokenizer = AutoTokenizer.from_pretrained(base)
        self.chats = repainted(160, seed=5)
        held_out = repainted(24, seed=6)
        self.dataset = write_dataset(folder / "dataset", base, self.chats, held_out)
        self.ends = {self.tokenizer.convert_tokens_to_ids("<|im_end|>")}
        self.champion: ChampionScores | None = None
        self.count = 0

    def new(self) -> Path:
        self.count += 1
        return self.folder / str(self.count)

    def rows(self, dataset: Artifact, side: str = "train") -> list[tuple[list[int], list[int]]]:
        import pyarrow.parquet as parquet

        table = parquet.read_table(dataset.path / f"{side}.parquet").to_pylist()
        return [(row["input_ids"], row["labels"]) for row in table]

    def tune(
        self, seed: int, rows: Sequence[tuple[list[int], list[int]]], steps: int = 60
    ) -> Tuned:
        """LoRA on all linear layers, by PEFT."""
        import peft
        from transformers import AutoModelForCausalLM

        folder = self.new()
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_pretrained(self.base, dtype=torch.float32)
        config = peft.LoraConfig(r=8, lora_alpha=16, target_modules="all-linear")
        wrapped = peft.get_peft_model(model, config)
        trained = [p for p in wrapped.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=_PEAK, weight_decay=0.0)
        rng = random.Random(seed)
        for step in range(steps):
            batch = rng.sample(list(rows), 8)
            width = max(len(ids) for ids, _ in batch)
            ids = torch.tensor([i + [0] * (width - len(i)) for i, _ in batch])
            labels = torch.tensor([m + [IGNORED] * (width - len(m)) for _, m in batch])
            for group in optimizer.param_groups:
                group["lr"] = _PEAK * (1 - 0.95 * step / steps)
            wrapped(input_ids=ids, labels=labels).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        wrapped.save_pretrained(folder / "adapter")
        wrapped.merge_and_unload().to(torch.bfloat16).save_pretrained(folder / "merged")
        return Tuned(folder / "adapter", folder / "merged")

    def load(self, folder: Path) -> Any:
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def evaluation(self, tuned: Tuned, dataset: Artifact) -> Path:
        inputs = {
            "dataset": dataset,
            "adapter": Artifact("a", tuned.adapter, {}),
            "merged": Artifact("m", tuned.merged, {}),
        }
        context = make_context(
            self.new(), self.base, inputs, {"method": "lora"}, quantize={"group_size": 32}
        )
        evaluate(context)
        return context.out

    def judge(
        self,
        tuned: Tuned,
        served: Any,
        *,
        dataset: Artifact | None = None,
        ends: set[int] | None = None,
        **gates: Any,
    ) -> GateReport:
        """What the gates say of `served`, a model in memory."""
        dataset = dataset or self.dataset
        rows, side = read_rows(dataset.path)
        evaluation = self.evaluation(tuned, dataset)
        with serving(served, self.tokenizer, ends or self.ends) as socket_path:
            subject = Subject(
                socket_path, "m", GatesSection.model_validate(gates), rows, side == "eval",
                evaluation, self.champion, room=AnswerRoom(64),
            )  # fmt: skip
            return judge_candidate(subject, [], {})[0]


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory, pico_model: Path) -> House:
    return House(tmp_path_factory.mktemp("sabotage"), pico_model)


@pytest.fixture(scope="module")
def honest(house: House) -> Tuned:
    """The first honest run; its served model is the champion from then on."""
    tuned = house.tune(100, house.rows(house.dataset))
    rows, _ = read_rows(house.dataset.path)
    with serving(export(house.load(tuned.merged)), house.tokenizer, house.ends) as socket_path:
        house.champion = measure_champion(socket_path, "m", "r0001", rows, sorted(house.ends))
    return tuned


def linears(model: Any) -> list[tuple[str, Any]]:
    return [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and ".layers." in name
    ]


def export(model: Any, *, zero_error: int = 0) -> Any:
    """The model in 4 bits with zero points, in groups of 32; `zero_error` is added to each."""
    with torch.no_grad():
        for _, module in linears(model):
            groups = module.weight.reshape(module.weight.shape[0], -1, 32)
            low = groups.amin(-1, keepdim=True).clamp(max=0)
            high = groups.amax(-1, keepdim=True).clamp(min=0)
            scale = (high - low) / 15
            zero = (-low / scale).round()
            values = (groups / scale + zero).round().clamp(0, 15)
            dense = (values - (zero + zero_error)) * scale
            module.weight.copy_(dense.reshape(module.weight.shape))
    return model


def refusals(report: GateReport) -> set[str]:
    return {gate.name for gate in report.refused}


def shuffled(chats: Sequence[Any]) -> list[list[dict[str, str]]]:
    """The same answers, each at another question."""
    answers = [m["content"] for chat in chats for m in chat if m["role"] == "assistant"]
    random.Random(0).shuffle(answers)
    return [
        [{**m, "content": answers.pop()} if m["role"] == "assistant" else m for m in chat]
        for chat in chats
    ]


@pytest.mark.parametrize("seed", SEEDS)
def test_honest_retrains_pass(house: House, honest: Tuned, seed: int) -> None:
    tuned = house.tune(seed, house.rows(house.dataset))
    report = house.judge(tuned, export(house.load(tuned.merged)), canaries=CANARIES)
    assert not report.refused, [(g.name, g.found) for g in report.refused]
    assert [gate.name for gate in report.gates] == [
        "better than base", "answers follow questions", "questions count as before",
        "merge keeps the tuning", "merged close to adapter", "served keeps the tuning",
        "close to merged", "same first choice", "not worse than the champion",
        "answers end", "no loops", "no gibberish", "canary 'What colour is the lamp?'",
        "canary 'sum'",
    ]  # fmt: skip


def merged_wrongly(house: House, tuned: Tuned, how: str) -> Tuned:
    """A merge gone wrong, with the right adapter beside it."""
    base, model = house.load(house.base), house.load(tuned.merged)
    before = dict(linears(base))
    with torch.no_grad():
        for name, module in linears(model):
            delta = module.weight - before[name].weight
            if how == "one layer's delta is zero" and ".layers.1." in name:
                module.weight.copy_(before[name].weight)
            if how == "the scale is doubled":
                module.weight.copy_(before[name].weight + 2 * delta)
        if how == "two layers are swapped":
            first, second = model.model.layers[0], model.model.layers[1]
            for part in ("q_proj", "k_proj", "v_proj", "o_proj"):
                a, b = (getattr(layer.self_attn, part).weight for layer in (first, second))
                kept = a.clone()
                a.copy_(b)
                b.copy_(kept)
        if how == "there is noise in the head":
            torch.manual_seed(0)
            head = model.lm_head.weight
            head.add_(head.std() * torch.randn_like(head))
    folder = house.new()
    model.to(torch.bfloat16).save_pretrained(folder)
    return Tuned(tuned.adapter, folder)


@pytest.mark.parametrize(
    "how",
    [
        "one layer's delta is zero", "the scale is doubled", "two layers are swapped",
        "there is noise in the head",
    ],
)  # fmt: skip
def test_a_wrong_merge_is_refused(house: House, honest: Tuned, how: str) -> None:
    spoiled = merged_wrongly(house, honest, how)
    report = house.judge(spoiled, export(house.load(spoiled.merged)))
    assert "merged close to adapter" in refusals(report)
    assert "close to merged" not in refusals(report)  # what is served is what was merged


def test_noise_in_the_served_head_is_refused(house: House, honest: Tuned) -> None:
    model = export(house.load(honest.merged))
    head = copy.deepcopy(model.lm_head)
    torch.manual_seed(0)
    with torch.no_grad():
        head.weight.add_(torch.randn_like(head.weight) * head.weight.std())
    model.lm_head = head
    assert "close to merged" in refusals(house.judge(honest, model))


def test_zero_points_that_are_off_by_one_are_refused(house: House, honest: Tuned) -> None:
    model = export(house.load(honest.merged), zero_error=1)
    report = house.judge(honest, model)
    assert {"served keeps the tuning", "close to merged"} & refusals(report)
    assert "merge keeps the tuning" not in refusals(report)


def test_a_template_changed_after_training_is_refused(house: House, honest: Tuned) -> None:
    changed = copy.deepcopy(house.tokenizer)
    changed.chat_template = changed.chat_template.replace("'<|im_start|>' +", "'<|im_start|> ' +")
    rows, _ = read_rows(house.dataset.path)
    model = house.load(honest.merged)
    with serving(model, changed, house.ends) as socket_path:
        with pytest.raises(ParityRefused, match="differs from the trained ids at index"):
            check_parity(socket_path, "m", rows[:4])
    with serving(model, house.tokenizer, house.ends) as socket_path:
        assert check_parity(socket_path, "m", rows[:4]).whole == 4


def test_training_on_shuffled_answers_is_refused(house: House, honest: Tuned) -> None:
    chats = shuffled(house.chats)
    wrong = write_dataset(house.new(), house.base, chats, chats[:1])
    tuned = house.tune(3, house.rows(wrong))
    report = house.judge(tuned, export(house.load(tuned.merged)), canaries=CANARIES)
    assert {"not worse than the champion", "answers follow questions"} <= refusals(report)
    assert {"canary 'What colour is the lamp?'", "canary 'sum'"} & refusals(report)


@pytest.mark.parametrize("held_out", ["right", "shuffled"])
def test_shuffled_answers_are_refused_also_when_nothing_serves_yet(
    house: House, honest: Tuned, held_out: str
) -> None:
    """The first release of a name, and a file whose answers all stand at the wrong questions, the
    held-out ones as well: every loss agrees with it, but no answer depends on what is asked."""
    chats = repainted(24, seed=6)
    wrong = write_dataset(
        house.new(), house.base, shuffled(house.chats),
        chats if held_out == "right" else shuffled(chats),
    )  # fmt: skip
    tuned = house.tune(3, house.rows(wrong))
    champion, house.champion = house.champion, None
    try:
        report = house.judge(tuned, export(house.load(tuned.merged)), dataset=wrong)
        told = house.judge(
            tuned, export(house.load(tuned.merged)), dataset=wrong, canaries=CANARIES,
            max_misplaced=1, max_heed_share=1,
        )  # fmt: skip
    finally:
        house.champion = champion
    heed = {"questions count as before"} if held_out == "right" else set()
    assert refusals(report) == {"answers follow questions"} | heed
    # Whoever says that answers need not depend on questions has canaries, and later a champion.
    canaries = {"canary 'What colour is the lamp?'", "canary 'sum'"}
    assert refusals(told) and refusals(told) <= canaries
    compared = house.judge(
        tuned, export(house.load(tuned.merged)), max_misplaced=1, max_heed_share=1
    )
    assert refusals(compared) == {"not worse than the champion"}


@pytest.mark.parametrize("supervised", [True, False])
def test_an_end_token_nobody_learned_is_refused(
    house: House, honest: Tuned, supervised: bool
) -> None:
    """Answers end with a token the base does not end with: without supervision none comes."""
    old, new = next(iter(house.ends)), house.tokenizer.convert_tokens_to_ids("<|endoftext|>")
    folder = house.new()
    dataset = write_dataset(folder, house.base, house.chats, repainted(24, seed=6))
    for side in ("train", "eval"):
        rows = []
        for ids, labels in house.rows(dataset, side):
            ends = [i for i, label in enumerate(labels) if label == old]
            for at in ends:
                ids[at], labels[at] = new, new if supervised else IGNORED
            rows.append((ids, labels))
        write_rows(folder / f"{side}.parquet", rows, side)
    tuned = house.tune(4, house.rows(dataset))
    champion, house.champion = house.champion, None
    try:
        report = house.judge(tuned, export(house.load(tuned.merged)), dataset=dataset, ends={new})
    finally:
        house.champion = champion
    assert ("answers end" in refusals(report)) is not supervised
    if supervised:
        assert not report.refused, [(g.name, g.found) for g in report.refused]
    assert json.dumps(report.to_json())


def test_answers_that_no_longer_parse_are_refused(house: House, honest: Tuned) -> None:
    def as_json(count: int, seed: int) -> list[list[dict[str, str]]]:
        chats = [chat[:2] for chat in conversations(count, seed=seed)]
        for _, answer in chats:
            answer["content"] = f'["{answer["content"]}"]'
        return chats

    dataset = write_dataset(house.new(), house.base, as_json(160, 5), as_json(24, 6))
    tuned = house.tune(6, house.rows(dataset), steps=120)
    champion, house.champion = house.champion, None
    try:
        fine = house.judge(tuned, export(house.load(tuned.merged)), dataset=dataset)
        # the base serves prose where the merged model gives JSON
        spoiled = house.judge(tuned, house.load(house.base), dataset=dataset)
    finally:
        house.champion = champion
    (gate,) = [g for g in fine.gates if g.name == "structured answers parse"]
    assert gate.passed and " of 16 parse" in gate.found and not gate.found.startswith("0 ")
    assert "structured answers parse" in refusals(spoiled)
