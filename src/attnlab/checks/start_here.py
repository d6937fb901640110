"""The exercises of 00_start_here."""

import dataclasses
import time

import jax
import jax.numpy as jnp

from attnlab.display import format_ms
from attnlab.exercises import RIGHT, Answer, compare, over_cases, together


def check_softmax_rows(yours) -> Answer:
    """Exercise: softmax over the last axis of `scores` (T, S), also for scores of 1e4."""
    hint = "exp overflows beyond about 88 in float32: subtract each row's largest score first, which changes no weight."
    cases = (("small scores", [[0.0, 1.0], [2.0, 2.0]]), ("scores of 1e4", [[1e4, 1e4 - 1.0], [-1e4, 0.0]]))
    return together(
        "softmax_rows",
        [
            compare(
                "softmax_rows",
                yours,
                jax.nn.softmax(jnp.array(x), axis=-1),
                hint,
                args=(jnp.array(x),),
                what=what,
            )
            for what, x in cases
        ],
    )


def check_bound_ms(yours) -> Answer:
    """Exercise: the shortest time in ms from FLOPs, bytes, TFLOP/s and GB/s."""
    hint = (
        "arithmetic and memory traffic overlap, so the bound is the larger of the two times, not their sum. "
        "FLOPs over (TFLOP/s · 1e12) is in seconds; a millisecond is 1e-3 of one."
    )
    cases = ((2e12, 1e6, 1000, 5000), (1e6, 1e10, 1000, 5000), (1e12, 5e9, 1000, 5000))

    def right(flops, nbytes, tflops, gbps):
        return max(flops / (tflops * 1e9), nbytes / (gbps * 1e6))

    return over_cases("bound_ms", yours, right, hint, cases, "{:.0e} FLOPs, {:.0e} bytes", unit="ms")


class _Queued:
    """Work that is queued and ready `seconds` later, as on a GPU."""

    def __init__(self, seconds):
        self._ready = time.perf_counter() + seconds

    def block_until_ready(self):
        time.sleep(max(0.0, self._ready - time.perf_counter()))
        return self


def _queue(seconds):
    time.sleep(0.02)  # the call itself takes its time too
    return _Queued(seconds)


def check_honest_ms(yours) -> Answer:
    """Exercise: milliseconds of one call of `fn(x)`, waiting for the result."""
    hint = (
        "start the clock before the call. The call returns before the work is done: call .block_until_ready() on its "
        "result before you read the clock again."
    )
    answers = []
    for work in (0.03, 0.12):
        least = 1e3 * (0.02 + work)
        # A busy machine takes longer than the work, and a clock that does not wait shows less.
        answer = compare(
            "honest_ms", yours, 2 * least, hint, args=(_queue, work), what="time", unit="ms", atol=1.02 * least
        )
        rows = [
            (f"time of {format_ms(least)} of work", given, f"{format_ms(least)} or more")
            if what == "time"
            else (what, given, right)
            for what, given, right in answer.rows
        ]
        message = "it waited for the work" if answer.state == RIGHT else answer.message
        answers.append(dataclasses.replace(answer, rows=rows, message=message))
    return together("honest_ms", answers)
