"""Files that are whole or untouched: room before the work, one writer at a time, all written or none."""

import contextlib
import fcntl
import os
import pathlib
import shutil
import signal
import sys

NEW, OLD = ".attnlab-new", ".attnlab-old"  # ends of the names that `write_all` uses for a moment
SPARE = 2**20  # bytes that must be free beyond what is written


class CanNotWrite(OSError):
    """A place that takes no file; the message names it and says what to do."""


def require_room(folder, size: int) -> None:
    """Refuse a folder that will not take `size` bytes, before minutes are spent on what goes there.

    Raises `CanNotWrite`: it can't be made, is read-only, or has too little room.
    """
    folder = pathlib.Path(folder)
    there = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    if not there.is_dir():
        raise CanNotWrite(f"{folder} is no folder, or lies in a file: name another")
    if not os.access(there, os.W_OK):
        raise CanNotWrite(f"{there} is read-only for you: name a folder that takes files")
    free = shutil.disk_usage(there).free
    if free < size + SPARE:
        raise CanNotWrite(
            f"{there} has {free:,} bytes free, and {size + SPARE:,} may be needed: "
            "free some, or name a folder on another disk"
        )


@contextlib.contextmanager
def only_one(folder):
    """Hold the lock of a folder. Raises `BlockingIOError` where another process holds it."""
    handle = os.open(folder, os.O_RDONLY)  # no lock file: the system lets go when this process ends, however
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise
        except OSError as e:
            print(f"note: {folder} takes no lock ({e.strerror}): start no second run", file=sys.stderr)
        yield
    finally:
        os.close(handle)


def write_all(texts: dict) -> None:
    """Write {path: text}, all or none: each beside its place first, then all are moved there.

    Raises `OSError` with the old files as they were.
    """
    new, old = {}, {}
    try:
        for path, text in texts.items():
            path = pathlib.Path(path).resolve()  # what a link points at, not the link, is replaced
            path.parent.mkdir(parents=True, exist_ok=True)
            new[path] = path.with_name(f".{path.name}.{os.getpid()}{NEW}")
            with new[path].open("w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            if path.exists():
                old[path] = path.with_name(f".{path.name}.{os.getpid()}{OLD}")
                shutil.copy2(path, old[path])
                shutil.copymode(path, new[path])
        moved = []
        try:
            for path in new:
                moved.append(path)
                new[path].replace(path)
        except BaseException:  # Ctrl-C too
            for path in moved:
                if path in old:
                    old[path].replace(path)
                elif not new[path].exists():
                    path.unlink()
            raise
    finally:
        for beside in (*new.values(), *old.values()):
            beside.unlink(missing_ok=True)


def remove_left_over(*folders) -> None:
    """Remove what a killed `write_all` left beside its files; only while nobody else writes there."""
    for path in (p for folder in folders for end in (NEW, OLD) for p in pathlib.Path(folder).glob(f".*{end}")):
        path.unlink(missing_ok=True)


@contextlib.contextmanager
def uninterrupted():
    """Hold Ctrl-C back until the block has ended; then it comes as ever, as a `KeyboardInterrupt`."""
    held = []
    try:
        handler = signal.signal(signal.SIGINT, lambda *_: held.append(True))
    except ValueError:  # not the main thread, where Ctrl-C does not come
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
    if held:
        raise KeyboardInterrupt
