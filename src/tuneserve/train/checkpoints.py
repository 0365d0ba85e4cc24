"""Which checkpoint a killed run goes on from: a checkpoint counts once its seal is there and holds.

The trainer writes a checkpoint folder file by file. When all are written, `seal` records their
sizes and hashes in `sealed.json`, last; a folder without that file, or with a file that differs
from it, is damaged.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tuneserve.artifacts import file_sha256, write_json_atomic
from tuneserve.errors import AdapterError

log = logging.getLogger(__name__)

SEAL = "sealed.json"
_NAME = re.compile(r"checkpoint-(\d+)")


def seal(folder: Path, shape: Mapping[str, int | str] | None = None) -> None:
    """Declare a checkpoint folder complete: every file is on disk, and its hash recorded.

    Args:
        folder: The checkpoint.
        shape: What a run that goes on from it has to share, such as ``{"steps": 60}``.
    """
    files = {}
    for path in sorted(p for p in folder.rglob("*") if p.is_file() and p.name != SEAL):
        with path.open("rb") as stream:
            os.fsync(stream.fileno())
        files[path.relative_to(folder).as_posix()] = [path.stat().st_size, file_sha256(path)]
    write_json_atomic(folder / SEAL, {"files": files, "shape": dict(shape or {})})


def newest_sealed(work: Path) -> int | None:
    """The step of the newest finished checkpoint, whose files are not read; None without one."""
    return max((step for step, folder in _all(work) if (folder / SEAL).exists()), default=None)


def latest_whole(work: Path) -> tuple[Path, int] | None:
    """The newest undamaged checkpoint and its step; damaged ones are removed and said so."""
    for step, folder in sorted(_all(work), reverse=True):
        why = _damage(folder)
        if not why:
            return folder, step
        log.warning("checkpoint of step %d is damaged (%s): going back further", step, why)
        _remove(folder)
    return None


def check_shape(folder: Path, shape: Mapping[str, int | str]) -> None:
    """Refuse a checkpoint of other steps, whose step 5 saw other rows than ours, or of a GPU whose
    optimizer holds another state.

    Raises:
        AdapterError: It was made with other numbers than `shape` has.
    """
    made = _sealed(folder)[1]
    differs = [f"{k} {made[k]}, now {v}" for k, v in shape.items() if made.get(k, v) != v]
    if differs:
        raise AdapterError(
            f"{folder}: made with " + "; ".join(differs),
            expected="a checkpoint of the same steps and type of products",
            hint="go on as it was made, or remove this folder to train from the beginning",
        )


def _all(work: Path) -> list[tuple[int, Path]]:
    return [(int(m.group(1)), p) for p in work.iterdir() if (m := _NAME.fullmatch(p.name))]


def _sealed(folder: Path) -> tuple[dict[str, tuple[int, str]], dict[str, Any]]:
    """Size and hash of each file that was sealed, and the run's shape.

    Raises:
        OSError, ValueError, KeyError, TypeError, AttributeError: There is no such seal.
    """
    seal = json.loads((folder / SEAL).read_text(encoding="utf-8"))
    files = {name: (int(size), str(sha256)) for name, (size, sha256) in seal["files"].items()}
    if not files:
        raise ValueError("it names no file")
    return files, dict((seal.get("shape") or {}).items())


def _damage(folder: Path) -> str:
    try:
        files, _ = _sealed(folder)
    except FileNotFoundError:
        return "it was not finished"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"its seal cannot be read: {error}"
    for name, (size, sha256) in files.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != size or file_sha256(path) != sha256:
            return f"the bytes of {name} changed"
    return ""


def _remove(folder: Path) -> None:
    if folder.is_symlink() or not folder.is_dir():
        folder.unlink()
    else:
        shutil.rmtree(folder)
