"""How large a block may be, and which blocks of keys a block of queries meets."""

import dataclasses
from typing import NamedTuple

from jax import lax

from attnlab import device as _device
from attnlab.attention import window

# What one thread block may ask for, in KiB, by compute capability. CUDA C++ Programming Guide, "Technical
# Specifications per Compute Capability"; `tests/test_tiles.py` asks the driver on a GPU.
SHARED_KIB = {(8, 0): 163, (8, 6): 99, (8, 7): 163, (8, 9): 99, (9, 0): 227, (10, 0): 227, (10, 3): 227,
              (12, 0): 99, (12, 1): 99}  # fmt: skip
SMALLEST = 16  # rows or keys: a matrix unit takes no fewer


class Tile(NamedTuple):
    """`q` query rows meet `k` keys at a time, on `warps` warps, `stages` blocks of what is looped over in flight."""

    q: int
    k: int
    warps: int = 4
    stages: int = 2

    def forward_bytes(self, H: int, itemsize: int) -> int:
        """Shared memory of the forward kernel's matrices: q once, k and v once a stage."""
        return itemsize * H * (self.q + 2 * self.stages * self.k)

    def backward_bytes(self, H: int, itemsize: int) -> int:
        """The same for the hungrier backward kernel: one stays with q and dout, the other with k and v."""
        return itemsize * H * 2 * max(self.q + self.stages * self.k, self.k + self.stages * self.q)


# In the order of preference: the first of each was the fastest of those measured on an H200 at H=128; notebook 08
# measures the forward ones again. Where it doesn't fit, a smaller block must do.
SMALLER = (Tile(128, 64, 4, 2), Tile(64, 64, 4, 2), Tile(64, 32), Tile(32, 32), Tile(16, 16))
FULL = (Tile(256, 64, 8, 3), *SMALLER)
CAUSAL = SMALLER  # fewer rows: less of a block on the diagonal is computed in vain
BACKWARD = SMALLER[1:]
ANYWHERE = Tile(32, 32)  # where there is no shared memory to fill: interpreted on a CPU


def shared_memory(device: _device.Device | None = None) -> int | None:
    """Bytes of shared memory a thread block may ask for on `device` (default: this process's), None if unknown."""
    device = device or _device.current()
    kib = SHARED_KIB.get(device.compute_capability)
    return kib and kib * 2**10


def choose(H: int, itemsize: int, shared: int | None, *, is_causal: bool = False, backward: bool = False) -> Tile:
    """The preferred tile whose matrices fit into `shared` bytes.

    Args:
      H, itemsize: head dim, bytes an element.
      shared: as `shared_memory` returns it; None gives the tile for an unknown device or a CPU.
      is_causal, backward: which kernel it is for.

    Raises:
      ValueError: not even the smallest fits.
    """
    if shared is None:
        return ANYWHERE
    for tile in BACKWARD if backward else CAUSAL if is_causal else FULL:
        if (tile.backward_bytes if backward else tile.forward_bytes)(H, itemsize) <= shared:
            return tile
    raise ValueError(
        f"no block of head dim {H} with {itemsize} bytes an element fits into {shared:,} bytes of shared memory: "
        "use a smaller head dim or a narrower dtype"
    )


def clip(tile: Tile, T: int, S: int) -> Tile:
    """`tile`, no larger than T and S make sense."""

    def fit(block, length):
        return max(SMALLEST, min(block, 1 << (length - 1).bit_length()))

    return tile._replace(q=fit(tile.q, T), k=fit(tile.k, S))


def tile_for(q, k, *, is_causal: bool = False, backward: bool = False) -> Tile:
    """The tile for q (B, T, N, H) and k (B, S, K, H) on the device of this process. Raises as `choose`."""
    shared = shared_memory()
    tile = choose(q.shape[-1], q.dtype.itemsize, shared, is_causal=is_causal, backward=backward)
    return clip(tile, q.shape[1], k.shape[1])


@dataclasses.dataclass(frozen=True)
class Band:
    """Which keys a query sees: from `left` before it to `right` after it, None without end. Causal is right = 0."""

    left: int | None = None
    right: int | None = None

    @classmethod
    def of(cls, T: int, S: int, *, is_causal: bool = False, local_window_size=None) -> "Band":
        """The band of JAX's `is_causal` and `local_window_size`; a side that cuts nothing off becomes None."""
        left, right = (None, None) if local_window_size is None else window(local_window_size)
        if is_causal:
            right = 0 if right is None else min(0, right)
        # What hides everything needs no more digits than an int32 has.
        left, right = (x if x is None else max(x, -T - S) for x in (left, right))
        return cls(None if left is None or left >= T - 1 else left, None if right is None or right >= S - 1 else right)

    @property
    def transposed(self) -> "Band":
        """The same band seen from a key: which queries see it."""
        return Band(self.right, self.left)

    def sees(self, row, col):
        """Whether query `row` sees key `col`: broadcast arrays of bool, or None where everything is seen."""
        seen = None
        if self.left is not None:
            seen = col >= row - self.left
        if self.right is not None:
            seen = (col <= row + self.right) if seen is None else seen & (col <= row + self.right)
        return seen

    def has_blind_rows(self, T: int, S: int) -> bool:
        """Whether some query of T sees none of the S keys."""
        left, right = T if self.left is None else self.left, S if self.right is None else self.right
        return right < 0 or T - 1 - left > S - 1 or left + right < 0

    def blocks(self, i, rows: int, cols: int, length: int):
        """The blocks of `cols` keys, of `length` keys in all, that block `i` of `rows` queries meets.

        Returns (first, inner, outer, last): the band or the end of the keys cuts through blocks first…inner and
        outer…last, so those need a mask; in inner…outer every query sees every key. All others are skipped.
        """
        top, bottom = i * rows, (i + 1) * rows - 1
        first, inner, outer, last = 0, 0, length // cols, -(-length // cols)
        if self.right is not None:
            outer = _between(0, _floor(top + self.right + 1, cols), outer)
            last = _between(0, _floor(bottom + self.right + cols, cols), last)
        if self.left is not None:
            first = _between(0, _floor(top - self.left, cols), last)
            inner = _between(first, _floor(bottom - self.left + cols - 1, cols), last)
            outer = _between(inner, outer, last)
        return first, inner, outer, last


def _floor(x, block: int):
    return lax.div(lax.max(x, 0), block)  # what lies before the start is cut off anyway: no sign to mind


def _between(low, x, high):
    return lax.max(low, lax.min(x, high))


def over_blocks(step, blocks, carry):
    """`step(block, carry, masked=...)` over what `Band.blocks` returned. A loop known to be empty leaves no trace."""
    first, inner, outer, last = blocks
    for start, stop, masked in ((first, inner, True), (inner, outer, False), (outer, last, True)):
        # The same tracer, or two numbers: empty for certain.
        if start is stop or (isinstance(start, int) and isinstance(stop, int) and start >= stop):
            continue
        carry = lax.fori_loop(start, stop, lambda j, c, masked=masked: step(j, c, masked=masked), carry)
    return carry
