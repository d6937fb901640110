"""Predictions scored against the measurement, and exercises answered at once: yours beside the right one."""

import dataclasses
import dis
import inspect
import linecache
import math
import numbers
import os
import re
import sysconfig
import traceback

from attnlab import display

_CLOSE = 1.05  # a guess within 5% counts as right: the clock's own spread is of that size


# ---- predictions -------------------------------------------------------------------------------------------


def _rich(text: str) -> str:
    """Text as HTML; what stands between backticks is code."""
    return re.sub("`([^`]+)`", r"<code>\1</code>", display.to_html(text))


class _Shown:
    """An object that was shown when it was made, and is not shown twice when it ends its cell."""

    def _show(self) -> None:
        display.show(self._repr_mimebundle_())
        object.__setattr__(self, "_shown_in", _execution())

    def _ipython_display_(self) -> None:
        if getattr(self, "_shown_in", None) != _execution():
            self._show()

    def __str__(self) -> str:
        return self._repr_mimebundle_()["text/plain"]


def _execution():
    shell = display.shell()
    return shell.execution_count if shell is not None else None


@dataclasses.dataclass(frozen=True)
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


@dataclasses.dataclass(frozen=True)
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
        score = Score(*self._judge(_plain(measured), why))
        score._show()
        return score

    def _judge(self, measured, why):
        said = None if self.guess is None else self._words(self.guess)
        if measured is None or (isinstance(measured, float) and math.isnan(measured)):
            missing = f"not measured here{f' ({why})' if why else ''}"
            return (f"You said {said}; {missing}." if said else f"{missing[0].upper()}{missing[1:]}.",)
        if _kind(measured) is None:
            raise ValueError(
                f"measured is {measured!r} ({type(measured).__name__}): give a number, text, a bool or None"
            )
        saw = self._words(measured)
        if said is None:
            return (f"Measured {saw}. You made no guess, so nothing is scored.",)
        if _kind(self.guess) != _kind(measured):
            raise ValueError(
                f"the guess {self.guess!r} is {_kind(self.guess)} and the measured "
                f"{measured!r} is {_kind(measured)}: they can't be compared"
            )
        if _kind(measured) != "a number":
            right = _folded(self.guess) == _folded(measured)
            return (f"You said {said}, and so it is." if right else f"You said {said}; it is {saw}.", right)
        head = f"You said {said}, measured {saw}: "
        if self.guess == measured:
            return (head + "exactly right.", True, 1.0)
        if self.guess <= 0 or measured <= 0 or math.isinf(measured):
            # A ratio says nothing across zero.
            difference = display.format_value(abs(self.guess - measured), self.unit)
            return (f"{head}off by {difference}.", False)
        factor = max(self.guess / measured, measured / self.guess)
        if factor <= _CLOSE:
            return (f"{head}right, within 5%.", True, factor)
        return (f"{head}off by a factor of {display.format_number(factor, 2)}.", False, factor)

    def _words(self, value) -> str:
        return display.format_value(value, self.unit) if _kind(value) == "a number" else display.cell_text(value)

    def _repr_mimebundle_(self, **_):
        if self.guess is None:
            said = "Not guessed: write your guess in place of None before you run on. Nothing is scored."
        else:
            said = f"Your guess: {self._words(self.guess)}"
        parts = [f"<b>Predict:</b> {_rich(self.question)}", _rich(said)]
        return {
            "text/html": display.box_html(parts, _NEUTRAL),
            "text/plain": f"Predict: {self.question}\n{said}",
        }


def predict(question: str, guess, unit: str = "") -> Prediction:
    """Show a question and keep the reader's guess, to be scored by `.score(measured)`.

    Args:
      question: one sentence.
      guess: a number (in `unit`), text or a bool; None means not guessed, and nothing is scored.
      unit: what a number counts: "×", "ms", "MiB".

    Raises:
      ValueError: a guess of another kind, NaN or infinity.
    """
    guess = _plain(guess)
    if guess is ...:
        guess = None
    if not isinstance(question, str) or not question.strip():
        raise ValueError(f"the question must be a sentence; given {question!r}")
    if guess is not None and _kind(guess) is None:
        raise ValueError(
            f"a guess is a number, text, True or False, or None for no guess; given {guess!r} ({type(guess).__name__})"
        )
    if isinstance(guess, float) and not math.isfinite(guess):
        raise ValueError(f"a guess must be a finite number; given {guess!r}")
    prediction = Prediction(question.strip(), guess, unit)
    prediction._show()
    return prediction


def _kind(value) -> str | None:
    if isinstance(value, bool):
        return "a bool"
    if isinstance(value, numbers.Real):
        return "a number"
    return "text" if isinstance(value, str) else None


def _folded(value):
    return " ".join(value.casefold().split()) if isinstance(value, str) else value


def _plain(value):
    """An array of no dimensions as the Python value in it."""
    return value.item() if _is_array(value) and value.shape == () else value


def _is_array(value) -> bool:
    """Dtypes and scalar classes have a shape attribute too, and are no arrays."""
    return hasattr(value, "__array__") and hasattr(value, "shape") and not isinstance(value, type)


# ---- answers -----------------------------------------------------------------------------------------------

UNTRIED, RIGHT, WRONG = "not tried yet", "right", "wrong"
_RIGHT, _WRONG, _NEUTRAL = "#009e73", "#d55e00", "#808080"  # Okabe-Ito; 3:1 or better on white and on #111111
_LOOK = {UNTRIED: ("○", _NEUTRAL), RIGHT: ("✓", _RIGHT), WRONG: ("✗", _WRONG)}


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

    def __post_init__(self):
        if self.state not in _LOOK:
            raise ValueError(f"unknown state {self.state!r}: choose from {', '.join(map(repr, _LOOK))}")
        object.__setattr__(self, "rows", tuple(tuple(row) for row in self.rows))

    def _repr_mimebundle_(self, **_):
        mark, colour = _LOOK[self.state]
        head = f"{mark} {self.name}: {self.state}"
        table = hint = None
        if self.state == WRONG:
            table = display.table_bundle(["", "yours", "right"], self.rows, aligns="left") if self.rows else None
            hint = self.hint and f"Hint: {self.hint}"
        page = [
            f"<b>{_rich(head)}</b>",
            _rich(self.message),
            table and table["text/html"],
            hint and _rich(hint),
        ]
        plain = [head, self.message, table and table["text/plain"], hint]
        return {
            "text/html": display.box_html(page, colour),
            "text/plain": "\n".join(part for part in plain if part),
        }

    def __str__(self) -> str:
        return self._repr_mimebundle_()["text/plain"]


def untried(value) -> bool:
    """Whether `value` is what an untouched stub leaves.

    That is `...`, None, or a function that does nothing, or that still returns or assigns a bare `...`. A
    function is read and not called, because its arguments are not known here.
    """
    if value is None or value is ...:
        return True
    code = getattr(inspect.unwrap(value), "__code__", None) if callable(value) else None
    return code is not None and (_does_nothing(code) or _keeps_a_gap(code))


def _does_nothing(code) -> bool:
    for instruction in dis.get_instructions(code):
        if instruction.opname not in (
            "RESUME",
            "NOP",
            "POP_TOP",
            "LOAD_CONST",
            "RETURN_CONST",
            "RETURN_VALUE",
        ):
            return False
        if "CONST" in instruction.opname and instruction.argval not in (None, ...):
            return False
    return True


def _keeps_a_gap(code) -> bool:
    """Whether `x = ...` or `return ...` stands in the function; `x[..., 0]` is fair use of it."""
    instructions = list(dis.get_instructions(code))
    for one, after in zip(instructions, [*instructions[1:], None], strict=True):
        if "CONST" in one.opname and one.argval is ...:
            ends = one.opname if after is None or one.opname.startswith("RETURN") else after.opname
            if ends.startswith(("RETURN", "STORE_FAST", "STORE_DEREF", "STORE_NAME", "STORE_GLOBAL")):
                return True
    return any(_keeps_a_gap(inner) for inner in code.co_consts if inspect.iscode(inner))


def compare(name, yours, right, hint="", *, args=(), what="result", rtol=1e-3, atol=1e-6, unit="") -> Answer:
    """Judge an exercise.

    Args:
      name: the exercise's name.
      yours: the reader's value, or a function, which is called with `args`.
      right: the right value, or a function, called likewise: a number, text, bool, array, shape, dtype, or a
        tuple or list of these.
      hint: what helps after a wrong answer.
      what: what the value is, in the words of the exercise.
      rtol, atol: tolerances for numbers and arrays that are not integers.
      unit: what a number counts.

    An error in the reader's function makes the answer wrong, with the error's words; it stops nothing.
    """
    if untried(yours):
        return _untried(name)
    if callable(yours) and not isinstance(yours, type):
        try:
            yours = yours(*args)
        except Exception as error:
            if "ellipsis" in str(error).lower():
                return _untried(name, "A `...` is still in the function: replace it, and run both cells again.")
            return Answer(name, WRONG, "Your code raised an error.", _error_rows(error), hint)
        if untried(yours):
            return _untried(name, f"Your function returns {'`...`' if yours is ... else yours!r}: replace the `...`.")
    if callable(right) and not isinstance(right, type):
        right = right(*args)
    if _is_sequence(yours) and any(item is ... for item in yours):
        return _untried(name, "A `...` is still among the values: replace it, and run both cells again.")
    rows = _differences(what, yours, right, rtol, atol, unit)
    if rows:
        return Answer(name, WRONG, "", rows, hint)
    return Answer(name, RIGHT, f"{what}: {_brief(right, unit)}")


def together(name, answers) -> Answer:
    """One answer for several: the first that is not tried or wrong, else right."""
    answers = list(answers)
    if not answers:
        raise ValueError(f"{name}: no answers to put together")
    for state in (UNTRIED, WRONG):
        for answer in answers:
            if answer.state == state:
                return dataclasses.replace(answer, name=name)
    return Answer(name, RIGHT, "\n".join(answer.message for answer in answers if answer.message))


def _untried(name, message="Replace the `...` in the cell above, run it, then run this cell again.") -> Answer:
    return Answer(name, UNTRIED, message)


def _error_rows(error) -> tuple:
    words = " ".join(str(error).split())
    rows = [("error", f"{type(error).__name__}: {words[:300]}{' …' if len(words) > 300 else ''}", "no error")]
    libraries, own = (
        (os.path.dirname(os.path.abspath(__file__)), sysconfig.get_path("stdlib"), "<frozen"),
        None,
    )
    for frame, line in traceback.walk_tb(error.__traceback__):
        file = frame.f_code.co_filename
        # The innermost line that the reader wrote; the library's own frames below it say little to them.
        if not (file.startswith(libraries) or "site-packages" in file or "dist-packages" in file):
            own = (file, line)
    if own:
        source = linecache.getline(*own).strip()
        rows.append(("look at", f"line {own[1]}" + (f": {source}" if source else ""), None))
    return tuple(rows)


def _differences(what, yours, right, rtol, atol, unit) -> tuple:
    """Rows (what, yours, right) for what differs; empty if all is right."""
    if _is_sequence(right) and any(_is_array(item) or _is_sequence(item) for item in right):
        if not _is_sequence(yours):
            return ((what, f"one {type(yours).__name__}", f"{len(right)} values"),)
        if len(yours) != len(right):
            return ((f"{what}: how many", len(yours), len(right)),)
        return tuple(
            row
            for i, (y, r) in enumerate(zip(yours, right, strict=True))
            for row in _differences(f"{what}[{i}]", y, r, rtol, atol, unit)
        )
    if _is_sequence(right):
        if not _is_sequence(yours):
            return ((what, _brief(yours, unit), str(tuple(right))),)
        same = len(yours) == len(right) and all(
            not _differences(what, y, r, rtol, atol, unit) for y, r in zip(yours, right, strict=True)
        )
        return () if same else ((what, str(tuple(yours)), str(tuple(right))),)
    if _is_array(right) and right.shape != ():
        return _array_differences(what, yours, right, rtol, atol)
    right, yours = _plain(right), _plain(yours)
    kind = _kind(right)
    if kind is None:  # dtypes and the like: whatever Python says is equal, or is written the same
        same = not _is_array(yours) and (yours == right or _dtype_name(yours) == _dtype_name(right))
        return () if same else ((what, _brief(yours, unit), _brief(right, unit)),)
    if kind == "text" and _kind(yours) is None and not _is_array(yours):
        yours = _dtype_name(yours)  # jnp.float32 where "float32" is asked for
    if _kind(yours) != kind:
        given = _brief(yours, unit)
        return ((what, f"{given} ({_kind(yours) or type(yours).__name__})", f"{_brief(right, unit)} ({kind})"),)
    if kind != "a number":
        same = _folded(yours) == _folded(right)
    elif isinstance(right, numbers.Integral):
        same = yours == right
    elif not math.isfinite(right):
        same = yours == right or (math.isnan(right) and math.isnan(yours))
    else:
        same = abs(yours - right) <= atol + rtol * abs(right)
    return () if same else ((what, _brief(yours, unit), _brief(right, unit)),)


def _array_differences(what, yours, right, rtol, atol) -> tuple:
    import numpy as np

    right = np.asarray(right)
    try:
        given = np.asarray(yours)
        values = given.astype(np.float64)
    except Exception as error:  # a ragged list, a tracer, an array given away or never computed
        words = f"{type(yours).__name__}, which does not give numbers ({type(error).__name__})"
        return ((what, words, f"an array of shape {right.shape}"),)
    if given.shape != right.shape:
        return ((f"{what}: shape", str(given.shape), str(right.shape)),)
    exact = right.dtype == bool or np.issubdtype(right.dtype, np.integer)
    expected = right.astype(np.float64)
    close = values == expected if exact else np.isclose(values, expected, rtol=rtol, atol=atol, equal_nan=True)
    if close.all():
        return ()
    rows = [
        (
            f"{what}: elements that differ",
            f"{display.format_count(int((~close).sum()))} of {display.format_count(close.size)}",
            0,
        )
    ]
    for name, test in (("NaN", np.isnan), ("infinite", np.isinf)):
        if test(values).sum() != test(expected).sum():
            rows.append((f"{what}: {name} elements", int(test(values).sum()), int(test(expected).sum())))
    with np.errstate(invalid="ignore"):  # ∞ − ∞
        gap = np.where(close, -1.0, np.nan_to_num(np.abs(values - expected), nan=np.inf))
    worst = tuple(int(i) for i in np.unravel_index(gap.argmax(), gap.shape))
    rows.append((f"{what}{list(worst)}", _digits(values[worst]), _digits(expected[worst])))
    return tuple(rows)


def _digits(value) -> str:
    """A number with digits enough to see a small difference."""
    return "NaN" if math.isnan(value) else display.format_number(float(value), 6)


def _is_sequence(value) -> bool:
    return isinstance(value, (tuple, list))


def _dtype_name(value) -> str:
    """ "float32" for np.float32, jnp.float32, a dtype object and the word."""
    import numpy as np

    try:
        return np.dtype(value).name
    except TypeError:
        return str(value)


def _brief(value, unit="") -> str:
    """A value in a few words."""
    value = _plain(value)
    if _kind(value) == "a number":
        if isinstance(value, float) and math.isnan(value):
            return "NaN"
        return display.format_value(value, unit, 6)
    if _is_array(value):
        return f"array of shape {tuple(value.shape)}, {value.dtype}"
    if _is_sequence(value) and any(_is_array(item) for item in value):
        return f"{len(value)} arrays"
    if isinstance(value, type):
        return value.__name__
    text = display.cell_text(value)
    return text if len(text) <= 120 else text[:120] + " …"
