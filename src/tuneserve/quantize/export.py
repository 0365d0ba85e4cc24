"""One 4-bit export from beginning to end: check, choose rows, quantize, clean, check again."""

from __future__ import annotations

import glob
import json
import logging
import os
import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tuneserve.artifacts import fsync_directory
from tuneserve.config import QuantizeSection
from tuneserve.errors import OutputExists, QuantizeError
from tuneserve.progress import Clock, human_bytes, human_seconds
from tuneserve.quantize import record
from tuneserve.quantize.calibration import Calibration, choose
from tuneserve.quantize.checks import preflight, quantized_shapes, read_config, static_check
from tuneserve.quantize.finite import check_finite, gptq_problems

log = logging.getLogger(__name__)

# What GPTQModel saves and we keep; everything else comes from the merged model unchanged.
_KEEP = re.compile(r".*\.safetensors(?:\.index\.json)?|config\.json|quantize_config\.json")
# Files of a merged model that describe its 16-bit weights.
_WEIGHTS = re.compile(
    r".*\.(?:safetensors|bin|gguf|pt|pth)|.*\.index\.json|config\.json|quantize_config\.json"
    r"|mergeproof\.json|manifest\.json|README\.md|\..*"
)


@dataclass(frozen=True)
class QuantizeResult:
    """What an export gave; small enough for a manifest.

    Attributes:
        method: gptq or awq.
        bytes: Size of all files.
        calibration_rows: Rows used.
        calibration_tokens: Real tokens in them.
        mean_loss: Mean of GPTQModel's per-module losses.
        worst_module: The module with the largest loss.
        fallbacks: Modules rounded to nearest.
        seconds: Of the quantization itself, loading and saving included.
        seconds_per_layer: The same per decoder layer.
        smoke: Losses before and after on a few rows; None when the model was too large to compare.
        laps_seconds: Seconds of each part, checks and comparison included.
        peak_gpu_bytes: The most that torch's allocator held; None without a GPU.
        table: The modules with the largest losses, with their damping, as text.
    """

    method: str
    bytes: int
    calibration_rows: int
    calibration_tokens: int
    mean_loss: float | None
    worst_module: str | None
    fallbacks: int
    seconds: float
    seconds_per_layer: float
    smoke: dict[str, Any] | None
    laps_seconds: dict[str, float]
    peak_gpu_bytes: int | None
    table: str = ""

    def to_json(self) -> dict[str, Any]:
        """As `--json` and the manifest carry it."""
        return asdict(self)


def quantize_model(
    model: Path,
    method: str,
    calibration: Path,
    out: Path,
    section: QuantizeSection | None = None,
    *,
    trust_remote_code: bool = False,
) -> QuantizeResult:
    """Export `model` in 4 bits into the new folder `out`, which appears whole or not at all.

    Args:
        model: Folder of a 16-bit model.
        method: gptq or awq.
        calibration: Folder of a dataset artifact.
        out: Must not exist, or be empty.
        section: The `quantize` part of a run file; its `methods` are not looked at.
        trust_remote_code: Run Python code that comes with the model.

    Raises:
        OutputExists: `out` holds something.
        QuantizeError: The export could not be made, or would not be served.
        OutOfMemory: It did not fit with one row at a time.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise OutputExists(
            f"{out} exists and is not empty",
            expected="a folder that is new or empty",
            hint="name a new folder, or remove this one",
        )
    out.parent.mkdir(parents=True, exist_ok=True)
    _end_remains(out)
    provisional = out.with_name(f".{out.name}.{os.getpid()}")
    work = out.with_name(f".{out.name}.{os.getpid()}.work")
    provisional.mkdir()
    try:
        result = export(
            model,
            method,
            calibration,
            provisional,
            work,
            section or QuantizeSection(),
            trust_remote_code=trust_remote_code,
        )
        for path in provisional.iterdir():
            _fsync(path)
        fsync_directory(provisional)
        provisional.rename(out)
        fsync_directory(out.parent)
    finally:
        shutil.rmtree(provisional, ignore_errors=True)
        shutil.rmtree(work, ignore_errors=True)
    return result


def export(
    model: Path,
    method: str,
    dataset: Path,
    out: Path,
    work: Path,
    section: QuantizeSection,
    *,
    trust_remote_code: bool = False,
    batch_size: int | None = None,
    offload: bool = False,
    tensor_parallel_size: int = 1,
    server: str | None = None,
) -> QuantizeResult:
    """Fill the empty folder `out`; see `quantize_model`. On an error `out` is not to be used."""
    clock = Clock()
    checkpoint = preflight(
        model,
        method,
        section.group_size,
        tensor_parallel_size=tensor_parallel_size,
        server=server,
    )
    shapes = quantized_shapes(checkpoint.tensors)
    calibration = choose(
        dataset,
        count=section.calibration_rows,
        max_tokens=section.calibration_max_tokens,
        min_tokens=section.min_calibration_tokens,
        vocabulary=read_config(model).get("vocab_size"),
    )
    layers = len({match.group() for name in shapes if (match := re.search(r"\.\d+\.", name))})
    log.info(
        "%s, %d bits, group size %d: %d layers, calibrated on %d rows with %d tokens",
        method, section.bits, section.group_size, layers, len(calibration.rows), calibration.tokens,
    )  # fmt: skip

    clock.lap("calibration")
    _check_while_importing(model.absolute(), work.absolute())
    clock.lap("imports, and whether all weights are finite")

    from tuneserve.quantize.engine import run_gptqmodel

    engine = run_gptqmodel(
        model,
        out,
        work,
        method=method,
        bits=section.bits,
        group_size=section.group_size,
        rows=calibration.rows,
        layers=layers,
        allow_fallback=section.allow_fallback,
        trust_remote_code=trust_remote_code,
        batch_size=batch_size,
        offload=offload,
    )
    clock.add(engine.laps)
    clean(out, model)
    check_export(out, model, method, section)
    clock.lap("checks after")
    smoke = _smoke(model, out, method, dataset, section, trust_remote_code=trust_remote_code)
    clock.lap("comparing losses")
    record.write_log(out, engine.modules)
    written = record.write_record(
        out,
        method=method,
        bits=section.bits,
        group_size=section.group_size,
        calibration=calibration,
        engine=engine,
        smoke=smoke,
    )
    record.draw_losses(out, engine.modules, f"{method}, group size {section.group_size}")
    clock.lap("records")
    log.info("where the time went: %s", clock)
    return _result(method, out, calibration, engine, written, smoke, clock)


def _check_while_importing(model: Path, work: Path) -> None:
    """Read the 16-bit weights on the cores that importing GPTQModel, half a minute on one, leaves
    idle."""
    from tuneserve.quantize.engine import import_libraries

    hint = "merge again; if it persists, look at the training"
    with ThreadPoolExecutor(1) as pool:
        finite = pool.submit(check_finite, model, f"{model.name} (16-bit)", hint=hint)
        import_libraries(work)
        finite.result()


def clean(out: Path, merged: Path) -> None:
    """Leave in `out` GPTQModel's weights, and beside them the merged model's own files.

    GPTQModel rewrites tokenizer and generation_config, and leaves the path of its scratch folder in
    the config: the first would serve something that was not trained, the second makes equal exports
    differ.
    """
    for path in out.iterdir():
        if not _KEEP.fullmatch(path.name):
            path.unlink()
    saved = read_config(out)
    scheme = _without_paths(saved["quantization_config"])
    # `config.json` of the merged model, and only the quantization added: its dtype, its ids.
    _write_json(out / "config.json", {**read_config(merged), "quantization_config": scheme})
    own = out / "quantize_config.json"
    if own.is_file():
        _write_json(own, _without_paths(json.loads(own.read_text(encoding="utf-8"))))
    for path in sorted(merged.iterdir()):
        if path.is_file() and not _WEIGHTS.fullmatch(path.name):
            shutil.copyfile(path, out / path.name)


def check_export(out: Path, merged: Path, method: str, section: QuantizeSection) -> None:
    """Refuse an export that vLLM would refuse, or whose values are not finite.

    Raises:
        QuantizeError: Lists everything.
    """
    problems = static_check(
        out, merged, method=method, bits=section.bits, group_size=section.group_size
    )
    if method == "gptq" and not problems:
        problems = gptq_problems(out, section.group_size)
    if problems:
        raise QuantizeError(
            f"the {method} export would not be served:\n  " + "\n  ".join(problems[:20]),
            hint="add awq or none to quantize.methods",
            details={"problems": problems[:100]},
        )
    check_finite(
        out, f"the {method} export", hint="calibrate with more rows, or add none to the methods"
    )


def _smoke(
    model: Path,
    out: Path,
    method: str,
    dataset: Path,
    section: QuantizeSection,
    *,
    trust_remote_code: bool,
) -> dict[str, Any] | None:
    from tuneserve.quantize.smoke import smoke_test, too_large

    if reason := too_large(model):
        log.info("no loss comparison here (%s): the release gates measure it", reason)
        return None
    return smoke_test(
        model,
        out,
        dataset,
        method=method,
        group_size=section.group_size,
        trust_remote_code=trust_remote_code,
    )


def _result(
    method: str,
    out: Path,
    calibration: Calibration,
    engine: Any,
    written: dict[str, Any],
    smoke: dict[str, Any] | None,
    clock: Clock,
) -> QuantizeResult:
    from tuneserve.lm.hardware import peak_reserved_bytes

    losses = written["losses"]
    size = sum(path.stat().st_size for path in out.iterdir())
    result = QuantizeResult(
        method=method,
        bytes=size,
        calibration_rows=len(calibration.rows),
        calibration_tokens=calibration.tokens,
        mean_loss=sum(losses.values()) / len(losses) if losses else None,
        worst_module=max(losses, key=losses.__getitem__) if losses else None,
        fallbacks=len(written["fallbacks"]),
        seconds=round(engine.seconds, 3),
        seconds_per_layer=round(engine.seconds / engine.layers, 3),
        smoke=smoke,
        laps_seconds=clock.rounded(),
        peak_gpu_bytes=peak_reserved_bytes(),
        table=record.worst_table(engine.modules),
    )
    log.info(
        "%s: %s in %s, worst module %s",
        method, human_bytes(size), human_seconds(engine.seconds), result.worst_module,
    )  # fmt: skip
    return result


def _end_remains(out: Path) -> None:
    """Remove what exports into `out` left that were killed outright, so that nothing else could."""
    for path in out.parent.glob(f".{glob.escape(out.name)}.*"):
        found = re.fullmatch(r"(\d+)(?:\.work)?", path.name.removeprefix(f".{out.name}."))
        if found is None or not path.is_dir():
            continue
        try:
            if int(found[1]) != os.getpid():  # in a container numbers come again
                os.kill(int(found[1]), 0)
                continue
        except PermissionError:
            continue
        except (ProcessLookupError, OverflowError):
            pass
        log.warning("%s: removed, left by an export that was killed", path)
        shutil.rmtree(path, ignore_errors=True)


def _without_paths(scheme: dict[str, Any]) -> dict[str, Any]:
    meta = dict(scheme.get("meta") or {})
    meta.pop("offload_to_disk_path", None)
    return {**scheme, "meta": meta}


def _write_json(path: Path, data: Any) -> None:
    path.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")


def _fsync(path: Path) -> None:
    with path.open("rb") as stream:
        os.fsync(stream.fileno())
