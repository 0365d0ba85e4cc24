"""Inputs of checkpointed blocks in host memory until the way back. Engine file: imports torch.

What a checkpointed block keeps is its input, one hidden state. Here it is copied into one of some
lasting places on the GPU; those of the first blocks go on from there to pinned host memory while
later ones are computed, and come back into the places that the way back has left. Either copy has
as long as it takes to compute as many blocks as there are places, and nothing is allocated or
freed on the way.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

OFFLOAD_PLACES = 10
OFFLOAD_BYTES = 320 * 2**20
"""So many places on the GPU, or as many as these bytes hold. Two would do on a fast bus; but a copy
costs some launches, and for short rows these are the time of a slow CPU."""


@dataclass(frozen=True)
class _Kept:
    """The input of a block, held by `BlockInputs`."""

    number: int
    shape: torch.Size
    dtype: torch.dtype


class BlockInputs:
    """Stands between checkpointed blocks and what they keep.

    Args:
        device: Where the blocks compute; streams and pinned memory are for GPUs.
        blocks: How many there are, called in order.
        places: How many inputs lie on the device at most; at least two do.
        place_bytes: Of all places together, if more than two.
    """

    def __init__(
        self, device: torch.device, blocks: int, places: int, place_bytes: int = OFFLOAD_BYTES
    ) -> None:
        self._device, self._blocks = device, blocks
        self._most, self._most_bytes = max(2, min(places, blocks)), place_bytes
        self._places = self._most
        self._gpu = device.type == "cuda"
        self._out = torch.cuda.Stream(device) if self._gpu else None
        self._in = torch.cuda.Stream(device) if self._gpu else None
        self._size, self._next = 0, 0
        self._here: list[torch.Tensor] = []
        self._host: list[torch.Tensor] = []
        self._left: dict[int, Any] = {}
        self._arrived: dict[int, Any] = {}

    def around(self, checkpoint: Callable[..., Any], number: int) -> Callable[..., Any]:
        """The checkpointing function of block `number`, whose input is held here."""

        def held(function: Any, *args: Any, **kwargs: Any) -> Any:
            wanted = args[0].data_ptr() if isinstance(args[0], torch.Tensor) else None

            def pack(tensor: torch.Tensor) -> Any:
                return self.pack(tensor, number) if tensor.data_ptr() == wanted else tensor

            with saved_tensors_hooks(pack, self.unpack):
                return checkpoint(function, *args, **kwargs)

        return held

    def pack(self, tensor: torch.Tensor, number: int) -> Any:
        """What stands for the input of block `number`: itself, if there is no place for it."""
        if number == 0:
            self._make_room(tensor.nbytes)
            self._next = 0
        if number != self._next or tensor.nbytes > self._size or not tensor.is_contiguous():
            return tensor
        self._next += 1
        if number >= self._places:
            self._wait(self._left.pop(number - self._places))
        kept = _Kept(number, tensor.shape, tensor.dtype)
        place = self._view(kept)
        place.copy_(tensor)
        if number < self._blocks - self._places:
            with self._beside(self._out):
                self._host[number][: tensor.nbytes].copy_(self._bytes(kept), non_blocking=True)
                self._left[number] = self._mark(self._out)
        return kept

    def unpack(self, kept: Any) -> torch.Tensor:
        """The input that `pack` was given; of the last block first."""
        if not isinstance(kept, _Kept):
            return kept
        # The block after this one has gone back, so another input may come into its place.
        comes = kept.number + 1 - self._places
        if comes >= 0 and kept.number + 1 < self._blocks:
            with self._beside(self._in):
                # The copy out of it ended before the place was used again.
                there = self._bytes(_Kept(comes, kept.shape, kept.dtype))
                there.copy_(self._host[comes][: there.nbytes], non_blocking=True)
                self._arrived[comes] = self._mark(self._in)
        if kept.number < self._blocks - self._places:
            self._wait(self._arrived.pop(kept.number))
        return self._view(kept)

    def _make_room(self, size: int) -> None:
        """Places of so many bytes; larger ones are made once, for the longest rows."""
        if size <= self._size:
            return
        for stream in (self._out, self._in):
            if stream is not None:
                torch.cuda.current_stream(self._device).wait_stream(stream)
        self._here, self._host, self._size = [], [], size
        self._places = max(2, min(self._most, self._most_bytes // size))
        # In one piece, and yet each a tensor of its own: writing into one is no change of another.
        storage = torch.empty(
            self._places * size, dtype=torch.uint8, device=self._device
        ).untyped_storage()
        for place in range(self._places):
            empty = torch.empty(0, dtype=torch.uint8, device=self._device)
            self._here.append(empty.set_(storage, place * size, (size,)))
        for _ in range(self._blocks - self._places):
            self._host.append(torch.empty(size, dtype=torch.uint8, pin_memory=self._gpu))

    def _bytes(self, kept: _Kept) -> torch.Tensor:
        size = kept.shape.numel() * kept.dtype.itemsize
        return self._here[kept.number % self._places][:size]

    def _view(self, kept: _Kept) -> torch.Tensor:
        return self._bytes(kept).view(kept.dtype).view(kept.shape)

    def _beside(self, stream: Any) -> AbstractContextManager[Any]:
        """Work on another stream, after all that was asked for on this one."""
        if stream is None:
            return nullcontext()
        stream.wait_stream(torch.cuda.current_stream(self._device))
        return torch.cuda.stream(stream)

    def _mark(self, stream: Any) -> Any:
        return None if stream is None else stream.record_event()

    def _wait(self, event: Any) -> None:
        if event is not None:
            torch.cuda.current_stream(self._device).wait_event(event)
