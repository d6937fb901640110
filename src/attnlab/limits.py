"""The longest sequence that fits: a search that goes on after memory has run out."""

import dataclasses
import gc
import operator
from collections.abc import Callable

import jax

from attnlab.comparison import refusal
from attnlab.inputs import memory_errors


@dataclasses.dataclass(frozen=True)
class Longest:
    """What `longest` found.

    `fits` is the largest size that was tried and fitted, None if not even the first did; `fails` the smallest that
    did not, None if all did; `words` why the search ended there.
    """

    fits: int | None
    fails: int | None
    words: str


def longest(attempt: Callable[[int], object], start: int, stop: int) -> Longest:
    """Double a size from `start` up to `stop` while it fits, then try between it and the first that does not.

    Args:
      attempt: called with a size; it fits if the call returns. `MemoryError` and JAX's RESOURCE_EXHAUSTED mean that
        it does not, and the search goes on. Any other exception is a refusal, which more tries would not explain:
        the search ends with its words. Whatever the call allocated is let go before the next.
      start, stop: the first size and the largest.

    Raises:
      ValueError: a `start` below 1 or beyond `stop`.
      TypeError: sizes that are no whole numbers, or an `attempt` that is no function.
    """
    start, stop = operator.index(start), operator.index(stop)
    if not callable(attempt):
        raise TypeError(f"attempt must be a function of a size, got {attempt!r}")
    if not 1 <= start <= stop:
        raise ValueError(f"the search goes from start to stop, 1 <= start <= stop, got {start} and {stop}")
    fits, fails, size = None, None, start
    words, refused = f"the search ended at {stop:,}", False
    while fails is None and size <= stop:
        why, refused = _failure(attempt, size)
        if why:
            fails, words = size, why
        else:
            fits, size = size, min(2 * size, stop) if size < stop else stop + 1
    if fits and fails and not refused and fails - fits > 1:
        size = (fits + fails) // 2  # one more compilation tells much; each further one only half as much
        why, refused = _failure(attempt, size)
        if not why:
            fits = size
        elif not refused:
            fails, words = size, why
    return Longest(fits, fails, words)


def _failure(attempt, size: int) -> tuple[str, bool]:
    """Why `attempt(size)` failed ("" if it did not), and whether that was a refusal and not memory."""
    why, refused = "", False
    try:
        with memory_errors(f"{size:,}"):
            jax.block_until_ready(attempt(size))  # what was only started may still fail
    except MemoryError as e:
        why = str(e) or "out of memory"
    except Exception as e:
        why, refused = refusal(e), True
    # The error held the frames of the attempt, and they held its arrays. Cycles would keep them for later.
    gc.collect()
    return why, refused
