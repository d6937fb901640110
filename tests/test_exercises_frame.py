"""Predictions and answers: what is scored, what counts as untried, and a reader's error stops nothing."""

import functools
import math

import numpy as np
import pytest

from attnlab import exercises
from attnlab.exercises import RIGHT, UNTRIED, WRONG, Answer, compare, predict, together, untried


def scored(guess, measured, unit="×", why=""):
    return predict("How many times faster?", guess, unit).score(measured, why)


# ---- predictions -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "guess, measured, text, right",
    [
        (5, 3.1, "You said 5×, measured 3.1×: off by a factor of 1.6.", False),
        (2, 3.1, "You said 2×, measured 3.1×: off by a factor of 1.6.", False),
        (3, 3.1, "You said 3×, measured 3.1×: right, within 5%.", True),
        (4, 4, "You said 4×, measured 4×: exactly right.", True),
        (0, 3.0, "You said 0×, measured 3.0×: off by 3.0×.", False),
        (-1, 1, "You said -1×, measured 1×: off by 2×.", False),
        (0, 0, "You said 0×, measured 0×: exactly right.", True),
        (True, False, "You said yes; it is no.", False),
        (" cuDNN ", "cudnn", "You said  cuDNN , and so it is.", True),
        ("xla", "cudnn", "You said xla; it is cudnn.", False),
        (np.float32(5), np.float64(5), "You said 5.0×, measured 5.0×: exactly right.", True),
        (True, np.bool_(True), "You said yes, and so it is.", True),
    ],
)
def test_scores(guess, measured, text, right):
    score = scored(guess, measured)
    assert (score.text, score.right) == (text, right)


def test_the_factor_is_kept():
    assert scored(6, 3.0).factor == 2.0 and scored(1.5, 3.0).factor == 2.0 and scored(0, 1).factor is None


@pytest.mark.parametrize("guess", [None, ...])
def test_no_guess_scores_nothing(guess, capsys):
    score = scored(guess, 3.1)
    assert (score.right, score.factor) == (None, None)
    out = capsys.readouterr().out
    assert "How many times faster?" in out and "Not guessed" in out and "Measured 3.1×" in out


@pytest.mark.parametrize("missing", [None, math.nan])
def test_what_was_not_measured_says_so(missing):
    assert scored(5, missing, why="no GPU").text == "You said 5×; not measured here (no GPU)."
    assert scored(None, missing).text == "Not measured here."
    assert scored(5, missing).right is None


@pytest.mark.parametrize("guess", [[5], {"x": 1}, 1j, math.nan, math.inf, np.ones(2)])
def test_guesses_of_another_kind_are_named(guess):
    with pytest.raises(ValueError, match="guess (is|must)"):
        predict("How much?", guess)


@pytest.mark.parametrize("guess, measured", [(5, "fast"), (True, 1.0), ("x", True), (1, [2])])
def test_a_guess_is_not_compared_with_another_kind(guess, measured):
    with pytest.raises(ValueError, match="measured"):
        scored(guess, measured)


def test_a_question_is_needed():
    with pytest.raises(ValueError, match="question"):
        predict("  ", 1)


def test_questions_are_escaped():
    assert "<b>x" not in predict("<b>x</b>", None)._repr_mimebundle_()["text/html"]


# ---- untried -----------------------------------------------------------------------------------------------


def documented(q, k):
    """Scores, (T, S)."""
    ...


def passing(q):
    pass


def returns_ellipsis(q):
    return ...


@functools.wraps(lambda q: q)
def wrapped(q):
    return q


wrapped.__wrapped__ = lambda q: ...


def nested(q):
    def inner(x):
        y = ...
        return y

    return inner(q)


def indexes(q):
    q[...] = 1
    return q[..., 0] + q[...]


def works(q):
    return 2 * q


def constant():
    return 3


@pytest.mark.parametrize("value", [None, ..., documented, passing, returns_ellipsis, lambda q: ..., wrapped, nested])
def test_untouched_stubs(value):
    assert untried(value)


@pytest.mark.parametrize(
    "value", [0, False, "", [], np.zeros(2), works, constant, indexes, len, np.float32, lambda: "x"]
)
def test_what_was_tried(value):
    assert not untried(value)


# ---- answers -----------------------------------------------------------------------------------------------


def test_a_wrong_answer_shows_yours_beside_the_right_one():
    answer = Answer("scale", WRONG, "Not quite.", [("scale", "1/64", "<1/8>")], "Look at the head dim.")
    plain = answer._repr_mimebundle_()["text/plain"]
    assert plain == (
        "✗ scale: wrong\nNot quite.\n       yours  right\n─────  ─────  ─────\nscale  1/64   <1/8>\n"
        "Hint: Look at the head dim."
    )
    html = answer._repr_mimebundle_()["text/html"]
    assert "&lt;1/8&gt;" in html and "Hint: Look at the head dim." in html
    assert str(answer) == plain


def test_hints_and_rows_are_kept_for_wrong_answers():
    for state in (RIGHT, UNTRIED):
        shown = str(Answer("scale", state, "", [("a", 1, 2)], "secret"))
        assert "secret" not in shown and "yours" not in shown and state in shown


def test_unknown_states_are_named():
    with pytest.raises(ValueError, match="'maybe'"):
        Answer("scale", "maybe")


@pytest.mark.parametrize(
    "yours, right",
    [
        (0.125, 0.125), (0.12501, 0.125), (8, 8), ("CUDNN ", "cudnn"), (True, True), ((4, 8), (4, 8)),
        ([4, 8], (4, 8)),
        (np.ones(3) * 1.0001, np.ones(3)), (np.float32, "float32"),
        ("float32", np.dtype("float32")),
        (np.float32, np.dtype("float32")), ([1.0, 2.0], np.array([1.0, 2.0])), (math.nan, math.nan),
        (np.array([np.nan, 1]), np.array([np.nan, 1])),
        ((np.ones(2), np.zeros(3)), [np.ones(2), np.zeros(3)]),
        (np.int32(3), 3), (np.array([True]), np.array([True])), (8.0, 8),
    ],
)  # fmt: skip
def test_right_answers(yours, right):
    answer = compare("x", yours, right)
    assert (answer.state, answer.rows) == (RIGHT, ())


@pytest.mark.parametrize(
    "yours, right, what, shown",
    [
        (0.2, 0.125, "scale", ("0.2", "0.125")),
        (9, 8, "scale", ("9", "8")),
        ("8", 8, "scale", ("8 (text)", "8 (a number)")),
        (1, True, "scale", ("1 (a number)", "yes (a bool)")),
        ("xla", "cudnn", "scale", ("xla", "cudnn")),
        ((4, 8), (8, 4), "scale", ("(4, 8)", "(8, 4)")),
        (4, (4, 8), "scale", ("4", "(4, 8)")),
        (math.nan, 1.0, "scale", ("NaN", "1.0")),
        (1.0, math.nan, "scale", ("1.0", "NaN")),
        (np.float16, np.dtype("float32"), "scale", ("float16", "float32")),
        (np.ones((2, 3)), np.ones((3, 2)), "scale: shape", ("(2, 3)", "(3, 2)")),
        ("x", np.ones(2), "scale", 
         ("str, which does not give numbers (ValueError)", "an array of shape (2,)")),
        ([np.ones(2)], (np.ones(2), np.ones(2)), "scale: how many", (1, 2)),
        (np.ones(2), 1.0, "scale", ("array of shape (2,), float64 (ndarray)", "1.0 (a number)")),
    ],
)  # fmt: skip
def test_wrong_answers(yours, right, what, shown):
    answer = compare("x", yours, right, "Think.", what="scale")
    assert answer.state == WRONG and answer.hint == "Think."
    assert answer.rows[0] == (what, *shown)


def test_arrays_show_where_they_differ_most():
    yours, right = np.zeros((2, 3)), np.zeros((2, 3))
    yours[1, 2], yours[0, 1] = 5, 0.1
    answer = compare("x", yours, right, what="out")
    assert answer.rows == (("out: elements that differ", "2 of 6", 0), ("out[1, 2]", "5.0", "0"))


def test_arrays_tell_of_nan():
    answer = compare("x", np.array([1.0, np.nan]), np.ones(2), what="out")
    assert ("out: NaN elements", 1, 0) in answer.rows and answer.rows[-1] == ("out[1]", "NaN", "1.0")


def test_integers_are_exact_and_floats_have_a_tolerance():
    assert compare("x", np.array([1000001]), np.array([1000000])).state == WRONG
    assert compare("x", 1000001, 1000000).state == WRONG
    assert compare("x", 1.0005, 1.0).state == RIGHT
    assert compare("x", 1.0005, 1.0, rtol=1e-4).state == WRONG


def test_functions_are_called_with_the_same_arguments():
    assert compare("x", lambda a: a + a, works, args=(3,)).state == RIGHT
    assert compare("x", lambda a: a + 1, works, args=(3,)).state == WRONG


def half_done(q):
    scores = ...
    return scores @ q


def returns_its_stub(q):
    scores = ...
    return scores


@pytest.mark.parametrize("yours", [..., None, documented, half_done, returns_its_stub, (4, ..., 8)])
def test_what_is_not_finished_is_not_wrong(yours):
    args = (np.ones(2),) if yours is not documented else (1, 2)
    assert compare("x", yours, 1.0, args=args).state == UNTRIED


def broken(q):
    width = q.shape[1]
    return width


def test_an_error_becomes_an_answer_with_its_words_and_its_line():
    answer = compare("x", broken, 1.0, "Mind the rank.", args=(np.ones(2),))
    assert answer.state == WRONG and answer.hint == "Mind the rank."
    assert answer.rows[0][1].startswith("IndexError: tuple index out of range")
    line = broken.__code__.co_firstlineno + 1
    assert answer.rows[1] == ("look at", f"line {line}: width = q.shape[1]", None)


def test_the_line_is_the_readers_and_not_the_librarys():
    jnp = pytest.importorskip("jax.numpy")

    def mine(q):
        return jnp.einsum("ij,jk->ik", q, q)

    answer = compare("x", mine, 1.0, args=(jnp.ones((2, 3)),))
    assert answer.state == WRONG and 'jnp.einsum("ij,jk->ik", q, q)' in answer.rows[1][1]


@pytest.mark.parametrize("stop", [KeyboardInterrupt, SystemExit])
def test_an_interruption_passes_through(stop):
    def interrupted():
        raise stop

    with pytest.raises(stop):
        compare("x", interrupted, 1.0)


def test_an_error_in_the_courses_own_function_is_not_the_readers():
    with pytest.raises(IndexError):
        compare("x", works, broken, args=(np.ones(2),))


def test_low_precision_arrays_are_compared():
    jnp = pytest.importorskip("jax.numpy")
    assert compare("x", jnp.ones(3, jnp.bfloat16), np.ones(3)).state == RIGHT
    assert compare("x", jnp.ones(3, jnp.bfloat16), np.ones(3) * 1.1).state == WRONG
    assert compare("x", jnp.bfloat16, "bfloat16").state == RIGHT


def test_several_answers_make_one():
    right, wrong, new = Answer("a", RIGHT, "a"), Answer("b", WRONG, "b", (), "hint"), Answer("c", UNTRIED)
    assert together("x", [right, right]) == Answer("x", RIGHT, "a\na")
    assert together("x", [right, wrong]) == Answer("x", WRONG, "b", (), "hint")
    assert together("x", [wrong, new]).state == UNTRIED
    with pytest.raises(ValueError, match="no answers"):
        together("x", [])


def test_code_in_messages_is_marked_and_escaped():
    html = exercises._rich("use `a < b`")
    assert html == "use <code>a &lt; b</code>"
