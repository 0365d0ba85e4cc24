"""Which training rows calibrate the export: the dataset artifact's own ids, spread over lengths."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tuneserve.config import QuantizeSection
from tuneserve.errors import QuantizeError

log = logging.getLogger(__name__)

# GPTQModel leaves out rows of this many tokens or fewer; with none left it divides by zero.
TOO_SHORT_TOKENS = 10
# Below this a Hessian is mostly noise, however long the rows are.
MIN_ROWS = 8


@dataclass(frozen=True)
class Calibration:
    """The chosen rows, longest first.

    Attributes:
        rows: Token ids.
        sources: ``file:line`` of each row.
        hashes: SHA-256 of each row's ids as little-endian int32.
        rows_read: Rows in the training file.
        rows_too_short: Rows of ten tokens or fewer, which cannot be used.
        rows_duplicate: Rows whose first tokens equal another's.
    """

    rows: list[list[int]]
    sources: list[str]
    hashes: list[str]
    rows_read: int
    rows_too_short: int
    rows_duplicate: int

    @property
    def tokens(self) -> int:
        """Real tokens, without padding."""
        return sum(map(len, self.rows))


def enough(lengths: Sequence[int], section: QuantizeSection) -> str:
    """Why rows of these lengths would not calibrate an export; empty when they would.

    What `choose` refuses, as far as lengths tell: rows that repeat each other do not show in them.

    Args:
        lengths: Tokens of each training row.
        section: Which rows are taken, and how many tokens are wanted.
    """
    cut = sorted((min(n, section.calibration_max_tokens) for n in lengths), reverse=True)
    usable = [length for length in cut if length > TOO_SHORT_TOKENS]
    chosen = [usable[rank] for rank in evenly(len(usable), section.calibration_rows)]
    least = min(MIN_ROWS, section.calibration_rows)
    if len(chosen) >= least and sum(chosen) >= section.min_calibration_tokens:
        return ""
    return (
        f"{len(chosen)} rows with {sum(chosen)} tokens are left for calibration ({len(cut)} rows, "
        f"{len(cut) - len(usable)} of {TOO_SHORT_TOKENS} tokens or fewer), and at least {least} "
        f"rows and {section.min_calibration_tokens} tokens (quantize.min_calibration_tokens) are "
        "wanted"
    )


def evenly(available: int, count: int) -> list[int]:
    """Ranks of `count` rows, or of all, evenly over `available` ones: the middle of each part."""
    taken = min(count, available)
    return [int((i + 0.5) * available / taken) for i in range(taken)]


def choose(
    dataset: Path, *, count: int, max_tokens: int, min_tokens: int, vocabulary: int | None = None
) -> Calibration:
    """Take `count` rows of `train.parquet`, evenly over the rows sorted by length.

    The choice depends on the rows' contents alone, not on their order in the file. Held-out rows
    are never read.

    Args:
        dataset: Folder of a dataset artifact.
        count: Rows wanted; fewer are taken when there are fewer.
        max_tokens: Rows are cut to this many tokens.
        min_tokens: Fewer tokens than this in the chosen rows are refused.
        vocabulary: Rows of the embedding; an id beyond it is refused.

    Raises:
        QuantizeError: Too few rows or tokens are left, with the counts; or the ids belong to
            another tokenizer.
    """
    ids, sources = _read(dataset / "train.parquet")
    seen: dict[str, tuple[list[int], str]] = {}
    short = 0
    for row, source in zip(ids, sources, strict=True):
        cut = row[:max_tokens]
        if len(cut) <= TOO_SHORT_TOKENS:
            short += 1
            continue
        seen.setdefault(row_hash(cut), (cut, source))
    ranked = sorted(seen, key=lambda digest: (-len(seen[digest][0]), digest))
    chosen = [ranked[rank] for rank in evenly(len(ranked), count)]
    found = Calibration(
        rows=[seen[digest][0] for digest in chosen],
        sources=[seen[digest][1] for digest in chosen],
        hashes=chosen,
        rows_read=len(ids),
        rows_too_short=short,
        rows_duplicate=len(ids) - short - len(seen),
    )
    _refuse_too_little(found, dataset, count, max_tokens, min_tokens)
    largest = max(max(row) for row in found.rows)
    if vocabulary is not None and largest >= vocabulary:
        raise QuantizeError(
            f"token id {largest} in {dataset.name}/train.parquet, but the model has {vocabulary} "
            "embedding rows",
            hint="calibrate with the dataset that this model was trained on",
        )
    if len(chosen) < count:
        log.warning("calibration: %d usable rows, %d were asked", len(chosen), count)
    return found


def row_hash(ids: list[int]) -> str:
    """SHA-256 of the ids as little-endian int32."""
    return hashlib.sha256(b"".join(i.to_bytes(4, "little") for i in ids)).hexdigest()


def _read(path: Path) -> tuple[list[list[int]], list[str]]:
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.read_table(path, columns=["input_ids", "source"])
    except (OSError, pyarrow.ArrowException) as error:
        raise QuantizeError(
            f"{path} cannot be read ({error})",
            expected="a dataset artifact with train.parquet (input_ids, labels, source)",
            hint="make one with `tuneserve validate`",
        ) from error
    return table["input_ids"].to_pylist(), table["source"].to_pylist()


def _refuse_too_little(
    found: Calibration, dataset: Path, count: int, max_tokens: int, min_tokens: int
) -> None:
    least = min(MIN_ROWS, count)
    if len(found.rows) >= least and found.tokens >= min_tokens:
        return
    # A larger limit helps only where it was reached.
    raising = "raise quantize.calibration_rows, " if len(found.rows) == count else ""
    if any(len(row) == max_tokens for row in found.rows):
        raising += "raise quantize.calibration_max_tokens, "
    raise QuantizeError(
        f"{dataset.name}/train.parquet: {len(found.rows)} rows with {found.tokens} tokens are left "
        f"for calibration ({found.rows_read} rows read, {found.rows_too_short} of "
        f"{TOO_SHORT_TOKENS} tokens or fewer, {found.rows_duplicate} repeated)",
        expected=f"at least {least} rows and {min_tokens} tokens",
        hint=f"train on more rows, {raising}or add none to quantize.methods to serve 16 bits: "
        "gptq and awq are calibrated alike",
        details={
            "rows": len(found.rows),
            "tokens": found.tokens,
            "rows_read": found.rows_read,
            "rows_too_short": found.rows_too_short,
            "rows_duplicate": found.rows_duplicate,
        },
    )
