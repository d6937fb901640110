"""The ledger: every sentence of the course that a number can contradict, a file a notebook.

The saved H200 records are judged by a test, so that no committed sentence contradicts the committed results.
"""

import importlib
import pkgutil

from attnlab import device as _device
from attnlab.claims import FAILS, HOLDS, LEDGER, UNTESTABLE
from attnlab.display import show_table
from attnlab.features import feature
from attnlab.records import LOG, BadRecords, load
from attnlab.tables import saved_elsewhere

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")


def claim(*names: str) -> None:
    """Show claims: the sentence, its verdict here with what was measured, and the verdict on the saved H200 run.

    Raises:
      KeyError: no claim of that name.
    """
    for name in names:
        if name not in LEDGER:
            raise KeyError(f"no claim {name!r}: the ledger has {', '.join(LEDGER)}")
    _show([LEDGER[name] for name in names])


def summary() -> None:
    """Show every claim of this notebook with its verdict."""
    mine = [c for c in LEDGER.values() if c.notebook == LOG.notebook]
    _show(mine, title=f"What you saw, on {_device.current().name}")


def rows(claims, judge) -> list[list[str]]:
    """A row a claim: the sentence with what others say, the verdict that `judge(claim)` gives, what was measured."""
    return [[f"{c.sentence}\n({c.others})" if c.others else c.sentence, *judge(c)] for c in claims]


HEADERS = ["claim", "verdict here", "measured here"]


def _show(claims, title: str | None = None) -> None:
    headers, body = HEADERS, rows(claims, lambda c: c.judge_here())
    if beside := saved_elsewhere():
        verdicts = [c.judge(beside) for c in claims]
        words = [f"{state if state != UNTESTABLE else 'no record'}: {measured}" for state, measured in verdicts]
        headers, body = [*headers, "H200, saved"], [[*row, saved] for row, saved in zip(body, words, strict=True)]
    show_table(headers, body, title=title, aligns=["left"] * len(headers))


def main(results: str | None) -> int:
    """Print the whole ledger over recorded results, a table a notebook, and return the exit status.

    Args:
      results: a place as `attnlab.records.load` takes it; None is the saved H200 run.

    Returns:
      0, or 1 if a claim fails.

    Raises:
      attnlab.records.BadRecords: none at that place that can be read, or those of several devices.
    """
    records = load(results or "nvidia-h200")
    devices = sorted({str(r.env.get("device")) for r in records})
    if len(devices) > 1:
        raise BadRecords(f"{results} holds results of several devices ({', '.join(devices)}): give those of one")
    nothing = _device.Device("", "cpu")  # features have their names on any device
    verdicts = {c.name: c.judge_recorded(records) for c in LEDGER.values()}
    for notebook in sorted({c.notebook for c in LEDGER.values()}):
        mine = [c for c in LEDGER.values() if c.notebook == notebook]
        where = [feature(c.needs, nothing).name if c.needs else "everywhere" for c in mine]
        body = [[*row, there] for row, there in zip(rows(mine, lambda c: verdicts[c.name]), where, strict=True)]
        headers = ["claim", "verdict", "measured", "where testable"]
        show_table(headers, body, title=f"{notebook}, claims", aligns=["left"] * len(headers))
        print()
    states = [v.state for v in verdicts.values()]
    print(
        f"{len(states)} claims over {results or 'nvidia-h200'} ({devices[0]}): {states.count(HOLDS)} hold, "
        f"{states.count(FAILS)} fail, {states.count(UNTESTABLE)} not testable there"
    )
    return 1 if FAILS in states else 0
