"""The exercises of 04_causal_and_windows."""

import functools

import jax.numpy as jnp
import numpy as np

from attnlab.attention import reference, visible, visible_pairs
from attnlab.exercises import RIGHT, Answer, compare, over_cases, together, untried


def check_chunk_mask(yours) -> Answer:
    """Exercise: the mask of T new queries behind `start` keys, in a cache with room for S."""
    hint = "query i stands at position start + i and sees the keys j <= start + i; what lies behind it is not written."
    answers, last = [], None

    @functools.wraps(yours if callable(yours) else check_chunk_mask)
    def kept(*args):
        nonlocal last
        last = yours(*args)
        return last

    for start, T, S in ((0, 4, 8), (4, 4, 8), (3, 2, 8), (6, 1, 8), (5, 3, 16)):
        right = np.tri(T, S, start, dtype=bool)[None, None]
        what = f"start {start}, T {T}, S {S}: mask"
        mine = yours if untried(yours) or not callable(yours) else kept
        answer = compare("chunk_mask", mine, right, hint, args=(start, T, S), what=what)
        if answer.state == RIGHT and str(getattr(last, "dtype", type(last).__name__)) != "bool":
            dtype = str(getattr(last, "dtype", type(last).__name__))
            answer = compare("chunk_mask", dtype, "bool", "JAX takes a mask of dtype bool only.", what="dtype")
        answers.append(answer)
    return together("chunk_mask", answers)


def check_window_pairs(yours) -> Answer:
    """Exercise: how many pairs causal attention with a window of W tokens sees."""
    hint = (
        "query i sees min(i + 1, W) keys; add that up over the T queries. The first W − 1 see fewer than W, and a "
        "window wider than T is plain causal."
    )

    def right(T, W):
        return visible_pairs(T, T, is_causal=True, local_window_size=(W - 1, 0))

    cases = ((8, 8), (8, 1), (8, 3), (5, 9), (1, 1), (8192, 1024))
    return over_cases("window_pairs", yours, right, hint, cases, "T {}, W {}: pairs")


def _seen_by(kernel: str, T: int, *, is_causal=False, local_window_size=None) -> np.ndarray:
    """The pattern (T, T) that `kernel` gives to these options, cuDNN's fault and refusal included."""
    window = (local_window_size,) * 2 if isinstance(local_window_size, int) else local_window_size
    if kernel == "cuDNN" and window is not None and not is_causal:
        if window[1]:
            raise ValueError(f"cuDNN doesn't support right window: {window[1]} when causal mask is not used.")
        window = (window[0], T)  # the whole future
    return visible(T, T, is_causal=is_causal, local_window_size=window)


def check_window_for(yours) -> Answer:
    """Exercise: the options that show each query W tokens, on XLA and on cuDNN."""
    hint = (
        "the query's own key comes on top of `left`; and cuDNN needs is_causal=True beside local_window_size, or it "
        "sees the future (section 6)."
    )
    if untried(yours) or not callable(yours):
        return compare("window_for", yours, {"is_causal": True}, hint, what="options")
    answers = []
    for W in (1, 4, 7):
        for kernel in ("XLA", "cuDNN"):

            @functools.wraps(yours)
            def seen(W, kernel=kernel):
                options = yours(W)
                if untried(options):
                    return options
                if not isinstance(options, dict) or not options.keys() <= {"is_causal", "local_window_size"}:
                    raise TypeError(f"wanted a dict of is_causal and local_window_size, got {options!r}")
                return _seen_by(kernel, 12, **options)

            right = visible(12, 12, is_causal=True, local_window_size=(W - 1, 0))
            what = f"W {W} on {kernel}: pattern"
            answers.append(compare("window_for", seen, right, hint, args=(W,), what=what))
    return together("window_for", answers)


def check_zero_blind(yours) -> Answer:
    """Exercise: zeros in the rows of queries that see no key."""
    hint = "mask.any(axis=-1) is (B, N, T), and the output is (B, T, N, H): swap two axes and add one before jnp.where."
    answers = []
    for B, T, N, seed in ((2, 6, 3, 0), (1, 4, 4, 1)):
        rng = np.random.default_rng(seed)
        mask = rng.random((B, N, T, 5)) < 0.7
        mask[0, 1, 2] = mask[-1, 0, 1] = False
        q, k, v = (rng.normal(size=(B, length, N, 8)).astype(np.float32) for length in (T, 5, 5))
        out = jnp.asarray(reference(q, k, v, mask=mask), jnp.float32)
        sees = np.moveaxis(mask.any(axis=-1), 1, 2)[..., None]
        right = np.where(sees, np.asarray(out), 0)
        what = f"B {B}, T {T}, N {N}: output"
        answers.append(compare("zero_blind", yours, right, hint, args=(out, jnp.asarray(mask)), what=what))
    return together("zero_blind", answers)
