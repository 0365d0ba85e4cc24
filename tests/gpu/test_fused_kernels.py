"""The Triton kernels and fused nodes against torch's own operations, on a GPU."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def _error(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    assert ours.isfinite().all()
    return float((ours.double() - theirs.double()).norm() / theirs.double().norm())


def test_silu_mul() -> None:
    """Forward and backward of the gate, rows apart, in place, against float64."""
    from tuneserve.lm import elementwise

    both = torch.randn(300, 2 * 2600, device="cuda", dtype=torch.bfloat16)
    gate, up = both[:, :2600], both[:, 2600:]
    g, u = (half.double().requires_grad_() for half in (gate, up))
    product = torch.nn.functional.silu(g) * u
    d = torch.randn(300, 2600, device="cuda", dtype=torch.bfloat16)
    product.backward(d.double())
    assert _error(elementwise.silu_mul(gate, up, torch.empty_like(d)), product) < 4e-3
    elementwise.silu_mul_backward(d, gate, up, (gate, up), keep_product=True)
    assert _error(gate, g.grad) < 4e-3
    assert _error(up, u.grad) < 4e-3
    assert _error(d, product) < 4e-3


def test_rotary() -> None:
    """Values and gradients equal those of transformers' function."""
    from transformers.models.llama import modeling_llama

    from tuneserve.lm import elementwise

    theirs = getattr(modeling_llama, "apply_rotary_pos_emb")  # noqa: B009
    angles = torch.rand(2, 70, 64, device="cuda").repeat(1, 1, 2)
    cos, sin = angles.cos().bfloat16(), angles.sin().bfloat16()
    results = []
    for function in (elementwise.rotary, theirs):
        torch.manual_seed(0)
        q = torch.randn(2, 70, 28, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        k = torch.randn(2, 70, 4, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        out = function(q.transpose(1, 2), k.transpose(1, 2), cos, sin)
        sum((x.float() * torch.randn_like(x).float()).sum() for x in out).backward()
        results.append([*out, q.grad, k.grad])
    for ours, reference in zip(*results, strict=True):
        assert _error(ours, reference) < 5e-3


def test_cross_entropy() -> None:
    """Losses and the gradient left in place, against float64."""
    from tuneserve.lm import elementwise

    logits = torch.randn(130, 50_001, device="cuda", dtype=torch.bfloat16) * 3
    labels = torch.randint(0, 50_001, (130,), device="cuda")
    z = logits.double().requires_grad_()
    losses = torch.nn.functional.cross_entropy(z, labels, reduction="none")
    losses.sum().backward()
    assert _error(elementwise.cross_entropy(logits, labels, 1.0), losses) < 1e-5
    assert _error(logits, z.grad) < 4e-3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("nested", [True, False])
def test_dequantized_weight(nested: bool, dtype: torch.dtype) -> None:
    """The kernel is used and gives the library's numbers to the bit, by rows and by columns."""
    bnb = pytest.importorskip("bitsandbytes")

    from tuneserve.lm.frozen import Weight

    layer = bnb.nn.Linear4bit(
        *(1536, 200), bias=False, compute_dtype=dtype, quant_type="nf4", compress_statistics=nested
    )
    layer = layer.to(dtype).cuda()
    whole = bnb.functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state)
    weight = Weight(layer)
    assert weight._fast is not None and weight._fast.nested is nested
    assert torch.equal(weight.dense(), whole)
    for begin, end in ((0, 200), (0, 64), (130, 200), (7, 8)):
        out = torch.empty(end - begin, 1536, device="cuda", dtype=dtype)
        assert torch.equal(weight.rows(begin, end, None, out), whole[begin:end])
    for begin, end in ((0, 1024), (1024, 1536), (64, 128)):
        out = torch.empty(200, end - begin, device="cuda", dtype=dtype)
        assert torch.equal(weight.columns(begin, end, None, out), whole[:, begin:end])


@pytest.mark.parametrize("nf4", [False, True])
def test_queries_keys_and_values_of_one_node(nf4: bool) -> None:
    """Products and gradients as of float64, no worse than PEFT's modules in bfloat16 may be."""
    bnb = pytest.importorskip("bitsandbytes")

    from tuneserve.lm.frozen import Weight
    from tuneserve.lm.fused import Layer
    from tuneserve.lm.together import Group, LoraLinears

    torch.manual_seed(0)
    layers, dense, factors = [], [], []
    for at, rows in enumerate((1024, 256, 256)):
        kind = bnb.nn.Linear4bit if nf4 else torch.nn.Linear
        more = dict(compute_dtype=torch.bfloat16, quant_type="nf4") if nf4 else {}
        layer = kind(1024, rows, bias=at < 2, **more).to(torch.bfloat16).cuda()
        layers.append(Layer(Weight(layer.requires_grad_(False)), 0.5 + at))
        dense.append(Weight(layer).dense(torch.empty(rows, 1024, device="cuda").bfloat16()))
        factors += [torch.randn(16, 1024) * 0.03, torch.randn(rows, 16) * 0.3]
    factors = [f.bfloat16().cuda().requires_grad_() for f in factors]
    x = torch.randn(2, 150, 1024, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    ours = LoraLinears.apply(x, Group(layers, factors), *factors)
    ds = [torch.randn_like(out) for out in ours]
    found = torch.autograd.grad(ours, [x, *factors], ds)
    wide, *exact = (t.detach().double().requires_grad_() for t in (x, *factors))
    theirs = []
    for at, (layer, weight) in enumerate(zip(layers, dense, strict=True)):
        out = (
            wide @ weight.double().t()
            + layer.scale * (wide @ exact[2 * at].t()) @ exact[2 * at + 1].t()
        )
        theirs.append(out if layer.weight.bias is None else out + layer.weight.bias.double())
    expected = torch.autograd.grad(theirs, [wide, *exact], [d.double() for d in ds])
    for one, other in zip([*ours, *found], [*theirs, *expected], strict=True):
        assert _error(one, other) < 8e-3
