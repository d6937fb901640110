"""The search for the longest sequence: what it finds, and that it survives what it meets."""

import weakref

import jax
import jax.numpy as jnp
import pytest

from attnlab import device
from attnlab.limits import Longest, longest


def up_to(limit, tried, error=MemoryError):
    """An attempt that fits up to `limit`, and writes down what was tried."""

    def attempt(size):
        tried.append(size)
        if size > limit:
            raise error("too long")

    return attempt


def test_it_doubles_then_tries_in_between():
    tried = []
    found = longest(up_to(700, tried), 64, 4096)
    assert tried == [64, 128, 256, 512, 1024, 768]
    assert found == Longest(512, 768, "too long")


def test_what_fits_in_between_is_found():
    found = longest(up_to(800, []), 64, 4096)
    assert (found.fits, found.fails) == (768, 1024)


def test_it_ends_at_the_cap_and_says_so():
    tried = []
    found = longest(up_to(10**9, tried), 100, 450)
    assert tried == [100, 200, 400, 450] and found == Longest(450, None, "the search ended at 450")


def test_a_refusal_in_between_leaves_the_words_of_the_memory():
    def attempt(size):
        if size == 3:
            raise ValueError("odd")
        if size > 2:
            raise MemoryError("too long")

    assert longest(attempt, 1, 64) == Longest(2, 4, "too long")


@pytest.mark.parametrize("wrong", [(None, 1, 4), (print, 1.5, 4), (print, 1, "4")], ids=str)
def test_a_slip_of_the_caller_is_no_result(wrong):
    with pytest.raises(TypeError):
        longest(*wrong)


def test_not_even_the_first_fits():
    assert longest(up_to(8, []), 16, 64) == Longest(None, 16, "too long")


def test_between_neighbours_there_is_nothing_to_try():
    tried = []
    assert longest(up_to(1, tried), 1, 64) == Longest(1, 2, "too long") and tried == [1, 2]


def test_it_goes_on_after_jax_runs_out_of_memory():
    def attempt(size):
        if size > 4:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 9.00GiB.")

    found = longest(attempt, 4, 64)
    assert (found.fits, found.fails) == (4, 6) and "ran out of memory" in found.words and "9.00GiB" in found.words


def test_the_device_works_after_it_ran_out_of_memory():
    here = device.current()
    # Twice the GPU; on a CPU more than an address can name, so that no machine starts to fill it.
    beyond = 2 * here.memory if here.kind == "gpu" else 2**57

    def attempt(size):
        jnp.zeros(beyond, jnp.int8).block_until_ready() if size > 1 else None

    found = longest(attempt, 1, 4)
    assert found.fits == 1 and "ran out of memory" in found.words
    assert jnp.ones(3).sum() == 3


@pytest.mark.parametrize("error", [ValueError, TypeError, jax.errors.JaxRuntimeError])
def test_a_refusal_ends_the_search_with_its_words(error):
    tried = []
    found = longest(up_to(3, tried, error), 2, 64)
    assert tried == [2, 4] and (found.fits, found.fails) == (2, 4)
    assert found.words == f"{error.__name__}: too long"


def test_an_interrupt_is_no_refusal():
    with pytest.raises(KeyboardInterrupt):
        longest(up_to(3, [], KeyboardInterrupt), 2, 64)


def test_what_a_failed_attempt_allocated_is_gone_before_the_next():
    class Large:
        pass

    kept = []

    def attempt(size):
        assert not [ref for ref in kept if ref() is not None]
        mine = Large()
        mine.itself = mine  # a cycle: counting references alone would keep it
        kept.append(weakref.ref(mine))
        if size > 1:
            raise MemoryError

    found = longest(attempt, 1, 16)
    assert found.fits == 1 and found.words == "out of memory" and len(kept) == 2


@pytest.mark.parametrize("start, stop", [(0, 8), (-1, 8), (9, 8)])
def test_a_search_that_can_not_begin_is_refused(start, stop):
    with pytest.raises(ValueError, match=f"{start} and {stop}"):
        longest(lambda size: None, start, stop)
