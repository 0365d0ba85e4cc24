"""The fused path against PEFT's and transformers' own modules: losses and gradients.

Tolerances: float32, 1e-5 of a gradient's norm. bfloat16: both are compared with the plain modules
in float32, and the fused ones may be off by at most 1.1 times what the plain bfloat16 ones are.
"""

from __future__ import annotations

import copy
import importlib.util
import itertools
import json
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from small_lora import ATTENTION, IDS, make, step, worst
from tuneserve.lm import elementwise, fused
from tuneserve.plan import fusedstep
from tuneserve.train.recompute import _GIVE_ONE_STATE, draws, recompute_blocks

TARGETS = ["all-linear", ATTENTION, ["up_proj", "down_proj"], ["gate_proj"]]


@pytest.fixture(autouse=True)
def several_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut the small MLPs here into three parts, the last of them narrower."""
    monkeypatch.setattr(fused, "_PART_BYTES", 120_000)
    monkeypatch.setattr(fused, "_PART_WIDTH", 64)
    monkeypatch.setattr(fused, "_PART_MULTIPLE", 128)


@pytest.mark.parametrize("family", [*sorted(_GIVE_ONE_STATE), "mixtral", "opt"])
def test_blocks_of_one_node_have_the_gradients_of_torchs_checkpoints(family: str) -> None:
    """Bit for bit: the same is computed. Families that are not known keep torch's."""
    from tuneserve.lm.fuse import fuse

    known, found = family in _GIVE_ONE_STATE, []
    for whole in (False, True):
        model = make(torch.float32, "all-linear", nf4=False, family=family)
        recompute_blocks(model, offload=False, whole=whole)
        fuse(model)
        found.append(step(model, recompute=True))
        blocks = [m for m in model.modules() if hasattr(m, "_gradient_checkpointing_func")]
        functions = [
            block._gradient_checkpointing_func for block in blocks if hasattr(block, "self_attn")
        ]
        ours = [getattr(function, "__name__", "") == "as_node" for function in functions]
        assert ours == [whole and known] * 2
    assert found[0][0] == found[1][0]
    assert all(torch.equal(found[0][1][name], found[1][1][name]) for name in found[0][1])


def test_blocks_are_those_of_the_decoder_alone() -> None:
    """Text calls no block of a vision tower; counted first, they would leave the others no place
    in host memory.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = dict(hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2)
    text = {**sizes, "vocab_size": 300, "num_key_value_heads": 1, "head_dim": 32}
    vision = {**sizes, "image_size": 28, "patch_size": 14}
    config = AutoConfig.for_model("gemma3", text_config=text, vision_config=vision)
    model = AutoModelForCausalLM.from_config(config)
    recompute_blocks(model, offload=False, whole=True)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    layers = [(n, m) for n, m in model.named_modules() if n.endswith(("layers.0", "layers.1"))]
    assert len(layers) == 4
    for name, layer in layers:
        function = getattr(layer._gradient_checkpointing_func, "__name__", "")
        assert (function == "as_node") == ("language_model" in name)


@pytest.mark.parametrize(
    ("family", "config", "lora"),
    [
        ("phi", {"resid_pdrop": 0.5}, {}),
        ("phi3", {"resid_pdrop": 0.5}, {}),
        ("starcoder2", {"residual_dropout": 0.5}, {}),
        ("opt", {"dropout": 0.5}, {}),
        ("qwen2", {"attention_dropout": 0.5}, {}),
        ("qwen2", {}, {"lora_dropout": 0.5}),
    ],
)
def test_what_was_dropped_is_dropped_again(
    family: str, config: dict[str, float], lora: dict[str, float]
) -> None:
    """A checkpointed block draws the numbers of its first pass, wherever its dropout stands."""
    found = []
    for kept in (True, False):
        model = make(torch.float32, "all-linear", nf4=False, family=family, config=config, **lora)
        assert draws(model)
        if not kept:
            settings = {"use_reentrant": False, "preserve_rng_state": draws(model)}
            model.gradient_checkpointing_enable(settings)
            model.enable_input_require_grads()
        torch.manual_seed(3)
        found.append(step(model))
    assert found[0][0] == found[1][0] and worst(found[0][1], found[1][1]) < 1e-6


def test_dropout_in_a_part_of_the_config_is_found() -> None:
    from transformers import MptConfig

    for probability in (0, 1):
        config = MptConfig(attn_config={"attn_pdrop": probability})
        model = torch.nn.Linear(1, 1)
        model.config = config
        assert draws(model) == bool(probability)


def test_a_model_without_dropout_draws_nothing() -> None:
    for family in ("qwen2", "llama", "gemma2", "phi3", "mixtral"):
        assert not draws(make(torch.float32, "all-linear", nf4=False, family=family))


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("nf4", [False, True])
@pytest.mark.parametrize("targets", TARGETS, ids=str)
def test_gradients_equal_the_plain_modules(targets: Any, nf4: bool, recompute: bool) -> None:
    from tuneserve.lm.fuse import fuse

    loss, theirs = step(make(torch.float32, targets, nf4=nf4))
    model = make(torch.float32, targets, nf4=nf4)
    found = fuse(model)
    assert found.mlps == 2 and found.whole
    ours_loss, ours = step(model, recompute=recompute)
    assert ours_loss == pytest.approx(loss, abs=1e-5)
    assert worst(ours, theirs) < 1e-5


def test_loss_curves_are_the_same() -> None:
    """Eight steps of AdamW at a high rate, NF4, recomputed: every loss within 1e-4 of the plain."""
    from tuneserve.lm import fused_head
    from tuneserve.lm.fuse import fuse

    curves = []
    for fast in (False, True):
        model = make(torch.float32, "all-linear", nf4=True)
        if fast:
            fused_head.add_fused_head(model.get_base_model())
            assert fused_head.add_head_loss(model.get_base_model())
            fuse(model)
            model.gradient_checkpointing_enable({"use_reentrant": False})
            model.enable_input_require_grads()
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        losses = []
        for _ in range(8):
            if fast:
                loss = model(input_ids=IDS, labels=IDS, loss_only=True).loss / IDS[:, 1:].numel()
            else:
                loss = model(input_ids=IDS, labels=IDS, use_cache=False).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
        curves.append(losses)
    assert curves[0][-1] < 0.95 * curves[0][0]
    assert curves[1] == pytest.approx(curves[0], abs=1e-4)


@pytest.mark.parametrize("recompute", [False, True])
def test_bfloat16_is_no_less_exact_than_the_plain_modules(recompute: bool) -> None:
    from tuneserve.lm.fuse import fuse

    _, exact = step(make(torch.float32, "all-linear", nf4=True))
    _, plain = step(make(torch.bfloat16, "all-linear", nf4=True))
    model = make(torch.bfloat16, "all-linear", nf4=True)
    fuse(model)
    _, ours = step(model, recompute=recompute)
    assert worst(ours, exact) < 1.1 * worst(plain, exact)


def test_columns_of_a_quantized_weight() -> None:
    """As the library dequantizes all of it."""
    import bitsandbytes.functional as bnb

    from tuneserve.lm.frozen import Weight

    model = make(torch.bfloat16, ATTENTION, nf4=True)
    layer = model.base_model.model.model.layers[0].mlp.down_proj
    whole = bnb.dequantize_4bit(layer.weight.data.view(-1, 1), layer.weight.quant_state)
    for begin, end in ((64, 256), (0, 320), (256, 320)):
        out = torch.empty(128, end - begin, dtype=torch.bfloat16)
        assert torch.equal(Weight(layer).columns(begin, end, None, out), whole[:, begin:end])


def test_what_is_kept_per_mlp() -> None:
    """All kept: gate and up, 2 x 320 numbers a token and the input; recomputed: the input alone."""
    from tuneserve.lm.fuse import fuse

    sizes: list[int] = []
    model = make(torch.float32, ["gate_proj"], nf4=False)
    fuse(model)
    x = torch.randn(1, 50, 128, requires_grad=True)
    mlp, block = model.base_model.model.model.layers[0].mlp, model.base_model.model.model.layers[0]
    for recompute in (False, True):
        block.gradient_checkpointing = recompute
        kept: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t, kept=kept: (kept.append(t.numel()), t)[1], lambda t: t
        ):
            mlp(x)
        sizes.append(sum(kept))
    assert sizes == [50 * (128 + 2 * 320), 50 * 128]


@pytest.mark.parametrize(
    ("lora", "why"), [({"use_dora": True}, "DoRA"), ({"lora_dropout": 0.1}, "dropout")]
)
def test_what_it_cannot_do_is_left_as_it_was(lora: dict[str, Any], why: str) -> None:
    from tuneserve.lm.fuse import fuse

    model = make(torch.float32, ATTENTION, nf4=False, **lora)
    before = copy.deepcopy(model)
    found = fuse(model)
    assert found.linears == 0 and not found.whole
    assert any(why in reason for reason in found.left)
    torch.manual_seed(5)
    loss, theirs = step(before)
    torch.manual_seed(5)
    ours_loss, ours = step(model)
    assert ours_loss == pytest.approx(loss, abs=1e-5) and worst(ours, theirs) < 1e-5


def test_another_formula_is_seen() -> None:
    """Gemma's gate is no SiLU: its MLPs stay, its adapters are fused."""
    from tuneserve.lm.fuse import fuse

    model = make(torch.float32, ATTENTION, nf4=False, family="gemma2")
    _, theirs = step(copy.deepcopy(model))
    found = fuse(model)
    assert (found.linears, found.mlps) == (8, 0)
    assert "another formula" in next(iter(found.left))
    assert worst(step(model, recompute=True)[1], theirs) < 1e-5


def test_looking_at_the_modules_packs_no_weight() -> None:
    """bitsandbytes packs for AVX512-BF16 in a forward without gradients, and changes the scales."""
    model = make(torch.float32, ATTENTION, nf4=True)
    layers = [m for m in model.modules() if type(m).__name__ == "Linear4bit"]
    for layer in layers:
        layer.support_avx512bf16_for_cpu = True
    from tuneserve.lm.fuse import fuse

    fuse(model.eval())
    for layer in layers:
        state = layer.weight.quant_state
        assert state.nested and not getattr(state, "packing_format_for_cpu", False)


def test_heads_that_are_rotated_in_part_keep_their_own_function() -> None:
    def theirs(q: Any, k: Any, cos: Any, sin: Any, unsqueeze_dim: int = 1) -> tuple[Any, ...]:
        return q * cos.shape[-1], k * unsqueeze_dim

    q, k = torch.ones(1, 2, 3, 8), torch.ones(1, 1, 3, 8)
    part = torch.ones(1, 3, 6)
    rotated, other = elementwise.rotary_or(theirs)(q, k, part, part)
    assert torch.equal(rotated, q * 6) and torch.equal(other, k)


def test_adapters_can_still_be_switched_off() -> None:
    from tuneserve.lm.fuse import fuse

    model = make(torch.float32, "all-linear", nf4=False).eval()
    plain = copy.deepcopy(model)
    fuse(model)
    with torch.no_grad(), model.disable_adapter(), plain.disable_adapter():
        ours, theirs = model(input_ids=IDS).logits, plain(input_ids=IDS).logits
    assert torch.equal(ours, theirs)


def test_head_loss_equals_cross_entropy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Through parts of 64 rows, some without a label; the gradient scales with what comes in."""
    monkeypatch.setattr(fused, "_LOGITS_BYTES", 1)
    torch.manual_seed(0)
    hidden = torch.randn(150, 32, requires_grad=True)
    weight, labels = torch.randn(97, 32), torch.randint(0, 97, (150,))
    labels[torch.tensor([0, 3, 70, 71, 149])] = -100
    theirs = torch.nn.functional.cross_entropy(hidden @ weight.t(), labels, reduction="sum") * 0.5
    (expected,) = torch.autograd.grad(theirs, hidden)
    ours = fused.HeadLoss.apply(hidden, weight, labels) * 0.5
    (found,) = torch.autograd.grad(ours, hidden)
    assert float(ours.detach()) == pytest.approx(float(theirs.detach()), rel=1e-5)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_no_supervised_row_is_a_zero_that_goes_back() -> None:
    hidden = torch.randn(4, 8, requires_grad=True)
    none = torch.full((4,), -100)
    loss = fused.HeadLoss.apply(hidden, torch.randn(9, 8), none)
    loss.backward()
    assert float(loss.detach()) == 0 and not bool(hidden.grad.count_nonzero())


def test_the_plan_counts_with_the_same_sizes() -> None:
    """Of the module as it is, without this file's smaller parts."""
    from importlib import reload

    whole = reload(fused)
    assert whole._PART_BYTES == fusedstep.PART_BYTES
    assert whole._PART_WIDTH == fusedstep.PART_WIDTH
    assert whole._PART_MULTIPLE == fusedstep.PART_MULTIPLE
    assert whole._LOGITS_BYTES == fusedstep.LOGITS_BYTES
    sizes = ((4096, 3584, 18944), (8192, 4096, 14336), (8, 3584, 18944), (60, 128, 300))
    for (tokens, hidden, inner), quantized in itertools.product(sizes, (False, True)):
        into = SimpleNamespace(out_features=inner, in_features=hidden, quantized=quantized)
        back = SimpleNamespace(out_features=hidden, in_features=inner, quantized=quantized)
        layers = tuple(whole.Layer(weight) for weight in (into, into, back))  # type: ignore[arg-type]
        arch = SimpleNamespace(hidden=hidden, inner=inner)
        width = fusedstep.part_width(tokens, arch, 2, quantized=quantized)  # type: ignore[arg-type]
        assert whole._parts(tokens, layers, 2)[0][1] == width


KERNELS = """
import json, torch
from tuneserve.lm import elementwise, kernels
from tuneserve.lm.fourbit import FourBit
torch.manual_seed(0)
both, d = torch.randn(5, 3000), torch.randn(5, 1500)
halves = (both[:, :1500], both[:, 1500:])
ours, theirs = (m.silu_mul(*halves, torch.empty_like(d)) for m in (kernels, elementwise))
errors = {"silu": ours - theirs}
results = []
for module in (kernels, elementwise):
    into, gradient = torch.empty_like(both), d.clone()
    module.silu_mul_backward(gradient, *halves, (into[:, :1500], into[:, 1500:]), keep_product=True)
    results += [into, gradient]
errors |= {"back": results[0] - results[2], "product": results[1] - results[3]}
packed, angles = torch.randn(2, 7, 20, 8), torch.rand(2, 7, 4).repeat(1, 1, 2)
q, k = packed[:, :, :18].transpose(1, 2), packed[:, :, 18:].transpose(1, 2)
cos, sin = angles.cos(), angles.sin()
out = kernels.rotate(q, k, cos, sin, 1.0)
back = kernels.rotate(*out, cos, sin, -1.0)
for name, x, turned, again in zip("qk", (q, k), out, back):
    expected = torch.cat((-x[..., 4:], x[..., :4]), -1) * sin[:, None] + x * cos[:, None]
    errors |= {"rotary " + name: turned - expected, "rotary back " + name: again - x}
z, labels = torch.randn(6, 9000), torch.randint(0, 9000, (6,))
one, other = z.clone(), z.clone()
ours = kernels.cross_entropy(one, labels, 0.3)
theirs = elementwise.cross_entropy(other, labels, 0.3)
errors["loss"] = ours - theirs
errors["loss back"] = one - other
packed, table = torch.randint(0, 256, (5, 160), dtype=torch.uint8), torch.randn(16)
coded, code = torch.randint(0, 256, (25,), dtype=torch.uint8), torch.rand(256)
second, plain = torch.rand(4), torch.rand(25)  # eight scales share one
codes = torch.stack((packed >> 4, packed & 15), -1).view(5, 320).long()
for name, absmax, scales in (
    ("nested", coded, code[coded.long()] * second.repeat_interleave(8)[:25] + 0.25),
    ("plain", plain, plain),
):
    weight = table[codes] * scales.view(5, 5).repeat_interleave(64, 1)
    stored = FourBit(
        packed, table, 64, absmax, code, second, 8, 0.25, name == "nested"
    )
    rows, part = torch.empty(3, 320), torch.empty(5, 192)
    kernels.dequantize(stored, 5, 0, rows.view(1, -1))
    kernels.dequantize(stored, 2, 5, part)
    errors |= {name + " rows": rows - weight[1:4], name + " columns": part - weight[:, 128:]}
print("ERRORS" + json.dumps({k: float(v.abs().max()) for k, v in errors.items()}))
"""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
def test_triton_kernels_in_the_interpreter() -> None:
    """Every kernel of the GPU, run by Triton's interpreter against the formula in torch."""
    done = subprocess.run(
        [sys.executable, "-c", KERNELS],
        env={"TRITON_INTERPRET": "1", "PATH": ""},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    errors = json.loads(done.stdout.rpartition("ERRORS")[2])
    assert len(errors) == 13 and all(error < 5e-6 for error in errors.values()), errors
