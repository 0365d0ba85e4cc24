"""Load a base model, in 16 bits or in NF4. Engine file: imports torch and transformers."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch

from tuneserve.errors import ModelError, RunFileError
from tuneserve.lm.hardware import dtype_name

log = logging.getLogger(__name__)

NF4_BLOCKSIZE = 64
"""Weights per scale; bitsandbytes' default, which transformers does not let one change."""


def quiet_libraries(*, deepspeed: bool = False) -> None:
    """Keep the libraries' banners and bars out of the log, and them off the network.

    To be called before peft is imported.

    Args:
        deepspeed: It is needed; otherwise it counts as not installed, since the libraries import
            it wherever they find it.
    """
    # PEFT imports gptqmodel when it is installed, which patches transformers and safetensors, and
    # refuses every LoRA when its companion package is missing. Here it counts as not installed.
    sys.modules.setdefault("gptqmodel", None)  # type: ignore[arg-type]
    if not deepspeed:
        sys.modules.setdefault("deepspeed", None)  # type: ignore[arg-type]
    elif sys.modules.get("deepspeed", sys) is None:
        del sys.modules["deepspeed"]  # an earlier call of this process did without it
    # The base is a local folder: any hub access would be for kernels nobody asked for.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    warnings.filterwarnings("ignore", category=FutureWarning)
    # bitsandbytes misses a kernel from the hub, and has its own.
    developers = ("torchao", "torch.utils._pytree", "bitsandbytes.backends.cpu.ops")
    for noisy in (*developers, "accelerate.utils.modeling"):
        logging.getLogger(noisy).setLevel(logging.ERROR)
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


def load_base(
    folder: Path,
    *,
    device: torch.device,
    dtype: torch.dtype,
    nf4: bool,
    attention: str = "sdpa",
    trust_remote_code: bool = False,
) -> Any:
    """The causal language model in `folder`, frozen, in evaluation mode.

    With `nf4` its linear layers (the head excepted) are quantized to NF4 with double quantization
    (QLoRA, Dettmers et al., 2023) on the way in; embeddings, norms and head keep `dtype`. Nothing
    is upcast afterwards: bf16 embeddings and norms train adapters as well, and a float32 copy of a
    large vocabulary costs gigabytes.

    Raises:
        ModelError: The folder holds no causal language model that can be loaded, or weights that
            float16 cannot hold, where that is `dtype`.
        RunFileError: The attention kernel is not installed.
    """
    from transformers import AutoModelForCausalLM

    options: dict[str, Any] = {}
    if nf4:
        options["quantization_config"] = _nf4_config(dtype)
    try:
        model = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=dtype,
            device_map={"": device},
            attn_implementation=attention,
            trust_remote_code=trust_remote_code,
            local_files_only=True,
            **options,
        )
    except ImportError as error:
        if attention in str(error) or "flash" in str(error).lower():
            raise RunFileError(
                f"train.attention: {attention} is not usable here ({error})",
                expected="an attention kernel that is installed",
                hint="set train.attention: sdpa, or install it",
            ) from error
        raise
    except (OSError, ValueError, KeyError) as error:
        if "attention implementation" in str(error):
            raise RunFileError(
                f"train.attention: {attention} is not what this family has ({error})",
                expected="an attention kernel that transformers has for the model",
                hint="set train.attention: eager",
            ) from error
        raise ModelError(
            f"{folder}: the base model cannot be loaded ({error})",
            expected="a causal language model that the installed transformers knows",
            hint="`tuneserve doctor` shows the versions",
        ) from error
    model.requires_grad_(False)
    _keep_unpacked(model)
    if nf4 and not quantized_modules(model):
        raise ModelError(
            f"{folder}: bitsandbytes finds no linear layer to quantize in a "
            f"{model.config.model_type}",
            expected="layers of torch's own class for linear layers",
            hint="set train.method: lora",
        )
    if dtype == torch.float16:
        _check_range(model, folder)
    log.info(
        "base: %s parameters, %s, computing in %s on %s, attention by %s",
        f"{_parameter_count(model):,}",
        "NF4 with double quantization" if nf4 else "16 bits",
        dtype_name(dtype),
        device,
        "torch's fastest kernel here (sdpa)" if attention == "sdpa" else attention,
    )
    return model.eval()


def _keep_unpacked(model: Any) -> None:
    """Keep 4-bit weights in the order that training reads.

    On a CPU with AVX512-BF16 bitsandbytes packs them anew, in place and for good, when a module is
    evaluated: scales are rounded to bfloat16, sizes must be multiples of 64 and 32, and no gradient
    comes back through that kernel, so that a training evaluated between its steps stops to learn.
    """
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False


def quantized_modules(model: Any) -> list[str]:
    """Names of the linear layers that bitsandbytes quantized, as the checkpoint has them."""
    import bitsandbytes

    return sorted(
        name
        for name, module in model.named_modules()
        if isinstance(module, bitsandbytes.nn.Linear4bit)
    )


def nf4_settings(dtype: torch.dtype) -> dict[str, Any]:
    """What another tool needs to repeat the quantization."""
    return {
        "quant_type": "nf4",
        "double_quant": True,
        "blocksize": NF4_BLOCKSIZE,
        "compute_dtype": dtype_name(dtype),
    }


def _nf4_config(dtype: torch.dtype) -> Any:
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
    )


def _check_range(model: Any, folder: Path) -> None:
    """Refuse weights that became infinite in float16, as bfloat16's may be larger."""
    bad = not_finite(model)
    if bad:
        more = f" and {len(bad) - 8} more" if len(bad) > 8 else ""
        raise ModelError(
            f"{folder}: {len(bad)} tensors are not finite in float16: {', '.join(bad[:8])}{more}",
            expected="weights within 65504, float16's largest: this GPU has no bfloat16",
            hint="use a GPU that computes in bfloat16 (compute capability 8.0, Ampere or newer), "
            "or another base",
        )


def not_finite(model: Any) -> list[str]:
    """Names, as the base has them, of frozen tensors that are not finite; of quantized ones, those
    whose scales are not.
    """
    bad = []
    for name, parameter in model.named_parameters():
        state = getattr(parameter, "quant_state", None)
        stored = [parameter] if state is None else [state.absmax]
        if state is not None and state.nested:  # absmax is itself quantized, around an offset
            stored = [state.offset, state.state2.absmax]
        numbers = [torch.as_tensor(s) for s in stored if s.dtype.is_floating_point]
        if not parameter.requires_grad and not all(bool(n.isfinite().all()) for n in numbers):
            bad.append(name.removeprefix("base_model.model.").replace(".base_layer.", "."))
    return bad


def _parameter_count(model: Any) -> int:
    """Parameters as the checkpoint counts them: two 4-bit weights share a stored byte."""
    count = 0
    for parameter in model.parameters():
        state = getattr(parameter, "quant_state", None)
        count += (parameter if state is None else state.shape).numel()
    return count
