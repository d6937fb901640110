"""Predictions and answers: what is scored, what counts as untried, and a reader's error stops nothing."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnlab import exercises
from attnlab.exercises import RIGHT, UNTRIED, WRONG, Answer, compare, predict, together, untried


def scored(guess, measured, why=""):
    return predict("How many times faster?", guess, "×").score(measured, why)


# ---- predictions -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "guess, measured, text, right",
    [
        (5, 3.1, "You said 5×, measured 3.1×: off by a factor of 1.6.", False),
        (2, 3.1, "You said 2×, measured 3.1×: off by a factor of 1.6.", False),
        (3, 3.1, "You said 3×, measured 3.1×: right, within 5%.", True),
        (4, 4, "You said 4×, measured 4×: exactly right.", True),
        (0, 3.0, "You said 0×, measured 3.0×: off by 3.0×.", False),
        (True, False, "You said yes; it is no.", False),
        (" cuDNN ", "cudnn", "You said  cuDNN , and so it is.", True),
        ("xla", "cudnn", "You said xla; it is cudnn.", False),
        (5, np.float64(5), "You said 5×, measured 5.0×: exactly right.", True),
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


@pytest.mark.parametrize("guess, measured", [(5, "fast"), (True, 1.0), ("x", True), ([5], 5)])
def test_a_guess_is_not_compared_with_another_kind(guess, measured):
    with pytest.raises(ValueError, match="the guess .* the measured"):
        scored(guess, measured)


def test_questions_are_escaped_and_code_is_marked():
    assert "<b>x" not in predict("<b>x</b>", None)._repr_mimebundle_()["text/html"]
    assert exercises._rich("use `a < b`") == "use <code>a &lt; b</code>"


# ---- answers -----------------------------------------------------------------------------------------------


def stub(q): ...


def documented(q):
    """Scores, (T, S)."""
    ...


def half_done(q):
    scores = ...
    return scores @ q


def works(q):
    return 2 * q


def test_untouched_and_tried():
    assert all(untried(value) for value in (None, ..., stub))
    assert not any(untried(value) for value in (0, False, "", np.zeros(2), works, lambda: 3, len))


@pytest.mark.parametrize("yours", [..., None, stub, documented, half_done, lambda q: ...])
def test_what_is_not_finished_is_not_wrong(yours):
    answer = compare("x", yours, 1.0, args=(jnp.ones(2),))
    assert answer.state == UNTRIED and "eplace" in answer.message


def test_a_wrong_answer_shows_yours_beside_the_right_one():
    answer = Answer("scale", WRONG, "Not quite.", [("scale", "1/64", "<1/8>")], "Look at the head dim.")
    assert str(answer) == (
        "✗ scale: wrong\nNot quite.\n       yours  right\n─────  ─────  ─────\nscale  1/64   <1/8>\n"
        "Hint: Look at the head dim."
    )
    html = answer._repr_mimebundle_()["text/html"]
    assert "&lt;1/8&gt;" in html and "Hint: Look at the head dim." in html


def test_hints_and_rows_are_kept_for_wrong_answers():
    for state in (RIGHT, UNTRIED):
        shown = str(Answer("scale", state, "", [("a", 1, 2)], "secret"))
        assert "secret" not in shown and "yours" not in shown and state in shown


@pytest.mark.parametrize(
    "yours, right",
    [
        (0.12501, 0.125), (8, 8), (8.0, 8), (np.int32(3), 3), ("CUDNN ", "cudnn"), (np.bool_(True), True),
        ([4, 8], (4, 8)), (np.ones(3) * 1.0001, np.ones(3)), ([1.0, 2.0], np.array([1.0, 2.0])),
        (math.nan, math.nan), (np.array([np.nan, 1]), np.array([np.nan, 1])), (np.array([True]), np.array([True])),
        (jnp.ones(3, jnp.bfloat16), np.ones(3)), (lambda: 6, lambda: 6),
    ],
)  # fmt: skip
def test_right_answers(yours, right):
    answer = compare("x", yours, right)
    assert (answer.state, answer.rows) == (RIGHT, ())


@pytest.mark.parametrize(
    "yours, right, what, shown",
    [
        (0.2, 0.125, "scale", ("0.2", "0.125")),
        (1.002, 1.0, "scale", ("1.002", "1.0")),
        (1000001, 1000000, "scale", ("1,000,001", "1,000,000")),
        ("8", 8, "scale", ("8 (text)", "8 (a number)")),
        (1, True, "scale", ("1 (a number)", "yes (a bool)")),
        ("xla", "cudnn", "scale", ("xla", "cudnn")),
        (math.nan, 1.0, "scale", ("NaN", "1.0")),
        (np.ones(2), 1.0, "scale", ("array of shape (2,), float64 (ndarray)", "1.0 (a number)")),
        ("x", np.ones(2), "scale", ("str, no array of numbers", "an array of shape (2,)")),
        (np.ones((2, 3)), np.ones((3, 2)), "scale: shape", ("(2, 3)", "(3, 2)")),
        (np.array([1000001]), np.array([1000000]), "scale: elements that differ", ("1 of 1", 0)),
        (jnp.ones(3, jnp.bfloat16), np.ones(3) * 1.1, "scale: elements that differ", ("3 of 3", 0)),
    ],
)
def test_wrong_answers(yours, right, what, shown):
    answer = compare("x", yours, right, "Think.", what="scale")
    assert (answer.state, answer.hint) == (WRONG, "Think.")
    assert answer.rows[0] == (what, *shown)


def test_arrays_show_how_many_and_where():
    answer = compare("x", np.array([[0, 0], [np.nan, 5]]), np.zeros((2, 2)), what="out")
    assert answer.rows == (
        ("out: elements that differ", "2 of 4", 0), ("out: NaN elements", 1, 0), ("out[1, 0]", "NaN", "0"),
    )  # fmt: skip


def test_functions_are_called_with_the_same_arguments():
    assert compare("x", lambda a: a + a, works, args=(3,)).state == RIGHT
    assert compare("x", lambda a: a + 1, works, args=(3,)).state == WRONG


def broken(q):
    width = q.shape[1]
    return width


def test_an_error_becomes_an_answer_with_its_words_and_its_line():
    answer = compare("x", broken, 1.0, "Mind the rank.", args=(np.ones(2),))
    assert answer.state == WRONG and answer.hint == "Mind the rank."
    assert answer.rows[0][1].startswith("IndexError: tuple index out of range")
    line = broken.__code__.co_firstlineno + 1
    assert answer.rows[1] == ("look at", f"line {line}: width = q.shape[1]", None)
    assert len(compare("x", math.sqrt, 1.0, args=("a",)).rows) == 1  # no line of the reader's


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit])
def test_the_line_is_the_readers_and_not_the_librarys(wrap):
    def mine(q):
        return jnp.einsum("ij,jk->ik", q, q)

    answer = compare("x", wrap(mine), 1.0, args=(jnp.ones((2, 3)),))
    assert answer.state == WRONG and 'jnp.einsum("ij,jk->ik", q, q)' in answer.rows[1][1]


def test_an_interruption_and_the_courses_own_error_pass_through():
    def interrupted():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compare("x", interrupted, 1.0)
    with pytest.raises(IndexError):
        compare("x", works, broken, args=(np.ones(2),))


def test_several_answers_make_one():
    right, wrong, new = Answer("a", RIGHT, "a"), Answer("b", WRONG, "b", (), "hint"), Answer("c", UNTRIED)
    assert together("x", [right, right]) == Answer("x", RIGHT, "a\na")
    assert together("x", [right, wrong]) == Answer("x", WRONG, "b", (), "hint")
    assert together("x", [wrong, new]).state == UNTRIED
