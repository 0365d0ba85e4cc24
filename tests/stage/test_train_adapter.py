"""What training is built from: dtypes, exact losses, the proof that a saved adapter was trained."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from train_rows import IGNORED, pico_dataset
from tuneserve.config import LoraSection, TrainSection
from tuneserve.cpu import has_bf16
from tuneserve.errors import AdapterError, ModelError, RunFileError, TrainingDiverged
from tuneserve.lm import hardware
from tuneserve.lm.fused_head import add_fused_head
from tuneserve.lm.load import load_base, quantized_modules
from tuneserve.lm.loss import pad_rows, row_losses
from tuneserve.lm.rows import Rows, read_rows
from tuneserve.train.adapter import (
    add_adapter,
    check_gradients,
    load_adapter,
    prove_trained,
    save_adapter,
)
from tuneserve.train.recipe import make_recipe

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def held_out(tmp_path_factory: pytest.TempPathFactory, pico_model: Path) -> Rows:
    dataset = pico_dataset(tmp_path_factory.mktemp("data") / "dataset", pico_model, rows=2)
    return read_rows(dataset.path / "eval.parquet")


def wrapped(base: Path, **lora: Any) -> Any:
    torch.manual_seed(0)
    model = load_base(base, device=CPU, dtype=torch.float32, nf4=False)
    return add_adapter(model, LoraSection(r=4, **lora), torch.float32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_nothing_is_upcast_after_loading_in_nf4(pico_model: Path, dtype: torch.dtype) -> None:
    """B05: load in 4 bits, then the adapter; embeddings, norms and adapter have one dtype."""
    model = load_base(pico_model, device=CPU, dtype=dtype, nf4=True)
    quantized = quantized_modules(model)
    model = add_adapter(model, LoraSection(), dtype)
    trained = {p.dtype for p in model.parameters() if p.requires_grad}
    assert trained == {dtype}
    frozen = {p.dtype for p in model.parameters() if not p.requires_grad}
    assert frozen == {torch.uint8, dtype}
    assert len(quantized) == 14 and not any("lm_head" in name for name in quantized)


def test_dora_magnitudes_stay_float32(pico_model: Path) -> None:
    model = load_base(pico_model, device=CPU, dtype=torch.bfloat16, nf4=False)
    model = add_adapter(model, LoraSection(use_dora=True), torch.bfloat16)
    kinds = {
        ("magnitude" in name, p.dtype) for name, p in model.named_parameters() if p.requires_grad
    }
    assert kinds == {(True, torch.float32), (False, torch.bfloat16)}


def test_losses_are_exact_and_padding_counts_for_nothing(pico_model: Path, held_out: Rows) -> None:
    """Against full logits, row by row without padding; the vocabulary is never multiplied whole."""
    model = load_base(pico_model, device=CPU, dtype=torch.float32, nf4=False)
    expected = []
    with torch.no_grad():
        for at in range(len(held_out)):
            ids, labels = (torch.from_numpy(x).long() for x in held_out.row(at))
            logits = model(input_ids=ids[None]).logits[0, :-1]
            nats = torch.nn.functional.cross_entropy(
                logits, labels[1:], ignore_index=IGNORED, reduction="sum"
            )
            expected.append(float(nats))

    def refuse(*args: Any) -> None:
        raise AssertionError("B08: logits of a whole batch")

    model.lm_head.register_forward_pre_hook(refuse)
    add_fused_head(model, float32=True)
    for batch_tokens in (4096, 100, 1):
        found = row_losses(model, held_out, range(len(held_out)), batch_tokens=batch_tokens)
        np.testing.assert_allclose(found.sums, expected, rtol=2e-5)
        assert found.counts.tolist() == held_out.supervised().tolist()
    mean = sum(expected) / held_out.supervised().sum()
    assert found.mean == pytest.approx(mean, rel=2e-5)


def test_gradients_through_the_tiled_head_are_those_of_full_logits(
    pico_model: Path, held_out: Rows
) -> None:
    batch = pad_rows(held_out, range(4), 8)
    grads = []
    for fused in (False, True):
        model = wrapped(pico_model)
        if fused:
            add_fused_head(model.get_base_model())
            loss = -model(**batch, fused_lm_head=True).log_probs.sum()
        else:
            logits = model(**{k: v for k, v in batch.items() if k != "labels"}).logits[:, :-1]
            loss = torch.nn.functional.cross_entropy(
                logits.flatten(0, 1), batch["labels"][:, 1:].flatten(), reduction="sum"
            )
        loss.backward()
        found = {n: p.grad for n, p in model.named_parameters() if "lora_B" in n}
        grads.append({n: g for n, g in found.items() if g is not None})
    assert len(grads[0]) == len(grads[1]) == 14
    for name, grad in grads[0].items():
        torch.testing.assert_close(grads[1][name], grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("out of memory"),
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate(handle)"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory"),
        MemoryError(),
    ],
)
def test_evaluation_that_does_not_fit_shrinks_itself(
    pico_model: Path, held_out: Rows, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    from tuneserve.lm import loss

    model = load_base(pico_model, device=CPU, dtype=torch.float32, nf4=False)
    add_fused_head(model, float32=True)
    expected = row_losses(model, held_out, range(len(held_out)))
    original, sizes = loss._batch_nats, []

    def small(model: Any, inputs: dict[str, torch.Tensor]) -> Any:
        sizes.append(len(inputs["input_ids"]))
        if sizes[-1] > 3:
            raise error
        return original(model, inputs)

    monkeypatch.setattr(loss, "_batch_nats", small)
    found = row_losses(model, held_out, range(len(held_out)))
    assert sizes[:3] == [8, 4, 2]
    np.testing.assert_allclose(found.sums, expected.sums, rtol=2e-5)
    error = RuntimeError("shapes do not fit")  # what smaller batches would not mend
    sizes.clear()
    with pytest.raises(RuntimeError, match="shapes do not fit"):
        row_losses(model, held_out, range(len(held_out)))
    assert sizes == [8]


def saved_adapter(folder: Path, model: Any) -> Path:
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(1))
    save_adapter(model, folder, "org/base")
    return folder / "adapter_model.safetensors"


def _all_zero(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {n: t * 0 if "lora_B" in n else t for n, t in tensors.items()}


def _one_inf(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    first = sorted(tensors)[0]
    return {**tensors, first: tensors[first] * float("inf")}


def _one_less(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {n: tensors[n] for n in sorted(tensors)[1:]}


def _prefix_twice(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {f"base_model.model.{n}": t for n, t in tensors.items()}


@pytest.mark.parametrize(
    ("spoil", "error", "says"),
    [
        (_all_zero, AdapterError, "all 14 lora_B tensors are zero"),
        (_one_inf, TrainingDiverged, "1 of 28 saved tensors are not finite"),
        (_one_less, AdapterError, "none in the file"),
        (_prefix_twice, AdapterError, "56 tensors do not fit"),
        (lambda tensors: {}, AdapterError, "28 tensors do not fit"),
    ],
)
def test_an_adapter_that_was_not_trained_is_no_success(
    tmp_path: Path,
    pico_model: Path,
    spoil: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]],
    error: type[Exception],
    says: str,
) -> None:
    """B10: whatever ended up in the file is read again before it counts."""
    model = wrapped(pico_model)
    path = saved_adapter(tmp_path, model)
    prove_trained(model, path)
    save_file(spoil(load_file(path)), path)
    with pytest.raises(error, match=says):
        prove_trained(model, path)


@pytest.mark.parametrize(
    ("whole", "says"),
    [("layers", "PEFT refuses this adapter on a llama .No modules"), ("", "is called ''")],
)
def test_what_peft_takes_no_adapter_on_is_the_run_files_error(
    pico_model: Path, whole: str, says: str
) -> None:
    with pytest.raises(RunFileError, match=says) as caught:
        wrapped(pico_model, modules_to_save=[whole])
    assert "q_proj" in str(caught.value) and "lm_head" not in str(caught.value)


def test_an_evaluation_leaves_4_bit_weights_as_they_are(
    pico_model: Path, held_out: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU with AVX512-BF16 bitsandbytes would pack them for a kernel without a way back."""
    monkeypatch.setattr("bitsandbytes.nn.modules.has_avx512bf16", lambda: True)
    model = load_base(pico_model, device=CPU, dtype=torch.float32, nf4=True)
    lora = LoraSection(r=4, target_modules=["q_proj"])  # v_proj and all others stay plain
    wrapped = add_adapter(model, lora, torch.float32)
    layer = wrapped.get_submodule("base_model.model.model.layers.1.self_attn.v_proj")
    packed = layer.weight.detach().clone()
    batch = {k: v for k, v in pad_rows(held_out, [0, 1], 8).items() if k != "attention_mask"}

    def gradient() -> torch.Tensor:
        wrapped.zero_grad()
        wrapped.train()
        wrapped(**batch).loss.backward()
        first = "base_model.model.model.layers.0.self_attn.q_proj.lora_B.default.weight"
        return wrapped.get_parameter(first).grad.clone()

    before = gradient()
    with torch.no_grad():
        wrapped.eval()(**batch)
    assert torch.equal(layer.weight, packed) and layer.weight.quant_state.nested
    assert before.count_nonzero() and torch.equal(gradient(), before)


def test_gradients_reach_every_target(
    pico_model: Path, held_out: Rows, caplog: pytest.LogCaptureFixture
) -> None:
    """B01: a target that is named and that nothing goes through is no target."""
    model = wrapped(pico_model)
    with pytest.raises(AdapterError, match="any of the 28 trained tensors"):
        check_gradients(model)
    batch = {k: v for k, v in pad_rows(held_out, [0, 1], 8).items() if k != "attention_mask"}
    model(**batch).loss.backward()
    check_gradients(model, ["q_proj", "self_attn.o_proj", "down_proj"])
    assert not caplog.text

    ends = {n: p for n, p in model.named_parameters() if "v_proj.lora_B" in n}
    assert len(ends) == 2  # one a block
    next(iter(ends.values())).grad = None
    check_gradients(model, ["q_proj", "v_proj"])
    assert "1 of 14 targets get no gradient, first base_model.model.model.layers.0.s" in caplog.text
    for parameter in ends.values():
        parameter.grad = torch.zeros_like(parameter)
    check_gradients(model)  # all-linear: whatever there is
    with pytest.raises(AdapterError, match="any layer called v_proj\n") as caught:
        check_gradients(model, ["q_proj", "v_proj"])
    assert "out of train.lora.target_modules" in caught.value.hint


def test_a_missing_adapter_file_is_no_success(tmp_path: Path, pico_model: Path) -> None:
    with pytest.raises(AdapterError, match="do not fit"):
        prove_trained(wrapped(pico_model), tmp_path / "adapter_model.safetensors")


def test_saved_and_loaded_adapters_are_bit_equal(tmp_path: Path, pico_model: Path) -> None:
    model = wrapped(pico_model)
    path = saved_adapter(tmp_path, model)
    other = wrapped(pico_model)
    load_adapter(other, path)
    for (name, a), (_, b) in zip(model.named_parameters(), other.named_parameters(), strict=True):
        assert torch.equal(a, b), name
    text = (tmp_path / "adapter_config.json").read_text()
    assert '"base_model_name_or_path": "org/base"' in text


def test_bfloat16_only_where_the_processor_multiplies_it(tmp_path: Path) -> None:
    """B04: and never float16."""
    cpuinfo = tmp_path / "cpuinfo"
    for flags, native in (
        ("flags\t\t: fpu avx2 avx512f avx512_bf16", True),
        ("flags\t\t: fpu avx2 f16c", False),
        ("Features\t: fp asimd bf16 i8mm", True),
        ("Features\t: fp asimd", False),
    ):
        cpuinfo.write_text(f"processor\t: 0\n{flags}\n")
        assert has_bf16(cpuinfo) is native
    assert not has_bf16(tmp_path / "missing")


@pytest.mark.parametrize(
    ("capability", "dtype"), [((9, 0), torch.bfloat16), ((7, 5), torch.float16)]
)
def test_the_type_and_place_on_a_gpu(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], dtype: torch.dtype
) -> None:
    """B09: under a launcher of two processes the second takes the second GPU, whole."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert hardware.device() == torch.device("cuda", 1)
    assert hardware.compute_dtype(hardware.device()) is dtype


def test_no_autocast_and_the_way_to_recompute_is_named(tmp_path: Path) -> None:
    """B03, B01: a scaler there is only where products are float16, and then of float32 adapters;
    see `test_train_float16`.
    """
    from tuneserve.train.trainer import _arguments

    train = TrainSection()
    options = _arguments(train, make_recipe(train, 32, 4), tmp_path, checkpointing=True)
    assert options["bf16"] is False and not options.get("fp16")
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        assert hardware.adapter_dtype(dtype) != torch.float16
    assert options["gradient_checkpointing_kwargs"]["use_reentrant"] is False


def test_a_folder_without_a_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=str(tmp_path)):
        load_base(tmp_path, device=CPU, dtype=torch.float32, nf4=False)


def test_the_best_adapter_comes_back_bit_for_bit(tmp_path: Path, pico_model: Path) -> None:
    """Offered at three losses; the lowest is restored, unless the end is lower or it is damaged."""
    from tuneserve.train.best import Best

    model = wrapped(pico_model)
    best, states = Best(tmp_path / "best"), {}
    for step, loss in ((2, 1.5), (4, 1.0), (6, 1.2)):
        for parameter in (p for p in model.parameters() if p.requires_grad):
            torch.nn.init.normal_(parameter)
        states[step] = {n: p.clone() for n, p in model.named_parameters() if p.requires_grad}
        best.offer(model, step, loss)
    assert best.restore(model, 0.9) is None
    assert best.restore(model, 1.2) == (4, 1.0)
    found = {n: p for n, p in model.named_parameters() if p.requires_grad}
    assert all(torch.equal(found[n], states[4][n]) for n in found)
    assert [path.name for path in sorted((tmp_path / "best").iterdir())] == [
        "best.json",
        "step-4.safetensors",
    ]
    # A resumed run that trains step 3 again forgets what came after it.
    best.offer(model, 3, 1.4)
    assert best.found() is not None and best.found()[1:] == (3, 1.4)  # type: ignore[index]
    (tmp_path / "best" / "step-3.safetensors").write_bytes(b"")
    assert best.restore(model, 9.0) is None


def test_a_tracker_that_is_not_installed_is_the_run_files_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """tensorboardX does as well as TensorBoard."""
    from tuneserve.train import trackers

    monkeypatch.setattr(
        trackers, "find_spec", lambda name: name in ("tensorboardX", "mlflow") or None
    )
    trackers.need_trackers(["tensorboard", "mlflow"])
    with pytest.raises(RunFileError, match="train.report_to: wandb cannot be imported") as caught:
        trackers.need_trackers(["mlflow", "wandb"])
    assert "pip install wandb" in str(caught.value.hint)


def test_a_tracker_that_fails_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    from tuneserve.train.trackers import Guarded

    class Tracker:
        calls = 0

        def on_log(self) -> None:
            self.calls += 1
            raise ConnectionError("no route to the tracker")

    guarded = Guarded(Tracker())
    guarded.on_log()
    guarded.on_log()
    assert guarded.calls == 1
    assert caplog.text.count("Tracker failed (no route to the tracker)") == 1
