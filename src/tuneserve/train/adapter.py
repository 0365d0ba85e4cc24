"""Put the adapter on a base, save it, and prove that what was saved was trained. Engine file."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from tuneserve.config import LoraSection
from tuneserve.errors import AdapterError, RunFileError, TrainingDiverged

log = logging.getLogger(__name__)

_EXPERT = re.compile(r"\bexperts\.\d+\.")
WEIGHTS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"


def add_adapter(model: Any, lora: LoraSection, dtype: torch.dtype) -> Any:
    """Wrap a loaded base with a fresh LoRA adapter whose parameters are of `dtype`.

    The base must be loaded, and quantized, before: the order is fixed. DoRA magnitudes stay
    float32, since their updates are smaller than bfloat16 can represent.

    Raises:
        RunFileError: A name of `target_modules` or `modules_to_save` matches nothing, the head is
            targeted, a quantized layer is to be trained whole, or PEFT takes no adapter there.
    """
    import peft

    check_names(model, lora)
    config = peft.LoraConfig(
        r=lora.r,
        lora_alpha=lora.alpha if lora.alpha % 1 else int(lora.alpha),
        lora_dropout=lora.dropout,
        target_modules=lora.target_modules,
        use_rslora=lora.use_rslora,
        use_dora=lora.use_dora,
        modules_to_save=lora.modules_to_save or None,
        bias="none",
        task_type="CAUSAL_LM",
    )
    try:
        wrapped = peft.get_peft_model(model, config)
    except (TypeError, ValueError) as error:
        head = model.get_output_embeddings()
        linear = {
            name
            for name, module in model.named_modules()
            if isinstance(module, torch.nn.Linear) and module is not head
        }
        raise RunFileError(
            f"train.lora: PEFT refuses this adapter on a {model.config.model_type} ({error})",
            expected="layers that PEFT can put an adapter on, and single modules to train whole",
            hint=f"list others in train.lora.target_modules, of {', '.join(_leaves(linear))}",
        ) from error
    unify_dtype(wrapped, dtype)
    return wrapped


def unify_dtype(model: Any, dtype: torch.dtype) -> None:
    """Give all trained parameters one dtype, DoRA magnitudes excepted."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            wanted = torch.float32 if "lora_magnitude_vector" in name else dtype
            parameter.data = parameter.data.to(wanted)


def join_types(model: Any, dtype: torch.dtype) -> None:
    """Let modules that are trained whole, in float32, stand among layers of `dtype`: what goes in
    and out is cast. Adapters cast by themselves.
    """
    from peft.utils import ModulesToSaveWrapper

    def widen(module: Any, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(_cast(value, torch.float32) for value in inputs)

    def narrow(module: Any, inputs: tuple[Any, ...], output: Any) -> Any:
        return _cast(output, dtype)

    for wrapper in model.modules():
        if isinstance(wrapper, ModulesToSaveWrapper):
            for whole in wrapper.modules_to_save.values():
                whole.register_forward_pre_hook(widen)
                whole.register_forward_hook(narrow)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if torch.is_tensor(value) and value.is_floating_point():
        return value.to(dtype)
    return value


def check_names(model: Any, lora: LoraSection) -> None:
    """Refuse module names that match nothing, which PEFT ignores as long as another one matches.

    Raises:
        RunFileError: Lists every wrong name, and the names there are.
    """
    modules = dict(model.named_modules())
    linear = {n for n, m in modules.items() if isinstance(m, torch.nn.Linear) or _is_conv1d(m)}
    heads = {n for n, m in modules.items() if m is model.get_output_embeddings()}
    targets = [] if isinstance(lora.target_modules, str) else lora.target_modules
    problems = [
        f"train.lora.target_modules: no linear layer of the model is called {name!r}"
        for name in targets
        if not _matches(name, linear | _embeddings(modules))
    ]
    problems += [
        f"train.lora.modules_to_save: no module of the model is called {name!r}"
        for name in lora.modules_to_save
        if not _matches(name, modules)
    ]
    if problems:
        raise RunFileError(
            "\n  ".join(problems),
            expected=f"names among {', '.join(_leaves(linear - heads))}; or all-linear",
            hint="mend the names; the end of a module's name is enough",
        )
    whole = {n for n in linear if any(_matches(s, _with_parents(n)) for s in lora.modules_to_save)}
    for name in targets:
        meant = {full for full in linear if _matches(name, [full])}
        if meant and meant <= whole:
            raise RunFileError(
                f"train.lora.target_modules: {name!r} is in modules_to_save as well, by which it "
                "is trained whole and gets no adapter",
                expected="each name in one of the two",
                hint="take it out of one of them",
            )
    quantized = [n for n in linear if hasattr(modules[n].weight, "quant_state")]
    for name in lora.modules_to_save:
        if any(_matches(name, _with_parents(full)) for full in quantized):
            raise RunFileError(
                f"train.lora.modules_to_save: {name!r} is quantized, and cannot be trained whole",
                expected="embeddings, norms or the head",
                hint="list it in train.lora.target_modules instead, or set train.method: lora",
            )
    tied = bool(getattr(model.config.get_text_config(), "tie_word_embeddings", False))
    for name in targets:
        hit = _matches(name, heads) or (tied and _matches(name, _embeddings(modules)))
        if hit:
            why = "shares its weight with the embedding" if tied else "is multiplied in tiles"
            raise RunFileError(
                f"train.lora.target_modules: {name!r} is the head or embedding, which {why}",
                expected=f"names among {', '.join(_leaves(linear - heads))}; or all-linear",
                hint="leave it out, or train it whole with train.lora.modules_to_save",
            )


def _matches(name: str, among: Iterable[str]) -> bool:
    return bool(name) and any(full == name or full.endswith(f".{name}") for full in among)


def _with_parents(full: str) -> list[str]:
    """A module's name, and those of all that it is in."""
    parts = full.split(".")
    return [".".join(parts[:end]) for end in range(1, len(parts) + 1)]


def _leaves(names: Iterable[str]) -> list[str]:
    return sorted({name.rpartition(".")[2] for name in names})


def _embeddings(modules: dict[str, Any]) -> set[str]:
    return {n for n, m in modules.items() if isinstance(m, torch.nn.Embedding)}


def _is_conv1d(module: Any) -> bool:
    return type(module).__name__ == "Conv1D"


def may_be_unused(model: Any) -> bool:
    """Whether some of what is trained may get no row in a step: factors of a single expert.

    DDP would wait for their gradients; looking for them costs a walk over the graph in each step.
    """
    trained = (name for name, parameter in model.named_parameters() if parameter.requires_grad)
    return any(_EXPERT.search(name) for name in trained)


def check_gradients(model: Any, named: Sequence[str] = ()) -> None:
    """After a backward pass: do gradients reach what is to be trained?

    Targets that they do not reach are said; experts need no row in every step. At first lora_B is
    zero, so only its own gradient tells anything.

    Args:
        model: The wrapped model.
        named: Targets that the run file lists; under ``all-linear`` none is meant by itself.

    Raises:
        AdapterError: None is reached at all, or none of those with one of the names.
    """
    trained = [(name, p.grad) for name, p in model.named_parameters() if p.requires_grad]
    reached = {name for name, grad in trained if grad is not None and bool(grad.count_nonzero())}
    if not reached:
        raise AdapterError(
            f"no gradient reaches any of the {len(trained)} trained tensors",
            expected="a gradient in the adapter after one backward pass",
            hint="check train.lora.target_modules and that rows are supervised",
        )
    targets = {n.partition(".lora_B.")[0]: n in reached for n, _ in trained if ".lora_B." in n}
    hits = {name: [targets[t] for t in targets if _matches(name, [t])] for name in named}
    idle = [name for name, found in hits.items() if found and not any(found)]
    if idle:
        raise AdapterError(
            f"no gradient reaches any layer called {', '.join(idle)}",
            expected="a gradient in every target after one backward pass",
            hint="take these names out of train.lora.target_modules: what the model computes from "
            "these rows does not go through them",
        )
    missed = [t for t, hit in targets.items() if not hit and not _EXPERT.search(t)]
    if missed:
        log.warning(
            "%d of %d targets get no gradient, first %s: they will stay as they are",
            len(missed),
            len(targets),
            missed[0],
        )


def trainable_parameters(model: Any) -> int:
    """How many numbers are trained."""
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


def save_adapter(model: Any, folder: Path, base_name: str) -> None:
    """Write the adapter in PEFT's format, the same bytes for the same weights.

    Args:
        model: The wrapped model.
        folder: Where to.
        base_name: What the config says the base is; a path of this machine would leak and differ.
    """
    model.save_pretrained(folder, save_embedding_layers=False)
    (folder / "README.md").unlink(missing_ok=True)  # a template nobody filled in
    path = folder / CONFIG
    config = json.loads(path.read_text(encoding="utf-8"))
    config["base_model_name_or_path"] = base_name
    # PEFT keeps names as sets, whose order changes from process to process.
    config = {k: sorted(v) if _is_names(v) else v for k, v in config.items()}
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _is_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def load_adapter(model: Any, path: Path) -> None:
    """Put saved adapter weights into a wrapped model, bit for bit.

    Raises:
        AdapterError: The file holds other tensors or shapes than the model's adapter.
    """
    import peft
    from safetensors.torch import load_file

    saved = load_file(path)
    _check_same(saved, peft.get_peft_model_state_dict(model, save_embedding_layers=False), path)
    peft.set_peft_model_state_dict(model, saved)


def prove_trained(model: Any, path: Path) -> None:
    """Read a saved adapter again: is it the model's, finite, and not what it began as?

    Raises:
        AdapterError: Tensors are missing or left over, or every lora_B is zero: nothing was
            trained. TrainingDiverged: A number is not finite.
    """
    import peft
    from safetensors.torch import load_file

    saved = load_file(path) if path.is_file() else {}
    live = peft.get_peft_model_state_dict(model, save_embedding_layers=False)
    _check_same(saved, live, path)
    bad = sorted(name for name, tensor in saved.items() if not bool(tensor.isfinite().all()))
    if bad:
        raise TrainingDiverged(
            f"{len(bad)} of {len(saved)} saved tensors are not finite, first {bad[0]}",
            hint="lower train.learning_rate, and look at the last rows of the loss curve",
            details={"tensors": bad[:20]},
        )
    ends = [name for name in saved if ".lora_B." in name or "lora_embedding_B" in name]
    zero = sorted(name for name in ends if not bool(saved[name].count_nonzero()))
    if ends and len(zero) == len(ends):
        raise AdapterError(
            f"all {len(ends)} lora_B tensors are zero: the adapter does nothing",
            expected="an adapter that was trained",
            hint="check train.max_steps and train.learning_rate",
        )
    if zero:
        log.warning("%d of %d targets were never reached, first %s", len(zero), len(ends), zero[0])


def _check_same(saved: dict[str, Any], live: dict[str, Any], path: Path) -> None:
    wrong = sorted(
        f"{name}: {_shape(saved, name)} in the file, {_shape(live, name)} in the model"
        for name in saved.keys() | live.keys()
        if name not in saved or name not in live or saved[name].shape != live[name].shape
    )
    if wrong or not saved:
        raise AdapterError(
            f"{path.name}: {len(wrong)} tensors do not fit: " + "; ".join(wrong[:3]),
            expected=f"{len(live)} tensors of the adapter that is trained",
            hint="remove the checkpoint and train again",
        )


def _shape(tensors: dict[str, Any], name: str) -> str:
    return "x".join(map(str, tensors[name].shape)) if name in tensors else "none"
