"""Put the fused forms on a loaded model, wherever they give what its own modules give. Engine file.

Nothing is assumed of a family: a linear layer is replaced only if it is torch's or bitsandbytes'
own with a plain adapter; an MLP, a norm or the rotation only if its fused form agrees with it on a
random input. What is not replaced stays as transformers and PEFT made it, and is as right, only
slower and larger.
"""

from __future__ import annotations

import logging
import sys
import types
from dataclasses import dataclass, field
from typing import Any

import torch

from tuneserve.lm import elementwise
from tuneserve.lm.frozen import Weight
from tuneserve.lm.fused import GatedMlp, Keep, Layer, LoraLinear
from tuneserve.lm.together import Group, Handed, LoraLinears, can_group
from tuneserve.lm.walks import shorten_walks

log = logging.getLogger(__name__)

_PROBE_ROWS = 8
_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}
# Values last: see `tuneserve.lm.together.Group.products`.
_TOGETHER = ("q_proj", "k_proj", "v_proj")
# Blocks that add the MLP's output to the residual and nothing else: it is not kept by anybody, so
# in the recomputation of a checkpointed block it need not be computed.
_OUTPUT_UNUSED = frozenset({"input_layernorm", "self_attn", "post_attention_layernorm", "mlp"})
_PLAIN_RESIDUAL = frozenset({"llama", "mistral", "ministral3", "qwen2", "qwen3", "smollm3"})


@dataclass
class Fused:
    """How many modules of each kind were replaced, and what was left as it was, with the reason."""

    linears: int = 0
    mlps: int = 0
    norms: int = 0
    rotary: bool = False
    left: dict[str, int] = field(default_factory=dict)

    def leave(self, why: str) -> None:
        """Count one that was left."""
        self.left[why] = self.left.get(why, 0) + 1

    @property
    def whole(self) -> bool:
        """Whether every MLP and every adapter is fused, which is what the plan counts on."""
        return self.mlps > 0 and not self.left

    def __str__(self) -> str:
        rotary = ", rotary embedding" if self.rotary else ""
        left = "".join(f"; {count} left: {why}" for why, count in self.left.items())
        return (
            f"fused: {self.linears} linear layers, {self.mlps} MLPs, {self.norms} norms"
            f"{rotary}{left}"
        )


def fuse(model: Any) -> Fused:
    """Replace the forward methods of a model that PEFT wrapped; its weights and names stay.

    Args:
        model: In its final types and on its device; adapters as they will be trained.
    """
    found = Fused()
    inside: set[torch.nn.Module] = set()
    kind = str(getattr(model.config.get_text_config(), "model_type", ""))
    for block in list(model.modules()):
        mlp = getattr(block, "mlp", None)
        if isinstance(mlp, torch.nn.Module) and _fuse_mlp(block, mlp, kind, found):
            inside |= {mlp.gate_proj, mlp.up_proj, mlp.down_proj}
    handed = Handed()
    for attention in list(model.modules()):
        inside |= _fuse_together(attention, handed, found)
    for module in list(model.modules()):
        if _is_lora(module) and module not in inside:
            _fuse_linear(module, found)
    if next(model.parameters()).is_cuda:
        _fuse_norms(model, found)
        _fuse_rotary(model, found)
    shorten_walks(model)
    log.info("%s", found)
    return found


def _is_lora(module: torch.nn.Module) -> bool:
    return hasattr(module, "lora_A") and isinstance(
        getattr(module, "base_layer", None), torch.nn.Linear
    )


def _fusable(module: torch.nn.Module) -> tuple[Layer, list[Any]] | str:
    """The frozen layer and its adapter's factors (both None without one), or why not."""
    base = getattr(module, "base_layer", module)
    if not isinstance(base, torch.nn.Linear) or base.weight.requires_grad:
        return "trained whole, or no linear layer"
    if base.bias is not None and base.bias.requires_grad:
        return "a bias that is trained"
    state = getattr(base.weight, "quant_state", None)
    if state is None and not base.weight.is_floating_point():
        return "an unknown quantization"
    if getattr(state, "packing_format_for_cpu", False):
        return "weights packed for this CPU"
    if state is not None and state.shape[1] % state.blocksize:
        return "rows that share a scale"
    weight = Weight(base)
    if not _is_lora(module):
        return Layer(weight), [None, None]
    if len(module.active_adapters) != 1 or getattr(module, "merged", False):
        return "not exactly one adapter"
    name = module.active_adapters[0]
    a, b = module.lora_A[name], module.lora_B[name]
    if name in getattr(module, "lora_variant", {}):
        return "DoRA or another variant"
    if not isinstance(module.lora_dropout[name], torch.nn.Identity):
        return "dropout before the adapter"
    if getattr(b, "bias", None) is not None or getattr(module, "fan_in_fan_out", False):
        return "an adapter with bias, or transposed"
    products = base.weight.dtype if state is None else state.dtype
    if a.weight.dtype != products and products != torch.float16:
        return "an adapter of another type than the products"
    return Layer(weight, float(module.scaling[name])), [a.weight, b.weight]


def _as_products(factors: list[Any], layer: Layer) -> list[Any]:
    """The factors in the type of the products: beside float16 they are trained in float32, and
    autograd widens their gradients."""
    return [f if f is None or f.dtype == layer.weight.dtype else f.half() for f in factors]


def _fuse_linear(module: Any, found: Fused) -> None:
    parts = _fusable(module)
    if isinstance(parts, str):
        found.leave(f"adapters: {parts}")
        return
    layer, (a, b) = parts
    plain = module.forward

    def forward(self: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if self.disable_adapters or args or kwargs:
            return plain(x, *args, **kwargs)
        return LoraLinear.apply(x, layer, *_as_products([a, b], layer))

    module.forward = types.MethodType(forward, module)
    found.linears += 1


def _fuse_together(attention: Any, handed: Handed, found: Fused) -> set[torch.nn.Module]:
    """One node for queries, keys and values, each of which may have an adapter or none."""
    modules: list[Any] = [getattr(attention, name, None) for name in _TOGETHER]
    if any(not isinstance(m, torch.nn.Module) for m in modules):
        return set()
    adapted = [m for m in modules if _is_lora(m)]
    if not adapted:
        return set()
    parts = [_fusable(m) for m in modules]
    layers = [part[0] for part in parts if not isinstance(part, str)]
    factors = [f for part in parts if not isinstance(part, str) for f in part[1]]
    if len(layers) < len(modules) or not can_group(layers, factors):
        return set()
    group = Group(layers, factors)
    for at, module in enumerate(modules):
        plain = module.forward

        def forward(
            self: Any, x: torch.Tensor, *args: Any, at: int = at, plain: Any = plain, **kwargs: Any
        ) -> torch.Tensor:
            if adapted[0].disable_adapters or args or kwargs:
                return plain(x, *args, **kwargs)
            return handed.ask(
                group,
                at,
                x,
                lambda: LoraLinears.apply(x, group, *_as_products(factors, group.layers[0])),
            )

        module.forward = types.MethodType(forward, module)
    found.linears += len(adapted)
    return set(modules)


def _fuse_mlp(block: Any, mlp: Any, kind: str, found: Fused) -> bool:
    names = ("gate_proj", "up_proj", "down_proj")
    projections: list[Any] = [getattr(mlp, name, None) for name in names]
    if any(not isinstance(p, torch.nn.Module) for p in projections):
        return False
    parts = [_fusable(p) for p in projections]
    why = next((part for part in parts if isinstance(part, str)), "")
    if why:
        found.leave(f"MLPs: {why}")
        return False
    layers = tuple(part[0] for part in parts if not isinstance(part, str))
    factors = [f for part in parts if not isinstance(part, str) for f in part[1]]
    adapted = [p for p in projections if _is_lora(p)]
    if layers[0].weight.quantized != layers[1].weight.quantized:
        found.leave("MLPs: one projection quantized, one not")
        return False
    lean = kind in _PLAIN_RESIDUAL and {n for n, _ in block.named_children()} == _OUTPUT_UNUSED
    plain = mlp.forward

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        if adapted and adapted[0].disable_adapters:
            return plain(x)
        cast = _as_products(factors, layers[0])
        return GatedMlp.apply(x, layers, _keep(block, lean=lean), *cast)

    mlp.forward = types.MethodType(forward, mlp)
    if not _agree(lambda x: plain(x), mlp.forward, mlp, layers[0].weight.in_features):
        del mlp.forward
        found.leave("MLPs: another formula")
        return False
    found.mlps += 1
    return True


def _keep(block: Any, *, lean: bool) -> Keep:
    """What the block's MLP has to keep in the pass that is under way."""
    if not torch.is_grad_enabled():
        return Keep.INPUT
    if not (getattr(block, "gradient_checkpointing", False) and block.training):
        return Keep.ACTIVATIONS
    # A checkpointed block is computed again from inside the backward pass.
    again = torch._C._current_autograd_node() is not None
    return Keep.NOTHING_NEW if lean and again else Keep.INPUT


def _agree(plain: Any, fused: Any, module: Any, width: int) -> bool:
    """Whether two forwards give the same on random rows, up to the rounding of the type."""
    dtype, device = _type_of(module)
    generator = torch.Generator("cpu").manual_seed(0)
    x = torch.randn(1, _PROBE_ROWS, width, generator=generator).to(device, dtype)
    # With gradients: without, bitsandbytes packs the weights anew on CPUs that have AVX512-BF16,
    # and what the fused form keeps of them would be wrong from then on.
    x.requires_grad_()
    with torch.enable_grad():
        try:
            ours = fused(x).detach().float()
        except (RuntimeError, ValueError, TypeError, AttributeError):
            return False
        theirs = plain(x).detach().float()
    error = (ours - theirs).norm() / theirs.norm().clamp(min=1e-30)
    return bool(error <= _TOLERANCE.get(dtype, 1e-5))


def _type_of(module: torch.nn.Module) -> tuple[torch.dtype, torch.device]:
    for parameter in module.parameters():
        state = getattr(parameter, "quant_state", None)
        if state is not None:
            return state.dtype, parameter.device
    first = next(module.parameters())
    return first.dtype, first.device


def _fuse_norms(model: Any, found: Fused) -> None:
    """Root mean square norms by torch's own kernel, which keeps the input and no float32 copy."""
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if not type(module).__name__.endswith("RMSNorm") or not isinstance(weight, torch.Tensor):
            continue
        if weight.ndim != 1 or weight.requires_grad:
            continue
        eps = float(getattr(module, "variance_epsilon", getattr(module, "eps", 1e-6)))

        def forward(self: Any, x: torch.Tensor, eps: float = eps) -> torch.Tensor:
            return torch.nn.functional.rms_norm(x, self.weight.shape, self.weight, eps)

        plain, ours = module.forward, types.MethodType(forward, module)
        if _agree(plain, ours, module, len(weight)):
            module.forward = ours
            found.norms += 1


def _fuse_rotary(model: Any, found: Fused) -> None:
    """Rotary embedding in one kernel instead of ten, for the module that the attention is from."""
    if not elementwise.has_triton():
        return
    sources = {
        type(m).__module__ for m in model.modules() if type(m).__name__.endswith("Attention")
    }
    dtype, device = _type_of(model)
    generator = torch.Generator("cpu").manual_seed(0)
    config = model.config.get_text_config()
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if size & (size - 1):
        return
    q, k = (torch.randn(1, n, 4, size, generator=generator).to(device, dtype) for n in (4, 2))
    angles = torch.rand(1, 4, size // 2, generator=generator).repeat(1, 1, 2).to(device)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    for source in sources:
        module = sys.modules.get(source)
        theirs = getattr(module, "apply_rotary_pos_emb", None)
        if theirs is None or getattr(theirs, "fused", False):
            found.rotary |= theirs is not None
            continue
        try:
            pairs = zip(elementwise.rotary(q, k, cos, sin), theirs(q, k, cos, sin), strict=True)
            errors = [float((a - b).float().norm() / b.float().norm()) for a, b in pairs]
        except (RuntimeError, ValueError, TypeError):
            continue
        if max(errors) <= _TOLERANCE.get(dtype, 1e-5):
            module.apply_rotary_pos_emb = elementwise.rotary_or(theirs)  # type: ignore[union-attr]
            found.rotary = True
