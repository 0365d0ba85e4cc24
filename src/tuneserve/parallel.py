"""Ways to train on several GPUs that a run file may ask for and that are refused, with the reason.

Without torch: the run file is read by every command.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_FSDP = ("fsdp", "fsdp2", "fsdp_config", "fsdp_version")


def refuse_other_sharding(data: Any) -> Any:
    """A `train` section as it was given, unless it asks for sharding that does not work.

    Raises:
        ValueError: FSDP, with 4-bit or 16-bit weights, or a ZeRO stage other than 2.
    """
    if not isinstance(data, Mapping):
        return data
    asked = [name for name in _FSDP if data.get(name)]
    if asked and data.get("method", "qlora") == "qlora":
        raise ValueError(
            f"{asked[0]}: FSDP2 cannot shard 4-bit weights: it cuts the packed bytes apart from "
            "the scales that belong to them (bitsandbytes 1945, accelerate 3983); leave it out "
            "and set gpus, by which every GPU holds the 4-bit base whole"
        )
    if asked:
        raise ValueError(
            f"{asked[0]}: FSDP is not supported; leave it out and set gpus, with zero: 2 when the "
            "adapter is large, or method: qlora when the base does not fit on one GPU"
        )
    if data.get("zero") in (1, 3):
        raise ValueError(
            f"zero: {data['zero']} is not supported: stage 2 saves more than 1 at the same speed, "
            "and 3 would shard the frozen base, which method: qlora makes smaller; use 2 or 0"
        )
    return data


def check_zero(method: str, *, use_dora: bool) -> None:
    """Refuse ZeRO-2 where DeepSpeed would change what is trained.

    Raises:
        ValueError: The base is in 4 bits, or the adapter has float32 parameters.
    """
    if method != "lora":
        raise ValueError(
            "zero: 2 needs method: lora, since DeepSpeed casts the whole model to one type, and a "
            "4-bit base has none; with qlora set gpus alone"
        )
    if use_dora:
        raise ValueError(
            "zero: 2 cannot train lora.use_dora, whose magnitudes stay float32 while DeepSpeed "
            "casts the whole model to one type"
        )
