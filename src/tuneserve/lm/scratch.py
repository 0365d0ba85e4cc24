"""Memory that the steps of a fused form borrow for a moment. Engine file: imports torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_ALIGN = 512
_MOST_VIEWS = 512


class Borrowed:
    """Scratch memory of one device, lent to one caller at a time and never given back.

    Buffers of a step's widest moment come and go with every block; taken from the allocator, they
    leave holes that the lasting tensors of the next block tear up. All borrowers work on one
    stream, one after the other, and none keeps what it borrowed beyond its own call.
    """

    def __init__(self) -> None:
        self._flat: dict[torch.device, Tensor] = {}
        self._views: dict[tuple[Any, ...], Any] = {}

    def take(
        self,
        device: torch.device,
        dtype: torch.dtype,
        *shapes: tuple[int, int],
        form: Callable[[list[Tensor]], Any] = list,
    ) -> Any:
        """Tensors of these shapes, contents undefined; all of what was lent before is void.

        Args:
            device: Where.
            dtype: Their type.
            shapes: Of each.
            form: What is made of them, on a GPU once for all who ask for the same: making a view
                takes a microsecond or more.
        """
        if device.type != "cuda":  # the C library hands out what was just freed
            return form([torch.empty(shape, dtype=dtype) for shape in shapes])
        key = (device, dtype, form, shapes)
        views = self._views.get(key)
        if views is None:
            if len(self._views) > _MOST_VIEWS:  # lengths of batches differ
                self._views.clear()
            views = self._views[key] = form(self._cut(device, dtype, shapes))
        return views

    def _cut(
        self, device: torch.device, dtype: torch.dtype, shapes: tuple[tuple[int, int], ...]
    ) -> list[Tensor]:
        sizes = [-(-rows * width * dtype.itemsize // _ALIGN) * _ALIGN for rows, width in shapes]
        flat = self._flat.get(device)
        if flat is None or flat.numel() < sum(sizes):
            self._flat.pop(device, None)
            self._views = {key: found for key, found in self._views.items() if key[0] != device}
            del flat
            flat = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
            self._flat[device] = flat
        views, begin = [], 0
        for (rows, width), size in zip(shapes, sizes, strict=True):
            part = flat[begin : begin + rows * width * dtype.itemsize]
            views.append(part.view(dtype).view(rows, width))
            begin += size
        return views

    def release(self) -> None:
        """Give everything back; what was lent before is void."""
        self._flat.clear()
        self._views.clear()


borrowed = Borrowed()


class MlpPart:
    """Borrowed memory of a part of an MLP's inner width, and the views of it that a part needs.

    Attributes:
        product: [rows, width], of gate and up projection, or its gradient.
        both: [rows, 2 width], gate and up projection beside one another, or their gradients.
        halves: Of `both`, gate and up.
        pair: [2 width, in], what gate and up are multiplied with.
        weights: Of `pair`, gate's and up's.
        down: [out, width], columns of the down projection.
        pair_t: `pair`, transposed.
        down_t: `down`, transposed.
    """

    def __init__(self, product: Tensor, both: Tensor, pair: Tensor, down: Tensor) -> None:
        width = product.shape[1]
        self.product, self.both, self.pair, self.down = product, both, pair, down
        self.halves = (both[:, :width], both[:, width:])
        self.weights = (pair[:width], pair[width:])
        self.pair_t, self.down_t = pair.t(), down.t()


class MlpScratch:
    """What `MlpPart` takes, for every width: the last part may be narrower."""

    def __init__(self, tensors: list[Tensor]) -> None:
        self._tensors = tensors
        self._parts: dict[int, MlpPart] = {}

    def part(self, width: int) -> MlpPart:
        """Of so many columns of the inner width."""
        if width not in self._parts:
            self._parts[width] = MlpPart(*self._narrowed(width))
        return self._parts[width]

    def _narrowed(self, width: int) -> list[Tensor]:
        product, both, pair, down = self._tensors
        most = product.shape[1]
        if width == most:
            return self._tensors
        found = [pair[: pair.shape[0] * width // most]]
        for tensor in (product, both, down):  # narrower rows, and still no room between them
            rows, columns = len(tensor), tensor.shape[1] * width // most
            found.append(tensor.view(-1)[: rows * columns].view(rows, columns))
        return [found[1], found[2], found[0], found[3]]
