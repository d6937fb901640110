"""Predictions scored against the measurement, and exercises answered at once: yours beside the right one."""

import dataclasses
import inspect
import re
import traceback

import numpy as np

from attnlab import display

_CLOSE = 1.05  # a guess within 5% counts as right: the clock's own spread is of that size

UNTRIED, RIGHT, WRONG = "not tried yet", "right", "wrong"
_RIGHT, _WRONG, _NEUTRAL = "#009e73", "#d55e00", "#808080"  # Okabe-Ito; 3:1 or better on white and on #111111
_KINDS = {bool: "a bool", int: "a number", float: "a number", str: "text"}
_LOOK = {UNTRIED: ("○", _NEUTRAL), RIGHT: ("✓", _RIGHT), WRONG: ("✗", _WRONG)}


def _rich(text: str) -> str:
    """Text as HTML; what stands between backticks is code."""
    return re.sub("`([^`]+)`", r"<code>\1</code>", display.to_html(text))


def _kind(value) -> str:
    return _KINDS.get(type(value), type(value).__name__)


def _folded(value):
    return " ".join(value.casefold().split()) if isinstance(value, str) else value


# ---- predictions -------------------------------------------------------------------------------------------


class _Shown:
    """An object that was shown when it was made, and is not shown twice when it ends its cell."""

    _shown_in = None

    def _show(self):
        display.show(self._repr_mimebundle_())
        self._shown_in = _cell()
        return self

    def _ipython_display_(self) -> None:
        if self._shown_in != _cell():
            self._show()


def _cell():
    shell = display.shell()
    return shell.execution_count if shell is not None else None


@dataclasses.dataclass
class Score(_Shown):
    """What became of a prediction.

    `right` is None where nothing was scored. `factor` is how far off a number was (1.0 is exact), else None.
    """

    text: str
    right: bool | None = None
    factor: float | None = None

    def _repr_mimebundle_(self, **_):
        colour = {True: _RIGHT, False: _WRONG, None: _NEUTRAL}[self.right]
        return {"text/html": display.box_html([_rich(self.text)], colour), "text/plain": self.text}


@dataclasses.dataclass
class Prediction(_Shown):
    """A question with the reader's guess, made before the measurement. See `predict`."""

    question: str
    guess: object
    unit: str = ""

    def score(self, measured, why: str = "") -> Score:
        """Show the guess beside what was measured, and return the `Score`.

        Args:
          measured: a number, text or bool, like the guess; None or NaN where it could not be measured.
          why: why it was not measured here ("no GPU").

        Raises:
          ValueError: `measured` is of another kind than the guess.
        """
        return Score(*self._judge(display.plain(measured), why))._show()

    def _judge(self, measured, why):
        guess, said, saw = self.guess, self._words(self.guess), self._words(measured)
        if measured is None or measured != measured:
            missing = f"measured here{f' ({why})' if why else ''}."
            return (f"Not {missing}" if guess is None else f"You said {said}; not {missing}",)
        if guess is None:
            return (f"Measured {saw}. You made no guess, so nothing is scored.",)
        if _kind(guess) != _kind(measured):
            raise ValueError(
                f"the guess {guess!r} is {_kind(guess)} and the measured {measured!r} is {_kind(measured)}: "
                "they can't be compared"
            )
        if _kind(measured) != "a number":
            right = _folded(guess) == _folded(measured)
            return (f"You said {said}, and so it is." if right else f"You said {said}; it is {saw}.", right)
        head = f"You said {said}, measured {saw}: "
        if guess == measured:
            return (head + "exactly right.", True, 1.0)
        if guess <= 0 or measured <= 0:  # a ratio says nothing across zero
            return (f"{head}off by {self._words(abs(guess - measured))}.", False)
        factor = max(guess / measured, measured / guess)
        if factor <= _CLOSE:
            return (f"{head}right, within 5%.", True, factor)
        return (f"{head}off by a factor of {display.format_number(factor, 2)}.", False, factor)

    def _words(self, value) -> str:
        return display.format_value(value, self.unit) if _kind(value) == "a number" else display.cell_text(value)

    def _repr_mimebundle_(self, **_):
        said = "Not guessed: write your guess in place of None before you run on. Nothing is scored."
        if self.guess is not None:
            said = f"Your guess: {self._words(self.guess)}"
        page = display.box_html([f"<b>Predict:</b> {_rich(self.question)}", _rich(said)], _NEUTRAL)
        return {"text/html": page, "text/plain": f"Predict: {self.question}\n{said}"}


def predict(question: str, guess, unit: str = "") -> Prediction:
    """Show a question and keep the reader's guess, to be scored by `.score(measured)`.

    Args:
      question: one sentence.
      guess: a number (in `unit`), text or a bool; None means not guessed, and nothing is scored.
      unit: what a number counts: "×", "ms", "MiB".
    """
    return Prediction(question, None if guess is ... else display.plain(guess), unit)._show()


# ---- answers -----------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Answer:
    """What a check says of an exercise.

    `state` is "not tried yet", "right" or "wrong"; `rows` are (what, yours, right), shown for a wrong answer
    together with `hint`.
    """

    name: str
    state: str
    message: str = ""
    rows: tuple = ()
    hint: str = ""

    def _repr_mimebundle_(self, **_):
        mark, colour = _LOOK[self.state]
        head = f"{mark} {self.name}: {self.state}"
        page, text = [f"<b>{_rich(head)}</b>", _rich(self.message)], [head, self.message]
        if self.state == WRONG and self.rows:
            table = display.table_bundle(["", "yours", "right"], self.rows, aligns=["left"] * 3)
            page.append(table["text/html"])
            text.append(table["text/plain"])
        if self.state == WRONG and self.hint:
            page.append(_rich(f"Hint: {self.hint}"))
            text.append(f"Hint: {self.hint}")
        return {"text/html": display.box_html(page, colour), "text/plain": "\n".join(filter(None, text))}

    def __str__(self) -> str:
        return self._repr_mimebundle_()["text/plain"]


def _stub(): ...


def untried(value) -> bool:
    """Whether `value` is what an untouched cell leaves: None, `...`, or a function whose whole body is `...`."""
    if value is None or value is ...:
        return True
    code, stub = getattr(value, "__code__", None), _stub.__code__
    return code is not None and (code.co_code, code.co_consts) == (stub.co_code, stub.co_consts)


def compare(name, yours, right, hint="", *, args=(), what="result", rtol=1e-3, atol=1e-6, unit="") -> Answer:
    """Judge an exercise.

    Args:
      name: the exercise's name.
      yours: the reader's value, or a function, which is called with `args`.
      right: the right value, or a function, called likewise: a number, text, bool, array, tuple or list.
      hint: what helps after a wrong answer.
      what: what the value is, in the words of the exercise.
      rtol, atol: tolerances for numbers and arrays that are not integers.
      unit: what a number counts.

    An error in the reader's function makes the answer wrong, with the error's words; it stops nothing.
    """
    if untried(yours):
        return Answer(name, UNTRIED, "Replace the `...` in the cell above, run it, then run this cell again.")
    if callable(yours):
        function = yours
        try:
            yours = function(*args)
        except Exception as error:
            if "ellipsis" not in str(error).lower():
                return Answer(name, WRONG, "Your code raised an error.", _error_rows(error, function), hint)
            yours = ...
        if untried(yours):
            message = "The function gives nothing yet: replace every `...`, return the result, run both cells again."
            return Answer(name, UNTRIED, message)
    right = right(*args) if callable(right) else right
    rows = _differences(what, yours, right, rtol, atol, unit)
    if rows:
        return Answer(name, WRONG, "", rows, hint)
    return Answer(name, RIGHT, f"{what}: {_brief(right, unit)}")


def over_cases(name, yours, right, hint, cases, what, unit="") -> Answer:
    """One answer for the reader's function on several argument tuples.

    `what` names a case: a format string that takes its arguments. The rest is as for `compare`.
    """
    return together(
        name,
        [compare(name, yours, right, hint, args=case, what=what.format(*case), unit=unit) for case in cases],
    )


def together(name, answers) -> Answer:
    """One answer for several: the first that is not tried or wrong, else right."""
    open_ones = [answer for state in (UNTRIED, WRONG) for answer in answers if answer.state == state]
    if open_ones:
        return dataclasses.replace(open_ones[0], name=name)
    return Answer(name, RIGHT, "\n".join(answer.message for answer in answers if answer.message))


def _error_rows(error, function) -> tuple:
    words = " ".join(str(error).split())
    rows = [("error", f"{type(error).__name__}: {words[:300]}{' …' if len(words) > 300 else ''}", "no error")]
    # The innermost line of the reader's cell; the library's own frames below it say little to them.
    code = getattr(inspect.unwrap(function), "__code__", None)
    own = [f for f in traceback.extract_tb(error.__traceback__) if code and f.filename == code.co_filename]
    if own:
        rows.append(("look at", f"line {own[-1].lineno}: {own[-1].line}", None))
    return tuple(rows)


def _differences(what, yours, right, rtol, atol, unit) -> tuple:
    """Rows (what, yours, right) for what differs; empty if all is right."""
    if np.ndim(right):
        return _array_differences(what, yours, np.asarray(right), rtol, atol)
    yours, right = display.plain(yours), display.plain(right)
    mine, kind = _kind(yours), _kind(right)
    if mine != kind:
        return ((what, f"{_brief(yours, unit)} ({mine})", f"{_brief(right, unit)} ({kind})"),)
    if isinstance(right, float):
        same = np.isclose(yours, right, rtol, atol, equal_nan=True)
    else:
        same = _folded(yours) == _folded(right)
    return () if same else ((what, _brief(yours, unit), _brief(right, unit)),)


def _array_differences(what, yours, right, rtol, atol) -> tuple:
    try:
        values, expected = np.asarray(yours, np.float64), right.astype(np.float64)
    except (TypeError, ValueError):
        return ((what, f"{type(yours).__name__}, no array of numbers", f"an array of shape {right.shape}"),)
    if values.shape != right.shape:
        return ((f"{what}: shape", str(values.shape), str(right.shape)),)
    if right.dtype.kind in "biu":
        rtol = atol = 0  # integers and masks are exact
    close = np.isclose(values, expected, rtol, atol, equal_nan=True)
    if close.all():
        return ()
    rows = [(f"{what}: elements that differ", f"{(~close).sum():,} of {close.size:,}", 0)]
    if np.isnan(values).sum() != np.isnan(expected).sum():
        rows.append((f"{what}: NaN elements", np.isnan(values).sum(), np.isnan(expected).sum()))
    first = np.argwhere(~close)[0]
    rows.append((f"{what}{first.tolist()}", _brief(values[*first]), _brief(expected[*first])))
    return tuple(rows)


def _brief(value, unit="") -> str:
    """A value in a few words, a number with digits enough to see a small difference."""
    value = display.plain(value)
    if _kind(value) == "a number":
        return "NaN" if value != value else display.format_value(value, unit, 6)
    if hasattr(value, "dtype"):
        return f"array of shape {tuple(value.shape)}, {value.dtype}"
    text = display.cell_text(value)
    return text if len(text) <= 120 else text[:120] + " …"
