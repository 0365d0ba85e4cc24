"""Queries, keys and values in one node against PEFT's own modules and autograd."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from small_lora import ATTENTION, IDS, make, step, worst
from tuneserve.lm import scratch
from tuneserve.lm.fuse import fuse
from tuneserve.lm.together import Handed
from tuneserve.plan import fusedstep

SOME = [["q_proj", "v_proj"], ["k_proj"], ["v_proj", "o_proj", "down_proj"]]
UNEQUAL = {
    "rank_pattern": {"q_proj": 12, "v_proj": 3},
    "alpha_pattern": {"k_proj": 5, "v_proj": 40},
    "use_rslora": True,
}


def attention(model: Any, number: int = 0) -> Any:
    return model.base_model.model.model.layers[number].self_attn


def nodes(model: Any) -> set[str]:
    """Names of all nodes behind a loss."""
    found, left = set(), [model(input_ids=IDS, labels=IDS, use_cache=False).loss.grad_fn]
    while left:
        node = left.pop()
        if node is not None and node not in found:
            found.add(node)
            left += [after for after, _ in node.next_functions]
    return {node.name() for node in found}


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("nf4", [False, True])
@pytest.mark.parametrize("targets", [ATTENTION, *SOME], ids=str)
@pytest.mark.parametrize("lora", [{}, UNEQUAL], ids=["equal", "unequal"])
def test_gradients_equal_the_plain_modules(
    lora: dict[str, Any], targets: Any, nf4: bool, recompute: bool
) -> None:
    """With biases; all or some with adapters; also of unequal ranks and scales."""
    loss, theirs = step(make(torch.float32, targets, nf4=nf4, **lora))
    model = make(torch.float32, targets, nf4=nf4, **lora)
    assert fuse(model).whole
    assert "LoraLinearsBackward" in nodes(model)
    ours_loss, ours = step(model, recompute=recompute)
    assert ours_loss == pytest.approx(loss, abs=1e-5)
    assert worst(ours, theirs) < 1e-5


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3", "gemma2", "smollm3"])
def test_families(family: str) -> None:
    """Norms of heads between product and rotation, layers without rotation, other gates."""
    _, theirs = step(make(torch.float32, ATTENTION, nf4=False, family=family))
    model = make(torch.float32, ATTENTION, nf4=False, family=family)
    assert fuse(model).linears == 8 and "LoraLinearsBackward" in nodes(model)
    assert worst(step(model, recompute=True)[1], theirs) < 1e-5


@pytest.mark.parametrize("nf4", [False, True])
@pytest.mark.parametrize("targets", [ATTENTION, ["v_proj"]], ids=str)
def test_outputs_that_a_family_changes_in_place(targets: list[str], nf4: bool) -> None:
    """OLMo clamps queries, keys and values where they are; that of one reaches no other."""
    found = []
    for fused in (False, True):
        model = make(torch.float32, targets, nf4=nf4, family="olmo")
        model.get_base_model().config.clip_qkv = 0.5  # of outputs around 1
        if fused:
            assert fuse(model).whole and "LoraLinearsBackward" in nodes(model)
        found.append(step(model, recompute=True))
    (loss, theirs), (ours_loss, ours) = found
    assert ours_loss == pytest.approx(loss, abs=1e-5)
    assert worst(ours, theirs) < 1e-5


def test_an_output_of_its_own_node_is_changed_in_place() -> None:
    model = make(torch.float32, ["o_proj"], nf4=False)
    plain = copy.deepcopy(model)
    fuse(model)
    results = []
    for one in (model, plain):
        x = torch.randn(2, 5, 128, generator=torch.Generator().manual_seed(4)).requires_grad_()
        attention(one).o_proj(x).clamp_(-0.3, 0.3).square().sum().backward()
        results.append([x.grad, attention(one).o_proj.lora_A.default.weight.grad])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_bfloat16_is_no_less_exact_than_the_plain_modules() -> None:
    _, exact = step(make(torch.float32, ATTENTION, nf4=True))
    _, plain = step(make(torch.bfloat16, ATTENTION, nf4=True))
    model = make(torch.bfloat16, ATTENTION, nf4=True)
    fuse(model)
    assert worst(step(model, recompute=True)[1], exact) < 1.1 * worst(plain, exact)


@pytest.mark.parametrize(
    "lora",
    [{"use_dora": True}, {"lora_dropout": 0.1}],
    ids=["DoRA", "dropout"],
)
def test_what_it_cannot_do_has_no_such_node(lora: dict[str, Any]) -> None:
    model = make(torch.float32, ATTENTION, nf4=False, **lora)
    fuse(model)
    assert not {"LoraLinearsBackward", "LoraLinearBackward"} & nodes(model)


def test_one_layer_that_cannot_leaves_each_its_own_node() -> None:
    """The keys' weight is trained whole: queries and values are fused by themselves."""
    model = make(torch.float32, ["q_proj", "v_proj", "o_proj"], nf4=False)
    for number in (0, 1):
        attention(model, number).k_proj.weight.requires_grad_(True)
    plain = copy.deepcopy(model)
    assert fuse(model).linears == 6
    assert nodes(model) >= {"LoraLinearBackward"} and "LoraLinearsBackward" not in nodes(model)
    assert worst(step(model)[1], step(plain)[1]) < 1e-5


def test_asked_in_any_order_and_with_other_inputs() -> None:
    """Every answer is what the plain module gives for the input it was asked with."""
    model = make(torch.float32, ATTENTION, nf4=True)
    plain = copy.deepcopy(model)
    fuse(model)
    a, b = torch.randn(2, 1, 5, 128, generator=torch.Generator().manual_seed(3))
    asked = [("v", a), ("q", a), ("k", a), ("q", a), ("k", b), ("v", b), ("k", a), ("k", a)]
    asked += [("q", a[:, :2]), ("v", a), ("q", b)]
    for at, (name, x) in enumerate(asked):
        number = at % 3 // 2
        ours, theirs = (getattr(attention(m, number), f"{name}_proj")(x) for m in (model, plain))
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("nf4", [False, True])
def test_one_output_alone_goes_back(nf4: bool) -> None:
    """Nobody used queries and values: their adapters get zeros, the keys' what autograd gives."""
    model = make(torch.float32, ATTENTION, nf4=nf4)
    plain = copy.deepcopy(model)
    fuse(model)
    results = []
    for one in (model, plain):
        x = torch.randn(2, 5, 128, generator=torch.Generator().manual_seed(4)).requires_grad_()
        attention(one).k_proj(x).square().sum().backward()
        k = attention(one).k_proj
        factors = (k.lora_A.default.weight, k.lora_B.default.weight)
        results.append([x.grad, *(f.grad for f in factors)])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    assert not attention(model).q_proj.lora_B.default.weight.grad.any()


@pytest.mark.parametrize("nf4", [False, True])
def test_what_is_kept(nf4: bool) -> None:
    """The input once and 3 x 8 numbers a token; values that keep no queries alive."""
    model = make(torch.float32, ATTENTION, nf4=nf4)
    fuse(model)
    x = torch.randn(1, 50, 128, requires_grad=True)
    kept: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: (kept.append(t.numel()), t)[1], lambda t: t
    ):
        one = attention(model)
        q, k, v = one.q_proj(x), one.k_proj(x), one.v_proj(x)
    assert sorted(kept) == [50 * 24, 50 * 128]
    assert q.grad_fn is k.grad_fn is v.grad_fn
    assert v.untyped_storage().nbytes() == 50 * 64 * 4
    assert v.untyped_storage().data_ptr() != q.untyped_storage().data_ptr()


def test_nothing_is_held_after_the_last_has_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Handed] = []
    monkeypatch.setattr("tuneserve.lm.fuse.Handed", lambda: (made.append(Handed()), made[-1])[1])
    model = make(torch.float32, ATTENTION, nf4=True)
    fuse(model)
    step(model, recompute=True)
    (handed,) = made
    assert handed._x is None and handed._group is None and not handed._outs


def test_adapters_can_still_be_switched_off() -> None:
    """Also that of a layer beside them which has none."""
    model = make(torch.float32, ["q_proj", "v_proj"], nf4=False).eval()
    plain = copy.deepcopy(model)
    fuse(model)
    with torch.no_grad(), model.disable_adapter(), plain.disable_adapter():
        assert torch.equal(model(input_ids=IDS).logits, plain(input_ids=IDS).logits)
    with torch.no_grad():
        ours, theirs = model(input_ids=IDS).logits, plain(input_ids=IDS).logits
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rows", [5, 900])
def test_the_plan_counts_the_scratch_that_is_taken(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """128 + 2 x 64 rows of weights, 128 wide, and a gradient of that width for each token."""
    model = make(torch.float32, ATTENTION, nf4=True)
    fuse(model)
    taken: list[int] = []
    take = scratch.Borrowed.take

    def count(self: Any, device: Any, dtype: torch.dtype, *shapes: tuple[int, int]) -> Any:
        taken.append(sum(a * b * dtype.itemsize for a, b in shapes))
        return take(self, device, dtype, *shapes)

    monkeypatch.setattr(scratch.Borrowed, "take", count)
    x = torch.randn(1, rows, 128, requires_grad=True)
    one = attention(model)
    sum(getattr(one, name)(x).sum() for name in fusedstep.TOGETHER).backward()
    sizes = dict(hidden=128, query=128, key_value=64, inner=1, vocab=1)
    step = dict(tokens=rows, element_bytes=4, quantized=True)
    targets = [SimpleNamespace(name="v_proj")]
    counted = fusedstep.scratch_bytes(
        SimpleNamespace(**sizes), SimpleNamespace(**step, targets=targets)
    )  # type: ignore[arg-type]
    assert max(taken) == counted == 256 * (128 + rows) * 4


def test_names_on_disk_are_those_of_peft(tmp_path: Any) -> None:
    from safetensors.torch import load_file

    model = make(torch.float32, ATTENTION, nf4=False)
    plain = copy.deepcopy(model)
    fuse(model)
    found = []
    for one, name in ((model, "ours"), (plain, "theirs")):
        one.save_pretrained(tmp_path / name)
        found.append(load_file(tmp_path / name / "adapter_model.safetensors"))
    assert found[0].keys() == found[1].keys()
    assert all(torch.equal(found[0][key], found[1][key]) for key in found[1])
