"""The arithmetic of the merge, one tile of rows at a time. Engine file: imports torch.

Everything is added in float32 and rounded once to the base's dtype. PEFT does the same for linear
layers (`W.data += B @ A * scale` promotes to float32), so the results are equal bit for bit; tiles
of fewer than `MIN_ROWS` rows can take another path through the matrix library and differ in the
last bit, so no tile is smaller unless the tensor is. For embeddings PEFT rounds the update to the
base's dtype before it adds: there the results differ by at most one unit in the last place of the
update.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable
from dataclasses import dataclass

import torch

from tuneserve.checkpoint.headers import TensorInfo
from tuneserve.errors import AdapterError
from tuneserve.merge.plan import Output
from tuneserve.merge.tiling import MIN_ROWS

TORCH_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}

_MEASURED_TILES = 4

RowReader = Callable[[int, int], torch.Tensor]
"""Gives rows begin to end of a tensor's source, in its stored dtype."""


@dataclass
class Effect:
    """What adding did to one tensor, in squared norms summed over tiles.

    Attributes:
        delta: Of the exact change, over all tiles.
        measured: Of the exact change, over the tiles whose rounding was measured.
        base: Of the weights before it, over the same tiles.
        lost: Of the part that rounding to the base's dtype took away there.
        tiles: How many there were.
    """

    delta: float = 0.0
    measured: float = 0.0
    base: float = 0.0
    lost: float = 0.0
    tiles: int = 0

    @property
    def survival(self) -> float:
        """Share of the change's norm that survived: 1 - ||applied - exact|| / ||exact||."""
        return 1.0 - min(1.0, math.sqrt(self.lost / self.measured)) if self.measured else 1.0

    @property
    def relative(self) -> float | None:
        """The change's norm over that of the weights; None where the weights were zero."""
        return math.sqrt(self.measured / self.base) if self.base else None


class Scratch:
    """float32 arrays that tiles use again and again: fresh memory costs more than the sums."""

    def __init__(self) -> None:
        self._flat: dict[str, torch.Tensor] = {}

    def take(self, use: str, shape: torch.Size | tuple[int, ...]) -> torch.Tensor:
        """An array of `shape` with undefined contents, the same memory for the same `use`."""
        count = math.prod(shape)
        flat = self._flat.get(use)
        if flat is None or flat.numel() < count:
            self._flat[use] = flat = torch.empty(count, dtype=torch.float32)
        return flat[:count].view(shape)


class AdapterReader:
    """Reads parts of adapter tensors as float32."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    def rows(self, info: TensorInfo, begin: int = 0, end: int | None = None) -> torch.Tensor:
        """Rows begin to end (all by default), float32, contiguous."""
        end = info.shape[0] if end is None else end
        row_bytes = info.nbytes // max(info.shape[0], 1)
        data = bytearray((end - begin) * row_bytes)
        _read_exactly(self.descriptor, memoryview(data), info.begin + begin * row_bytes)
        flat = torch.frombuffer(data, dtype=TORCH_DTYPES[info.dtype])
        return flat.view(end - begin, *info.shape[1:]).float()

    def columns(self, info: TensorInfo, begin: int, end: int) -> torch.Tensor:
        """Columns begin to end of a matrix, float32, contiguous."""
        count, width = info.shape
        item = info.nbytes // (count * width)
        step = (end - begin) * item
        data = bytearray(count * step)
        view = memoryview(data)
        for row in range(count):
            offset = info.begin + (row * width + begin) * item
            _read_exactly(self.descriptor, view[row * step : (row + 1) * step], offset)
        flat = torch.frombuffer(data, dtype=TORCH_DTYPES[info.dtype])
        return flat.view(count, end - begin).float()


def _read_exactly(descriptor: int, view: memoryview, offset: int) -> None:
    done = 0
    while done < len(view):
        count = os.preadv(descriptor, [view[done:]], offset + done)
        if not count:
            raise AdapterError(
                "the adapter's weights changed while they were read",
                expected="files that nothing writes to meanwhile",
                hint="run again",
            )
        done += count


class TensorMerger:
    """Merges the tiles of one output tensor. `tile` works in place on the tile's bytes."""

    def __init__(
        self, output: Output, adapter: AdapterReader, read_base: RowReader, scratch: Scratch
    ) -> None:
        self.output, self.op, self.adapter = output, output.op, adapter
        self.scratch = scratch
        self.effect = Effect()
        self.lora = output.op.lora
        self._flipped = self.lora is not None and (
            self.lora.embedding or output.op.stored_transposed
        )
        self._fixed: torch.Tensor | None = None  # the factor that every tile needs whole
        self._fixed_gram: torch.Tensor | None = None  # and the products of its vectors
        self._factors: torch.Tensor | None = None  # DoRA factors where they are per stored column
        if self.lora:
            fixed = self.lora.b if self._flipped else self.lora.a
            self._fixed = adapter.rows(fixed)
            self._fixed_gram = _gram(self._fixed.T if self._flipped else self._fixed)
            if self.lora.magnitude and self._flipped:
                self._factors = self._column_factors(read_base)

    def tile(self, weight: torch.Tensor, begin: int) -> None:
        """Replace `weight`, rows from `begin` on in the stored dtype, by the merged rows.

        Raises:
            AdapterError: The result is not finite.
        """
        end = begin + weight.shape[0]
        if self.lora:
            self._add_update(weight, begin, end)
        if self.op.tokens:
            self._put_tokens(weight, begin, end)
        if self.op.bias:
            assert self.op.bias.bias is not None
            addend = self.adapter.rows(self.op.bias.bias, begin, end) * self.op.bias.scale
            exact = self._exact(weight)
            base = self._base(exact)
            self._store(weight, exact.add_(addend), _squared(addend), base)
        self._check_finite(weight)

    def _check_finite(self, weight: torch.Tensor) -> None:
        """Whatever made the rows: values trained whole, or cast to a narrower dtype, count too."""
        if not weight.numel():
            return
        low, high = torch.aminmax(weight)
        if not (math.isfinite(low) and math.isfinite(high)):
            raise AdapterError(
                f"{self.output.name}: the merged weight is not finite in {self.output.dtype}",
                expected="finite weights",
                hint="the adapter diverged in training, or holds or makes values that "
                f"{self.output.dtype} cannot hold, or the base has values that are not finite",
                details={"tensor": self.output.name},
            )

    def _delta(self, begin: int, end: int) -> tuple[torch.Tensor, float]:
        """Rows of the scaled update, in the stored orientation, float32; and its squared norm.

        ||B A||^2 is the sum over (B^T B) * (A A^T), both of the rank's size: no pass over the rows.
        """
        assert self.lora is not None and self._fixed is not None
        scale = self.lora.scale
        if self._flipped:
            columns = self.adapter.columns(self.lora.a, begin, end)
            product = (self._fixed @ columns).T.mul_(scale)
            return product, self._product_squared(columns)
        rows = self.adapter.rows(self.lora.b, begin, end)
        squared = self._product_squared(rows.T)
        product = self.scratch.take("delta", (end - begin, self._fixed.shape[1]))
        if _scales_exactly(scale):
            torch.mm(rows.mul_(scale), self._fixed, out=product)
        else:
            torch.mm(rows, self._fixed, out=product).mul_(scale)
        return product, squared

    def _product_squared(self, vectors: torch.Tensor) -> float:
        """Squared norm of the scaled product of the fixed factor and these vectors of the other."""
        assert self.lora is not None and self._fixed_gram is not None
        return self.lora.scale**2 * float((_gram(vectors) * self._fixed_gram).sum())

    def _exact(self, weight: torch.Tensor) -> torch.Tensor:
        """A float32 copy, also of a weight that is float32 already."""
        return self.scratch.take("exact", weight.shape).copy_(weight)

    def _add_update(self, weight: torch.Tensor, begin: int, end: int) -> None:
        assert self.lora is not None
        exact = self._exact(weight)
        base = self._base(exact)
        if self.lora.magnitude is None:
            squared = self._add_product(exact, begin, end)
            self._store(weight, exact, squared, base)
            return
        merged = exact + self._delta(begin, end)[0]
        if self._factors is None:
            magnitude = self.adapter.rows(self.lora.magnitude, begin, end).view(-1)
            factors = (magnitude / torch.linalg.norm(merged, dim=1)).view(-1, 1)
        else:
            factors = self._factors.view(1, -1)
        merged.mul_(factors)
        self._store(weight, merged, _squared(merged - exact), base)

    def _add_product(self, exact: torch.Tensor, begin: int, end: int) -> float:
        """Add rows of the update to `exact`, in one pass where that gives the same bits; the
        update's squared norm.
        """
        assert self.lora is not None and self._fixed is not None
        shape = (end - begin, *self._fixed.shape)
        if self._flipped or not _scales_exactly(self.lora.scale) or not adds_last(*shape):
            delta, squared = self._delta(begin, end)
            exact.add_(delta)
            return squared
        rows = self.adapter.rows(self.lora.b, begin, end)
        squared = self._product_squared(rows.T)
        exact.addmm_(rows.mul_(self.lora.scale), self._fixed)
        return squared

    def _base(self, before: torch.Tensor) -> float | None:
        """Squared norm of the weights before a change, where its rounding is measured.

        That is on the first and then on every fourth tile: it takes as many passes over the memory
        as the merge itself.
        """
        return None if self.effect.tiles % _MEASURED_TILES else _squared(before)

    def _store(
        self, weight: torch.Tensor, exact: torch.Tensor, squared: float, base: float | None
    ) -> None:
        """Round `exact` into `weight`; account for what that lost where `base` is known.

        `squared` is the squared norm of the change.
        """
        weight.copy_(exact)
        effect = self.effect
        effect.delta += squared
        if base is not None:
            rounded = self.scratch.take("rounded", weight.shape).copy_(weight)
            effect.base += base
            effect.measured += squared
            effect.lost += _squared(exact.sub_(rounded))
        effect.tiles += 1

    def _put_tokens(self, weight: torch.Tensor, begin: int, end: int) -> None:
        assert self.op.tokens is not None
        info, rows = self.op.tokens
        for position, row in enumerate(rows):
            if begin <= row < end:
                weight[row - begin].copy_(self.adapter.rows(info, position, position + 1)[0])

    def _column_factors(self, read_base: RowReader) -> torch.Tensor:
        """DoRA factors of a weight whose outputs are its stored columns (Conv1D, embeddings).

        The norms run over the rows. In one piece they are computed as PEFT computes them; a weight
        too large for that is summed in float64 over tiles, which differs from PEFT's float32 by
        rounding.
        """
        assert self.lora is not None and self.lora.magnitude is not None
        count, width = self.output.shape
        magnitude = self.adapter.rows(self.lora.magnitude).view(-1)
        if count * width <= WHOLE_NORM_ELEMENTS:
            weight = read_base(0, count)
            delta = (self._fixed @ self.adapter.rows(self.lora.a)) * self.lora.scale
            return magnitude / torch.linalg.norm(weight.T + delta, dim=1)
        squares = torch.zeros(width, dtype=torch.float64)
        step = max(MIN_ROWS, WHOLE_NORM_ELEMENTS // 4 // width)
        for begin in range(0, count, step):
            end = min(begin + step, count)
            tile = self._exact(read_base(begin, end)).add_(self._delta(begin, end)[0])
            squares += tile.double().square_().sum(0)
        return magnitude / squares.sqrt().float()


@functools.cache
def adds_last(rows: int, rank: int, width: int) -> bool:
    """Whether `addmm` gives the bits of a product and a sum after it, which is what PEFT does.

    A matrix library may as well begin its sums with what is added to, or take long ones in parts;
    that is found out on noise, for every shape, as each can have its own way through the library.
    """
    noise = torch.Generator().manual_seed(0)
    shapes = (rows, rank), (rank, width), (rows, width)
    left, right, weight = (torch.randn(shape, generator=noise) for shape in shapes)
    expected = torch.mm(left, right).add_(weight)
    return torch.equal(weight.addmm_(left, right), expected)


def _scales_exactly(scale: float) -> bool:
    """Whether a factor may be scaled in place of the product: powers of two round nothing."""
    return scale >= 1 and math.frexp(scale)[0] == 0.5


def _squared(values: torch.Tensor) -> float:
    """Squared norm."""
    return float(torch.linalg.vector_norm(values)) ** 2


def _gram(vectors: torch.Tensor) -> torch.Tensor:
    """Products of a factor's vectors (rank, n) with each other, float64."""
    wide = vectors.double()
    return wide @ wide.T


# 4M elements are 16 MiB in float32, and three such arrays are alive at once.
WHOLE_NORM_ELEMENTS = 4 * 2**20
