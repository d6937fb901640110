"""What a claim is: a sentence that a number can contradict, with the check that decides it.

A claim is judged over records. It holds, it fails, or it is not testable here, and then it says why. The
sentences themselves stand in `attnlab.ledger`, a file a notebook.
"""

import collections
import dataclasses
import math
import re
from collections.abc import Callable

from attnlab.device import Device
from attnlab.display import format_number
from attnlab.features import OTHERS, RULES, feature, has
from attnlab.records import LOG, MissingRecord, Records, Timing

HOLDS, FAILS, UNTESTABLE = "holds", "fails", "not testable here"

Verdict = collections.namedtuple("Verdict", ["state", "measured"])


@dataclasses.dataclass(frozen=True)
class Claim:
    """`check(records)` returns (bool, what was measured); `needs` is the feature without which nobody can tell."""

    name: str
    notebook: str
    sentence: str
    check: Callable
    needs: str | None = None
    others: str = ""  # who says otherwise, and what

    def judge(self, records: Records) -> Verdict:
        """The verdict over `records`; missing records make it untestable, never false.

        A row without a time, NaN for example, counts as missing.
        """
        mine = records.find(notebook=self.notebook)
        broken = {_row(r) for r in mine.latest() if isinstance(r, Timing) and not has_time(r)}
        try:
            # With its earlier timings: a time from before the cell ran again must not decide in its place.
            ok, measured = self.check(Records(r for r in mine if not (isinstance(r, Timing) and _row(r) in broken)))
        except MissingRecord as e:
            without = f"; without a time: {', '.join(sorted({row[0] for row in broken}))}" if broken else ""
            return Verdict(UNTESTABLE, f"{e}{without}")
        except Exception as e:  # records of another kind than it expects: the other claims still have their say
            return Verdict(UNTESTABLE, f"its check stopped with {type(e).__name__}: {e}")
        return Verdict(HOLDS if ok else FAILS, measured)

    def judge_recorded(self, records: Records) -> Verdict:
        """The verdict over the records of another process; what their device can't run is not testable there.

        Only what their environment says of the device is asked, not the libraries of this process.
        """
        env = records[0].env if records else {}
        if self.needs and env.get("kind", "gpu") != "gpu":
            return Verdict(UNTESTABLE, f"its results are of no NVIDIA GPU but of {env.get('device')}")
        if self.needs in RULES and "capability" in env:
            found = feature(self.needs, _recorded_gpu(env))
            if not found.ok:
                return Verdict(UNTESTABLE, found.reason)
        return self.judge(records)

    def judge_here(self) -> Verdict:
        """The verdict over this process's log."""
        if self.needs and not has(self.needs):
            return Verdict(UNTESTABLE, feature(self.needs).reason)
        return self.judge(LOG.records)


def _recorded_gpu(env: dict) -> Device:
    capability, cudnn = ([int(x) for x in re.findall(r"\d+", str(env.get(key)))] for key in ("capability", "cudnn"))
    number = sum(n * size for n, size in zip(cudnn, (10000, 100, 1), strict=False))
    return Device(str(env.get("device")), "gpu", tuple(capability), cudnn=number)


LEDGER: dict[str, Claim] = {}


def claims_of(notebook: str):
    """The decorator that enters a check into the ledger, as a claim of `notebook`.

    It takes the claim's name, its sentence, the feature it `needs`, and what `others` say. Raises `ValueError`
    for a name that is taken or a feature that is none.
    """

    def claim(name: str, sentence: str, needs: str | None = None, others: str = ""):
        def enter(check):
            if name in LEDGER:
                raise ValueError(f"two claims are called {name!r}")
            if needs and needs not in RULES and needs not in OTHERS:
                raise ValueError(f"claim {name!r} needs {needs!r}, which is no feature")
            LEDGER[name] = Claim(name, notebook, sentence, check, needs, others)
            return check

        return enter

    return claim


def has_time(row: Timing) -> bool:
    """Whether the row's times are numbers that a clock can show: not NaN, infinite, zero or less."""
    return all(isinstance(x, (int, float)) and math.isfinite(x) and x > 0 for x in (row.ms, row.wall_ms))


def _row(r) -> tuple:
    return r.label, r.shape, r.dtype, r.mask, r.table


def on_device(row: Timing) -> Timing:
    """`row`, if its times and kernels are the device's own. Raises `MissingRecord`."""
    if row.clock != "cupti":
        raise MissingRecord(f"the device's own clock was not to be had ({row.clock}; {row.note})")
    return row


def times(ratio: float) -> str:
    """A ratio as text: "3.1×"."""
    return f"{format_number(ratio, 2)}×"
