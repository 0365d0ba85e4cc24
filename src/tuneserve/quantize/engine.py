"""GPTQModel, kept at arm's length: one call in, the folder it saved and its per-module log out.

Importing GPTQModel patches transformers and safetensors, so this file is imported only where a
child process (or the command line's own process) does nothing else.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import shutil
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tuneserve.cpu import has_bf16
from tuneserve.errors import OutOfMemory, QuantizeError, TuneserveError
from tuneserve.progress import Clock, Progress
from tuneserve.quantize.modules import ModuleLog, judge, module_logs

log = logging.getLogger(__name__)

_LOG_NAME = "gptqmodel.log"

# Batches that are tried in turn when memory runs out. Weights of finished and of coming layers are
# on disk all the time (`offload_to_disk`), so the batch is what is left to give up.
BATCHES = (8, 4, 2, 1)


@dataclass
class EngineResult:
    """What an export took; `laps` are seconds of its parts."""

    modules: list[ModuleLog]
    seconds: float
    layers: int
    batch_size: int
    device: str
    linear_in_float32: bool
    notes: list[str] = field(default_factory=list)
    laps: dict[str, float] = field(default_factory=dict)


def import_libraries(work: Path) -> None:
    """Import what `run_gptqmodel` uses; what libraries say meanwhile goes to a file in `work`."""
    if (os.cpu_count() or 1) <= 2:
        # GPTQModel wants two workers at least, and by default makes one on two cores.
        os.environ.setdefault("GPTQMODEL_CPU_WORKERS", "2")
    with _aside(work):
        import gptqmodel  # noqa: F401
        from gptqmodel.quantization import config  # noqa: F401


def run_gptqmodel(
    model: Path,
    out: Path,
    work: Path,
    *,
    method: str,
    bits: int,
    group_size: int,
    rows: list[list[int]],
    layers: int,
    allow_fallback: bool = False,
    trust_remote_code: bool = False,
    batch_size: int | None = None,
    offload: bool = False,
) -> EngineResult:
    """Quantize `model` and save it into the empty folder `out`.

    Args:
        model: 16-bit checkpoint.
        out: Filled as GPTQModel saves a model; removed paths and extra files are the caller's work.
        work: Scratch for offloaded weights and GPTQModel's own log.
        method: gptq (symmetric, no activation order) or awq (with zero points).
        bits: Bits per weight.
        group_size: Weights per scale, -1 for one per row.
        rows: Calibration token ids.
        layers: Number of decoder layers, for the progress line.
        allow_fallback: Let modules that calibration barely reached be rounded to nearest.
        trust_remote_code: Run the model's own code.
        batch_size: First batch to try.
        offload: Keep what the calibration rows have become in the host's memory, not the GPU's.

    Raises:
        QuantizeError: GPTQModel failed (names the layer and modules it was at), a loss is not
            finite, or a module fell back to rounding without `allow_fallback`.
        OutOfMemory: It did not fit with one row at a time.
    """
    model, out, work = model.absolute(), out.absolute(), work.absolute()
    import_libraries(work)
    sizes = [b for b in BATCHES if batch_size is None or b <= batch_size] or [1]
    for size in sizes:
        run = _Run(model, out, work, method, bits, group_size, rows, layers, size)
        run.allow_fallback, run.trust_remote_code = allow_fallback, trust_remote_code
        run.offload = offload
        try:
            with _aside(work):
                return run.go()
        except (MemoryError, RuntimeError) as error:
            if not _out_of_memory(error):
                raise
            log.warning("out of memory with %d calibration rows at a time", size)
        _forget(out, run)
    raise OutOfMemory(
        f"{run.place()}: out of memory with one calibration row of at most "
        f"{max(map(len, rows))} tokens at a time",
        expected="memory for one calibration row",
        hint="lower quantize.calibration_max_tokens, or free memory on the device",
    )


class _Run:
    """One attempt with one batch size; GPTQModel calls it back as it goes."""

    def __init__(
        self,
        model: Path,
        out: Path,
        work: Path,
        method: str,
        bits: int,
        group_size: int,
        rows: list[list[int]],
        layers: int,
        batch_size: int,
    ) -> None:
        self.model, self.out, self.work = model, out, work
        self.method, self.bits, self.group_size = method, bits, group_size
        self.rows, self.layers, self.batch_size = rows, layers, batch_size
        self.allow_fallback = False
        self.trust_remote_code = False
        self.offload = False
        self.at: tuple[int, list[str]] | None = None
        self.done_layers: set[int] = set()
        self.progress: Progress | None = None

    def go(self) -> EngineResult:
        try:
            return self._go()
        except (TuneserveError, MemoryError):
            raise
        except Exception as error:  # AWQ raises bare Exception and AssertionError
            if _out_of_memory(error):
                raise
            raise QuantizeError(
                f"{self.place()}: {self.method} failed ({type(error).__name__}: "
                f"{_first_line(error) or 'no message'})",
                hint="more or longer calibration rows often help; otherwise add awq or none to "
                "quantize.methods",
                details={"log_tail": _log_tail(self.work / _LOG_NAME)},
            ) from error

    def _go(self) -> EngineResult:
        import torch
        from gptqmodel import BACKEND, GPTQModel
        from gptqmodel.quantization.config import AWQConfig, GPTQConfig

        device = "cuda" if torch.cuda.is_available() else "cpu"
        options: dict[str, Any] = {
            "bits": self.bits,
            "group_size": self.group_size,
            "offload_to_disk": True,
            "offload_to_disk_path": str(self._offload_folder()),
        }
        if not self.allow_fallback:
            options["fallback"] = None
        if self.offload and device == "cuda":
            options["calibration_data_device"] = "cpu"
        if self.method == "gptq":
            config = GPTQConfig(sym=True, desc_act=False, **options)
        else:
            config = AWQConfig(sym=False, **options)
        wide = device == "cpu" and not has_bf16()
        clock = Clock()
        with (
            _linear_in_float32() if wide else contextlib.nullcontext(),
            _worker_errors() as lost,
        ):
            log.info("loading %s on %s", self.model.name, device)
            model = GPTQModel.load(
                str(self.model), config, device=device, trust_remote_code=self.trust_remote_code
            )
            clock.lap("loading")
            model.layer_callback = self
            model.subset_callback = self
            with Progress("quantize", total=self.layers, unit="layer") as self.progress:
                model.quantize(
                    [{"input_ids": row, "attention_mask": [1] * len(row)} for row in self.rows],
                    batch_size=self.batch_size,
                    calibration_data_min_length=1,
                    backend=BACKEND.AWQ_TORCH
                    if self.method == "awq" and device == "cpu"
                    else BACKEND.AUTO,
                )
        clock.lap("quantizing")
        if lost:
            raise lost[0]
        modules = module_logs(model.quant_log)
        notes = judge(
            modules, sum(map(len, self.rows)), self._retried(), allow_fallback=self.allow_fallback
        )
        self.at = None
        model.save(str(self.out))
        shutil.rmtree(self.work / "offload", ignore_errors=True)
        clock.lap("saving")
        seconds = sum(clock.laps.values())
        return EngineResult(
            modules, seconds, self.layers, self.batch_size, device, wide, notes, clock.laps
        )

    def layer_complete(self, *, layer_idx: int, submodule_finalized: bool) -> None:
        """GPTQModel calls this twice a layer: when it is solved, and when it is packed."""
        if self.progress and layer_idx not in self.done_layers:
            self.done_layers.add(layer_idx)
            self.progress.advance(1)

    def subset_event(self, *, layer_idx: int, module_names: list[str], **_: Any) -> None:
        """GPTQModel calls this as it comes to each group of modules."""
        self.at = (layer_idx, list(module_names))

    def place(self) -> str:
        """Where GPTQModel is, for messages."""
        if self.at is None:
            return self.model.name
        return f"{self.model.name}, layer {self.at[0]} ({', '.join(self.at[1][:8])})"

    def _offload_folder(self) -> Path:
        folder = self.work / "offload"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        return folder

    def _retried(self) -> str:
        return _log_tail(self.work / _LOG_NAME, lines=None)


@contextlib.contextmanager
def _aside(work: Path) -> Iterator[None]:
    """GPTQModel's tables and bars go to a file, and the logs/ folder that it writes into the
    working directory to `work`; our own log keeps the stream it has."""
    for noisy in ("tokenicer", "torchao", "torch.utils._pytree"):
        logging.getLogger(noisy).setLevel(logging.ERROR)
    work.mkdir(parents=True, exist_ok=True)
    with (
        (work / _LOG_NAME).open("w", encoding="utf-8") as stream,
        contextlib.chdir(work),
        warnings.catch_warnings(),
        contextlib.redirect_stdout(stream),
        contextlib.redirect_stderr(stream),
    ):
        warnings.simplefilter("ignore")
        yield


@contextlib.contextmanager
def _worker_errors() -> Iterator[list[BaseException]]:
    """Collect what fails in GPTQModel's threads, which by default end the whole process at once.

    The error also reaches whoever waits for the thread's result, so nothing else has to change.
    """
    from gptqmodel.utils import threadx

    found: list[BaseException] = []
    original = threadx._DeviceWorker._abort_process
    threadx._DeviceWorker._abort_process = lambda _, error: found.append(error)
    try:
        yield found
    finally:
        threadx._DeviceWorker._abort_process = original


@contextlib.contextmanager
def _linear_in_float32() -> Iterator[None]:
    """Compute bfloat16 linear layers in float32, for CPUs without bfloat16 instructions.

    There a bfloat16 product is six to ten times slower than a float32 one (measured on AVX2), and
    takes two thirds of the whole export. Inputs, weights and results stay bfloat16; both ways sum
    in float32 and round once.
    """
    import torch

    original = torch.nn.functional.linear

    def linear(input: Any, weight: Any, bias: Any = None) -> Any:
        if input.dtype not in (torch.bfloat16, torch.float16) or weight.dtype != input.dtype:
            return original(input, weight, bias)
        wide = original(input.float(), weight.float(), None if bias is None else bias.float())
        return wide.to(input.dtype)

    torch.nn.functional.linear = linear
    try:
        yield
    finally:
        torch.nn.functional.linear = original


def _out_of_memory(error: BaseException) -> bool:
    import torch

    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and (
        "DefaultCPUAllocator" in text or "out of memory" in text.lower()
    )


def _forget(out: Path, run: _Run) -> None:
    """Give memory back and empty `out` before the next attempt."""
    import torch

    shutil.rmtree(run.work / "offload", ignore_errors=True)
    for path in out.iterdir():
        path.unlink()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "")


def _log_tail(path: Path, lines: int | None = 20) -> str:
    """The last lines of GPTQModel's log that are no progress bar."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    if lines is None:
        return text
    plain = [line for line in text.replace("\r", "\n").splitlines() if " | 0:" not in line]
    return "\n".join([line.rstrip() for line in plain if line.strip()][-lines:])
