"""The command line `attnlab`: what can run here, run the course, collect its results.

Heavy imports stand inside the commands, so that help and refusals come at once.
"""

import argparse
import os
import pathlib
import signal
import sys

CLOSED = 141  # what shells report for a program whose reader went away


class _Parser(argparse.ArgumentParser):
    def error(self, message):
        self.exit(2, f"{self.prog}: {message}. Help: {self.prog} --help\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="attnlab", description="A course on attention on NVIDIA GPUs with JAX.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(call, help):
        new = commands.add_parser(call.__name__, help=help)
        new.set_defaults(call=call)
        return new

    def of_notebooks(call, help, out=None):
        new = command(call, help)
        new.add_argument(
            "notebook", nargs="*", metavar="NOTEBOOK", help="a number (02), a name or a path; all by default"
        )
        new.add_argument("--notebooks", default="notebooks", metavar="DIR", help="the course (default: notebooks)")
        if out:
            new.add_argument("--out", default=out, metavar="DIR", help=f"where everything goes (default: {out})")
        return new

    def with_parameters(new):
        new.add_argument(
            "-p", dest="settings", action="append", default=[], metavar="NAME=VALUE",
            help="a notebook parameter; VALUE is a Python literal, or else a string; may be repeated",
        )  # fmt: skip
        return new

    new = command(doctor, "say what can run here, and what to do about what can't")
    new.add_argument("--json", action="store_true", help="as one line of JSON, for programs")

    with_parameters(of_notebooks(run, "execute the course and write a page a notebook and an index", out="build"))

    new = with_parameters(of_notebooks(regenerate, "execute the course, and put its outputs and records in place"))
    new.add_argument("--out", metavar="DIR", help="write notebooks and records there instead")
    new.add_argument(
        "--cell-seconds", type=int, default=600, metavar="N", help="the time limit of one cell (default: 600)"
    )
    new.add_argument("--dry-run", action="store_true", help="only say what would be done")

    new = command(compare, "say what changed between two sets of results (like diff: 0 nothing, 1 something)")
    new.add_argument(
        "results", nargs="*", metavar="RESULTS",
        help="OLD NEW …: a file or a folder of records, or the name of saved ones; "
        "by default the saved ones and build/results",
    )  # fmt: skip

    new = command(claims, "print every claim of the course with its verdict over recorded results")
    new.add_argument("results", nargs="?", metavar="RESULTS", help="as for compare (default: the saved ones)")

    of_notebooks(validate, "run the notebooks and compare with their committed outputs, by nbval", out="build/validate")
    of_notebooks(site, "make a static site of the executed notebooks", out="build/site")

    new = command(preclass, "check the machines of a class: doctor and the first notebook on each")
    new.add_argument("host", nargs="*", metavar="HOST", help="what ssh takes, such as student@host1")
    new.add_argument("--pods", metavar="SELECTOR", help="the pods with this label instead, by kubectl")
    new.add_argument("--namespace", metavar="NAME", help="of the pods (default: kubectl's)")
    new.add_argument(
        "--folder", default="", metavar="DIR", help="where the course lies there (default: where it is found)"
    )

    new = command(report, "put the results of a run into one file, to send to an instructor")
    new.add_argument(
        "--results", default="build/results", metavar="DIR", help="the records of a run (default: build/results)"
    )
    new.add_argument("--out", metavar="FILE", help="the file (default: attnlab-report-DEVICE.jsonl)")

    command(clock, "measure what the benchmark costs, and check it by Nsight Compute")
    of_notebooks(bench, "time the course cold and warm: each notebook and its slowest cells", out="build/bench")

    new = command(saved, "print the recorded H200 timings")
    new.add_argument("notebook", nargs="?", default="", metavar="NOTEBOOK", help="a number (03); all by default")
    new.add_argument("--figure", metavar="FILE", help="draw the sweep over lengths into this PNG instead")
    return parser


def main(argv=None) -> int:
    """Run one command and return its exit status: 0, 1 (it failed), 2 (it can't be done as asked), 130 (Ctrl-C)."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal that can't show "µ" shows "?"
    if argv is None:  # the command itself: what ends it otherwise, such as a lost connection, is as clean as Ctrl-C
        for name in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # SIGINT too: a background shell ignores it
            signal.signal(name, signal.default_int_handler)
    args = _parser().parse_args(argv)
    from attnlab.course import BadRequest
    from attnlab.notebook_files import NotebookError
    from attnlab.records import BadRecords

    try:
        status = args.call(args)
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # `attnlab claims | head`: the reader has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more as it ends
        return CLOSED
    except (BadRequest, BadRecords) as e:
        return _fail(e, 2)
    except (NotebookError, _CommandError) as e:
        return _fail(e, 1)
    except ImportError as e:
        return _fail(f"{e}: this Python is incomplete. Remove .venv (rm -r .venv) and run make again", 1)
    except OSError as e:
        return _fail(f"{e.strerror or e}: {e.filename}" if e.filename else e, 1)
    except KeyboardInterrupt:
        return _fail("stopped", 130)


class _CommandError(Exception):
    """A command that can't do its work; the message is the line for the person."""


def _fail(message, status: int) -> int:
    print(f"attnlab: {' '.join(str(message).split())}", file=sys.stderr)
    return status


def _need_device() -> None:
    from attnlab import device

    try:
        device.current()
    except device.DeviceNotFound as e:
        raise _CommandError(e) from e


# --- the commands


def doctor(args) -> int:
    from attnlab import doctor

    _need_device()
    if args.json:
        print(doctor.line())
        return 0
    return doctor.main()


def _notebooks(args):
    """(all notebooks of the course, those that were asked for)"""
    from attnlab.course import choose
    from attnlab.notebook_files import course_notebooks

    everything = course_notebooks(args.notebooks)
    return everything, choose(everything, args.notebook)


def run(args) -> int:
    from attnlab import course

    everything, chosen = _notebooks(args)
    return course.run(chosen, args.out, course.parse_parameters(args.settings, chosen), course=everything)


def regenerate(args) -> int:
    from attnlab import course, regenerate

    _, chosen = _notebooks(args)
    parameters = course.parse_parameters(args.settings, chosen)
    return regenerate.regenerate(chosen, parameters, args.out, args.cell_seconds, args.dry_run)


def compare(args) -> int:
    from attnlab import changes

    return changes.main(args.results)


def claims(args) -> int:
    from attnlab import ledger

    return ledger.main(args.results)


def validate(args) -> int:
    from attnlab import validation

    return validation.main(_notebooks(args)[1], args.out)


def site(args) -> int:
    from attnlab import site

    return site.main(_notebooks(args)[1], args.out)


def preclass(args) -> int:
    from attnlab import preclass

    return preclass.main(args.host, args.pods, args.namespace, args.folder)


def clock(args) -> int:
    from attnlab import clock

    _need_device()
    return clock.main()


def bench(args) -> int:
    from attnlab import bench

    return bench.main(_notebooks(args)[1], args.out)


def saved(args) -> int:
    from attnlab.curves import save_length_figure
    from attnlab.tables import show_saved

    try:
        if args.figure:
            print(save_length_figure(args.figure))
        else:
            show_saved(args.notebook)
    except LookupError as e:
        raise _CommandError(e) from e
    return 0


def report(args) -> int:
    from attnlab import course
    from attnlab.records import Records
    from attnlab.regenerate import slug

    folder = pathlib.Path(args.results)
    found = {path.stem: Records.read(path) for path in sorted(folder.glob("*.jsonl"))}
    records = Records(record for of_one in found.values() for record in of_one)
    if not records:
        raise _CommandError(f"no records in {folder}: run the course first (make run), or give --results DIR")
    devices = sorted({str(record.env.get("device", "unknown")) for record in records})
    if len(devices) > 1:
        raise _CommandError(
            f"{folder} holds records of {len(devices)} devices ({', '.join(devices)}): "
            "a report is of one. Run the whole course again (make run)."
        )
    out = args.out or f"attnlab-report-{slug(devices[0])}.jsonl"
    records.write(out)

    print(f"{out}: {len(records)} records of {devices[0]}")
    print("  " + ", ".join(f"{name} {len(of_one)}" for name, of_one in found.items()))
    for name, outcome in course.last_run(folder.parent).items():
        if outcome.status != "done":
            print(f"  note: {name} {outcome.status} {outcome.where}")
        elif not found.get(name):
            print(f"  note: {name} made no records")
    return 0
