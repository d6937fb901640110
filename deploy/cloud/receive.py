"""Bring the course into a folder where a student works, and never over the student's work.

`receive.py SOURCE DEST` takes the course from a folder (the class image does). `receive.py - DEST BYTES SHA256` takes
it as a tar from standard input, which can break on its way into a pod: exit status 3, and nothing was written. A
refusal or a full disk is status 1, in one line.

DEST/.course.json holds the hash of each file as it was last delivered. By it, a file of the course
- that is not there is written, also when the student deleted it: who lost a notebook gets it back;
- that is as it was delivered is replaced;
- that the student changed (or made) stays. The course's comes beside it, if it is new to the student, under a name with
  its hash: `03_cudnn.course-1a2b3c4d.ipynb`. Sent again, it does not come a second time;
- that the course no longer has is removed if it is as it was delivered, and stays if the student changed it.
A link that the student made is never followed.

Standard library only. commands.py, which an older Python starts, imports `read_folder`.
"""

import contextlib
import fcntl
import hashlib
import io
import json
import os
import shutil
import sys
import tarfile

PARTS = ("LICENSE", "Makefile", "README.md", "deploy", "notebooks", "pyproject.toml", "src", "tests")
NOT_COURSE = ("build", "__pycache__")
SECRET_OR_MADE = (".egg-info", ".tfstate", ".tfvars", ".pem", ".key")
MANIFEST, STAGING = ".course.json", ".course-new"
ABSENT, NO_FILE, BLOCKED = "", "no plain file", "behind a link or a file"


class Problem(Exception):
    """What is wrong, what was found and what to do, in one line."""


class BrokenStream(Problem):
    """Not what was sent has arrived: worth another try."""


# ---- the course, as {path: (bytes, may it be executed)}


def read_folder(source, wanted=None):
    """The files of the course in a folder; `wanted`, if given, are the only paths of interest.

    A link to a file inside the folder is read as that file; a link to a folder is passed over. Raises `Problem` for a
    link that leads out of the folder.
    """
    source, files = os.path.realpath(source), {}
    for folder, folders, names in os.walk(source):
        here = "" if folder == source else os.path.relpath(folder, source) + "/"
        keep = [n for n in folders + names if (n in PARTS if not here else is_course(n))]
        folders[:] = [n for n in folders if n in keep]
        for path in [here + n for n in names if n in keep and (wanted is None or here + n in wanted)]:
            real = os.path.realpath(os.path.join(source, path))
            if not real.startswith(os.path.join(source, "")):
                raise Problem(f"{path} is a link out of {source}: put a file in its place")
            if os.path.isfile(real):  # a link to nothing, a pipe: not the course
                with open(real, "rb") as file:
                    files[path] = file.read(), os.access(real, os.X_OK)
    return files


def is_course(name):
    return not name.startswith(".") and name not in NOT_COURSE and not name.endswith(SECRET_OR_MADE)


def read_stream(stream, size, wanted):
    """The files in a tar of `size` bytes with the SHA-256 `wanted`; not a byte more is read.

    Raises `BrokenStream` when something else arrives, `Problem` for a tar that holds more than plain files.
    """
    data, files = stream.read(size), {}
    if len(data) != size or digest(data) != wanted:
        raise BrokenStream(f"the stream broke ({len(data):,} of {size:,} bytes came): nothing was written, send again")
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        for member in tar:
            if not member.isreg():
                raise Problem(f"{member.name!r} is sent as a link or a device: nothing was written")
            files[member.name] = tar.extractfile(member).read(), bool(member.mode & 0o100)
    return files


def digest(data):
    return hashlib.sha256(data).hexdigest()


def stays_inside(path):
    """Whether a path names a file in the course's folder, and none that belongs to the delivery itself."""
    parts = path.split("/")
    return not {"", ".", ".."} & set(parts) and parts[0] not in (MANIFEST, STAGING) and "\0" not in path


# ---- the folder where it goes


def state_of(dest, path):
    """The hash of what stands at a path; else ABSENT, NO_FILE (a link, a folder) or BLOCKED (in no real folder)."""
    *folders, name = path.split("/")
    for folder in folders:
        dest = os.path.join(dest, folder)
        if os.path.islink(dest) or os.path.exists(dest) and not os.path.isdir(dest):
            return BLOCKED
    place = os.path.join(dest, name)
    if not os.path.lexists(place):
        return ABSENT
    if os.path.islink(place) or not os.path.isfile(place):
        return NO_FILE
    try:
        with open(place, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return NO_FILE


def read_manifest(dest):
    """{path: hash as delivered}; {} where there is none that makes sense, so that all that differs is kept."""
    try:
        with open(os.path.join(dest, MANIFEST), encoding="utf-8") as file:
            found = json.load(file)
        return {path: str(given) for path, given in found.items() if stays_inside(path)}
    except (OSError, ValueError, AttributeError):
        return {}


def beside(path, new):
    stem, end = os.path.splitext(path)
    return f"{stem}.course-{new[:8]}{end}"


@contextlib.contextmanager
def one_at_a_time(dest):
    handle = os.open(dest, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        raise Problem(f"another delivery into {dest} is running: wait for it, then send again") from None
    finally:
        os.close(handle)


def deliver(files, dest):
    """Bring {path: (bytes, executable)} into a folder; return what was done, as lines for a person.

    All that is new is written into a folder beside first and moved from there, so that a full disk stops it before
    anything has changed. Raises `Problem`, `OSError`.
    """
    bad = [path for path in files if not stays_inside(path) or any(p in files for p in parents(path))]
    if bad or not files:
        raise Problem(
            f"{bad[0]!r} is no path for a file of the course" if bad else "there is no course in what was given"
        )
    os.makedirs(dest, exist_ok=True)
    with one_at_a_time(dest):
        return merge(files, os.path.realpath(dest))


def parents(path):
    parts = path.split("/")
    return ["/".join(parts[:n]) for n in range(1, len(parts))]


def merge(files, dest):
    before = read_manifest(dest)
    manifest, moves, kept, lines = {}, [], 0, []
    for path, (data, executable) in sorted(files.items()):
        new, here = digest(data), state_of(dest, path)
        if here == BLOCKED:
            lines.append(f"{path}: not brought, a link or a file of yours stands where its folder belongs")
            continue
        manifest[path], target = new, path
        if here not in (new, ABSENT, before.get(path)):
            kept += 1
            target = beside(path, new)
            if before.get(path) == new or state_of(dest, target) != ABSENT:
                continue
            lines.append(f"{path}: yours stays; the course's new one is {target}")
            here = ABSENT
        if here != new:
            moves.append((target, data, executable, here))
    gone = [path for path in before if path not in files]
    done = move(moves, gone, before, manifest, dest)
    counts = [sum(there == ABSENT for *_, there in moves), sum(there != ABSENT for *_, there in moves)]
    stays = [path for path in gone if state_of(dest, path) != ABSENT]
    lines += [f"{path}: no longer in the course; yours stays" for path in stays] + done
    lines.insert(
        0, f"{counts[0]} new, {counts[1]} updated, {len(gone) - len(stays)} removed, {kept} kept as you changed them"
    )
    return lines


def move(moves, gone, before, manifest, dest):
    """Write what `merge` planned, in two steps; return a line for each file that changed in between."""
    staging, lines, done = os.path.join(dest, STAGING), [], False
    discard(staging)
    os.mkdir(staging)
    try:
        for number, (_, data, executable, _) in enumerate(moves):
            with open(os.path.join(staging, str(number)), "wb") as file:
                file.write(data)
                os.fchmod(file.fileno(), 0o755 if executable else 0o644)
        write_manifest(staging, manifest)
        done = True
        for number, (path, _, _, there) in enumerate(moves):
            if state_of(dest, path) != there:  # the student saved it while this ran
                lines.append(f"{path}: changed while the course came; send again")
                if path in manifest:  # and not the name beside
                    manifest[path] = before.get(path, "never delivered")
                write_manifest(staging, manifest)
                continue
            os.makedirs(os.path.dirname(os.path.join(dest, path)), exist_ok=True)
            os.replace(os.path.join(staging, str(number)), os.path.join(dest, path))
        for path in gone:
            if state_of(dest, path) == before[path]:
                os.remove(os.path.join(dest, path))
                with contextlib.suppress(OSError):  # a folder that holds something stays
                    os.removedirs(os.path.dirname(os.path.join(dest, path)))
        os.replace(os.path.join(staging, MANIFEST), os.path.join(dest, MANIFEST))
    except OSError as error:
        state = "some files are new already, none of yours has changed" if done else "nothing has changed"
        raise Problem(f"{dest}: {error.strerror}; {state}. Make room or free the place, then send again") from error
    finally:
        discard(staging)
    return lines


def write_manifest(folder, manifest):
    with open(os.path.join(folder, MANIFEST), "w", encoding="utf-8") as file:
        json.dump(manifest, file, indent=0, sort_keys=True)


def discard(staging):
    if os.path.islink(staging) or os.path.isfile(staging):
        os.remove(staging)
    elif os.path.exists(staging):
        shutil.rmtree(staging)


def main(argv):
    try:
        if len(argv) == 2 and argv[0] != "-":
            files = read_folder(argv[0])
        elif len(argv) == 4 and argv[0] == "-" and argv[2].isdigit():
            files = read_stream(sys.stdin.buffer, int(argv[2]), argv[3])
        else:
            print("usage: receive.py SOURCE DEST, or receive.py - DEST BYTES SHA256", file=sys.stderr)
            return 2
        os.umask(0o022)
        print(*deliver(files, argv[1]), f"the course is in {argv[1]}", sep="\n")
    except BrokenStream as problem:
        print(f"receive: {problem}", file=sys.stderr)
        return 3
    except Problem as problem:
        print(f"receive: {problem}", file=sys.stderr)
        return 1
    except (OSError, tarfile.TarError) as error:
        print(f"receive: {error}: mend that, then send again", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
