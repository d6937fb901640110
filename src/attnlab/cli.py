"""The command line `attnlab`: what can run here, run the course, collect its results.

Heavy imports stand inside the commands, so that help and refusals come at once.
"""

import argparse
import pathlib
import re
import sys


class _Parser(argparse.ArgumentParser):
    def error(self, message):
        self.exit(2, f"{self.prog}: {message}. Help: {self.prog} --help\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="attnlab", description="A course on attention on NVIDIA GPUs with JAX.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    doctor = commands.add_parser("doctor", help="say what can run here, and what to do about what can't")
    doctor.add_argument("--json", action="store_true", help="print JSON instead of a table")
    doctor.set_defaults(call=_doctor)

    run = commands.add_parser("run", help="execute the course and write a page a notebook and an index")
    run.add_argument("notebook", nargs="*", metavar="NOTEBOOK", help="a number (02), a name or a path; all by default")
    run.add_argument(
        "-p", dest="settings", action="append", default=[], metavar="NAME=VALUE",
        help="a notebook parameter; VALUE is a Python literal, or else a string; may be repeated",
    )  # fmt: skip
    run.add_argument("--out", default="build", metavar="DIR", help="where everything goes (default: build)")
    run.add_argument("--notebooks", default="notebooks", metavar="DIR", help="the course (default: notebooks)")
    run.set_defaults(call=_run)

    report = commands.add_parser("report", help="put the results of a run into one file, to send to an instructor")
    report.add_argument(
        "--results",
        default="build/results",
        metavar="DIR",
        help="the records of a run (default: build/results)",
    )
    report.add_argument("--out", metavar="FILE", help="the file (default: attnlab-report-DEVICE.jsonl)")
    report.set_defaults(call=_report)

    bench = commands.add_parser("bench", help="measure what the benchmark costs, and check it by Nsight Compute")
    bench.set_defaults(call=_bench)

    saved = commands.add_parser("saved", help="print the recorded H200 timings")
    saved.add_argument("notebook", nargs="?", default="", metavar="NOTEBOOK", help="a number (03); all by default")
    saved.set_defaults(call=_saved)
    return parser


def main(argv=None) -> int:
    """Run one command and return its exit status: 0, 1 (it failed), 2 (wrong usage), 130 (Ctrl-C)."""
    argv = sys.argv[1:] if argv is None else list(argv)
    args = _parser().parse_args(argv)
    from attnlab.course import BadRequest
    from attnlab.notebook_files import NotebookError

    try:
        return args.call(args)
    except BadRequest as e:
        return _fail(e, 2)
    except (NotebookError, _CommandError) as e:
        return _fail(e, 1)
    except BrokenPipeError:  # the reader of our output, `head` say, has seen enough
        sys.stdout = None
        return 1
    except OSError as e:
        return _fail(f"{e.strerror or e}: {e.filename}" if e.filename else e, 1)
    except KeyboardInterrupt:
        return _fail("stopped", 130)


class _CommandError(Exception):
    """A command that can't do its work; the message is the line for the person."""


def _fail(message, status: int) -> int:
    print(f"attnlab: {' '.join(str(message).split())}", file=sys.stderr)
    return status


def _run(args) -> int:
    from attnlab import course
    from attnlab.notebook_files import course_notebooks

    everything = course_notebooks(args.notebooks)
    chosen = course.choose(everything, args.notebook)
    parameters = course.parse_parameters(args.settings, chosen)
    return course.run(chosen, args.out, parameters, course=everything)


# --- doctor


def _doctor(args) -> int:
    from attnlab import device
    from attnlab.features import features
    from attnlab.tables import show_device, show_features

    try:
        env = device.environment()
    except device.DeviceNotFound as e:
        raise _CommandError(str(e)) from e
    if args.json:
        import dataclasses
        import json

        rows = {key: dataclasses.asdict(f) for key, f in features().items()}
        print(json.dumps({"environment": env, "features": rows}, indent=1))
        return 0
    show_device()
    show_features()
    return 0


def _bench(args) -> int:
    from attnlab import bench, device

    try:
        return bench.main()
    except device.DeviceNotFound as e:
        raise _CommandError(str(e)) from e


def _saved(args) -> int:
    from attnlab.tables import show_saved

    try:
        show_saved(args.notebook)
    except LookupError as e:
        raise _CommandError(str(e)) from e
    return 0


# --- report


def _report(args) -> int:
    import json

    from attnlab import records

    folder = pathlib.Path(args.results)
    paths = sorted(folder.glob("*.jsonl")) if folder.is_dir() else []
    try:
        found = {path.stem: records.Records.read(path) for path in paths}
    except ValueError as e:
        raise _CommandError(str(e)) from e
    if not any(found.values()):
        raise _CommandError(f"no records in {folder}: run the course first (make run), or give --results DIR")
    environments = []
    for record in (r for rs in found.values() for r in rs):
        if record.env not in environments:
            environments.append(record.env)
    devices = sorted({str(env.get("device", "unknown")) for env in environments})
    if len(devices) > 1:
        raise _CommandError(
            f"{folder} holds records of {len(devices)} devices ({', '.join(devices)}): "
            "a report is of one. Run the whole course again (make run)."
        )
    counts = {name: len(rs) for name, rs in found.items()}
    header = {
        "schema": records.SCHEMA,
        "kind": "Report",
        "env": environments[-1],
        "environments": len(environments),
        "notebooks": counts,
    }
    slug = re.sub(r"[^a-z0-9]+", "-", devices[0].lower()).strip("-") or "unknown"
    out = pathlib.Path(args.out or f"attnlab-report-{slug}.jsonl")
    lines = [json.dumps(header), *(records.to_json(r) for rs in found.values() for r in rs)]
    out.write_text("\n".join(lines) + "\n", encoding="utf-8")

    print(f"{out}: {sum(counts.values())} records of {devices[0]}")
    print("  " + ", ".join(f"{name} {n}" for name, n in counts.items()))
    if len(environments) > 1:
        print(f"  note: of {len(environments)} environments: library versions differ between notebooks")
    for name, state in _last_run(folder.parent / "run.json").items():
        if state.get("status") != "done":
            print(f"  note: {name} did not finish: {state.get('status')} in cell {state.get('cell')}")
        elif not counts.get(name):
            print(f"  note: {name} made no records")
    return 0


def _last_run(path: pathlib.Path) -> dict:
    import json

    try:
        state = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return state if isinstance(state, dict) else {}


if __name__ == "__main__":
    sys.exit(main())
