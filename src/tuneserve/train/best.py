"""The adapter with the lowest held-out loss so far, on disk beside the checkpoints."""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path
from typing import Any

from tuneserve.artifacts import file_sha256, write_json_atomic

log = logging.getLogger(__name__)

_NOTE = "best.json"


class Best:
    """Keeps one adapter file and a note of its step, loss and hash; both survive a kill."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def offer(self, model: Any, step: int, loss: float) -> None:
        """Keep the adapter as it is now if it is the best; later steps than `step` are forgotten.

        Steps that a resumed run trains again may have been offered before the kill.
        """
        assert math.isfinite(loss), loss
        known = self.found()
        if known is not None and known[1] <= step and known[2] <= loss:
            return
        import peft
        from safetensors.torch import save_file

        self._folder.mkdir(parents=True, exist_ok=True)
        name = f"step-{step}.safetensors"
        state = peft.get_peft_model_state_dict(model, save_embedding_layers=False)
        save_file({k: v.detach().cpu().contiguous() for k, v in state.items()}, self._folder / name)
        note = {
            "step": step,
            "loss": loss,
            "file": name,
            "sha256": file_sha256(self._folder / name),
        }
        write_json_atomic(self._folder / _NOTE, note)
        for path in self._folder.glob("step-*.safetensors"):
            if path.name != name:
                path.unlink()

    def found(self) -> tuple[Path, int, float] | None:
        """File, step and loss of the best adapter; None without one that is whole."""
        try:
            note = json.loads((self._folder / _NOTE).read_text(encoding="utf-8"))
            path = self._folder / str(note["file"])
            if file_sha256(path) != note["sha256"] or not math.isfinite(note["loss"]):
                raise ValueError("its bytes changed")
            return path, int(note["step"]), float(note["loss"])
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            log.warning("the best adapter so far cannot be read (%s): it is left out", error)
            return None

    def restore(self, model: Any, loss: float) -> tuple[int, float] | None:
        """Put the best adapter into the model if it is better than `loss`; its step and loss."""
        from tuneserve.train.adapter import load_adapter

        known = self.found()
        if known is None or known[2] >= loss:
            return None
        path, step, best = known
        load_adapter(model, path)
        log.info(
            "step %d had the lowest held-out loss (%.4f, now %.4f): keeping it", step, best, loss
        )
        return step, best
