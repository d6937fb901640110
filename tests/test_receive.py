"""The course comes into a student's folder: nothing of the student's is lost, nothing comes twice."""

import errno
import hashlib
import io
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tarfile
import tempfile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

DEPLOY = pathlib.Path(__file__).parents[1] / "deploy" / "cloud"
sys.path.insert(0, str(DEPLOY))
import receive  # noqa: E402

NOTEBOOK = "notebooks/03_cudnn.ipynb"


def course(**texts) -> dict:
    """{path: (bytes, executable)} of a course with one notebook, and what is given by `__` for `/`."""
    return {NOTEBOOK: (b"first", False)} | {k.replace("__", "/"): (v.encode(), False) for k, v in texts.items()}


def tree(folder) -> dict[str, bytes]:
    files = [p for p in sorted(pathlib.Path(folder).rglob("*")) if p.is_file() and not p.is_symlink()]
    return {str(p.relative_to(folder)): p.read_bytes() for p in files}


def beside(data: bytes) -> str:
    return f"notebooks/03_cudnn.course-{hashlib.sha256(data).hexdigest()[:8]}.ipynb"


@pytest.fixture
def dest(tmp_path):
    """A folder into which the course came once."""
    receive.deliver(course(), tmp_path / "attention")
    return tmp_path / "attention"


def test_an_unedited_notebook_is_replaced(dest):
    lines = receive.deliver({NOTEBOOK: (b"second", False)}, dest)
    assert (dest / NOTEBOOK).read_bytes() == b"second"
    assert lines == ["0 new, 1 updated, 0 removed, 0 kept as you changed them"]


def test_an_edited_notebook_stays_and_the_new_one_comes_beside_once(dest):
    (dest / NOTEBOOK).write_bytes(b"mine")
    for _ in range(2):
        lines = receive.deliver({NOTEBOOK: (b"second", False)}, dest)
        assert (dest / NOTEBOOK).read_bytes() == b"mine"
        assert sorted(p.name for p in (dest / "notebooks").iterdir()) == [
            "03_cudnn" + beside(b"second")[18:],
            "03_cudnn.ipynb",
        ]
    assert lines == ["0 new, 0 updated, 0 removed, 1 kept as you changed them"]


def test_the_name_beside_is_no_notebook_of_the_course(dest):
    notebook_files = pytest.importorskip("attnlab.notebook_files")
    assert notebook_files.FILE_NAME.fullmatch("03_cudnn")
    assert not notebook_files.FILE_NAME.fullmatch(pathlib.Path(beside(b"second")).stem)


def test_a_run_notebook_gets_nothing_beside_while_the_course_is_the_same(dest):
    (dest / NOTEBOOK).write_bytes(b"with outputs")
    receive.deliver(course(), dest)
    assert set(tree(dest)) == {NOTEBOOK, ".course.json"}


def test_the_lines_name_both_files(dest):
    (dest / NOTEBOOK).write_bytes(b"mine")
    lines = receive.deliver({NOTEBOOK: (b"second", False)}, dest)
    assert f"{NOTEBOOK}: yours stays; the course's new one is {beside(b'second')}" in lines


def test_an_edit_of_the_file_beside_stays_too(dest):
    (dest / NOTEBOOK).write_bytes(b"mine")
    receive.deliver({NOTEBOOK: (b"second", False)}, dest)
    (dest / beside(b"second")).write_bytes(b"mine as well")
    receive.deliver({NOTEBOOK: (b"second", False)}, dest)
    assert (dest / beside(b"second")).read_bytes() == b"mine as well"


def test_a_file_that_was_there_before_the_first_delivery_stays(tmp_path):
    (tmp_path / "README.md").write_text("my notes")
    receive.deliver(course(**{"README.md": "the course"}), tmp_path)
    assert (tmp_path / "README.md").read_text() == "my notes"
    assert len(list(tmp_path.glob("README.course-*.md"))) == 1


def test_a_deleted_notebook_comes_back(dest):
    (dest / NOTEBOOK).unlink()
    receive.deliver(course(), dest)
    assert (dest / NOTEBOOK).read_bytes() == b"first"


def test_what_the_course_no_longer_has_goes_only_if_unedited(dest):
    receive.deliver(course(src__old__a="a", src__b="b"), dest)
    (dest / "src/b").write_text("mine")
    lines = receive.deliver(course(), dest)
    assert not (dest / "src/old").exists() and (dest / "src/b").read_text() == "mine"
    assert lines == [
        "0 new, 0 updated, 1 removed, 0 kept as you changed them",
        "src/b: no longer in the course; yours stays",
    ]


@pytest.mark.parametrize(
    "path", ["../a", "/a", "a/../../b", "a//b", "./a", "", ".course.json", ".course-new/0", "a\0b"]
)
def test_a_path_that_leads_elsewhere_is_refused(path, dest):
    before = tree(dest.parent)
    with pytest.raises(receive.Problem, match="no path for a file of the course"):
        receive.deliver(course(**{path: "evil"}), dest)
    assert tree(dest.parent) == before


def test_a_manifest_that_names_files_elsewhere_removes_nothing(dest):
    (dest.parent / "precious").write_bytes(b"first")
    known = json.loads((dest / ".course.json").read_text())
    (dest / ".course.json").write_text(json.dumps(known | {"../precious": known[NOTEBOOK]}))
    receive.deliver(course(), dest)
    assert (dest.parent / "precious").exists()


def test_a_folder_of_the_student_that_is_a_link_is_not_followed(dest):
    elsewhere = dest.parent / "elsewhere"
    shutil.move(dest / "notebooks", elsewhere)
    (dest / "notebooks").symlink_to(elsewhere)
    lines = receive.deliver({NOTEBOOK: (b"second", False)}, dest)
    assert (elsewhere / "03_cudnn.ipynb").read_bytes() == b"first"
    assert "stands where its folder belongs" in lines[1]


def test_a_file_of_the_student_that_is_a_link_stays(dest):
    (dest / NOTEBOOK).unlink()
    (dest / NOTEBOOK).symlink_to(dest.parent / "nowhere")
    receive.deliver({NOTEBOOK: (b"second", False)}, dest)
    assert (dest / NOTEBOOK).is_symlink() and not (dest.parent / "nowhere").exists()
    assert (dest / beside(b"second")).read_bytes() == b"second"


def test_a_folder_where_a_file_belongs_stays(dest):
    (dest / NOTEBOOK).unlink()
    (dest / NOTEBOOK).mkdir()
    receive.deliver({NOTEBOOK: (b"second", False)}, dest)
    assert (dest / NOTEBOOK).is_dir() and (dest / beside(b"second")).exists()


def test_files_are_readable_and_programs_can_be_executed(dest):
    receive.deliver({"src/run": (b"#!", True), "src/data": (b"", False)}, dest)
    assert [oct((dest / name).stat().st_mode & 0o777) for name in ("src/run", "src/data")] == ["0o755", "0o644"]


def test_a_full_disk_changes_nothing_and_says_so(dest, monkeypatch):
    before, real = tree(dest), os.fchmod

    def fchmod(handle, mode, left=[2]):  # noqa: B006
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(handle, mode)

    monkeypatch.setattr(os, "fchmod", fchmod)
    with pytest.raises(receive.Problem, match="No space left on device; nothing has changed"):
        receive.deliver(course(**{NOTEBOOK: "second", "a": "1", "b": "2"}), dest)
    assert tree(dest) == before


def test_a_delivery_that_was_killed_is_finished_by_the_next(dest, monkeypatch):
    new = {NOTEBOOK: (b"second", False), "src/a": (b"1", False)}
    with monkeypatch.context() as patch:
        patch.setattr(
            os, "makedirs", lambda *a, **k: (_ for _ in ()).throw(KeyboardInterrupt) if "src" in str(a[0]) else None
        )
        patch.setattr(receive, "discard", lambda staging: None)
        with pytest.raises(KeyboardInterrupt):
            receive.deliver(new, dest)
    assert (dest / ".course-new").exists()
    receive.deliver(new, dest)
    assert set(tree(dest)) == {NOTEBOOK, "src/a", ".course.json"} and not (dest / ".course-new").exists()


def test_what_the_student_saves_while_the_course_comes_stays(dest, monkeypatch):
    real = receive.write_manifest

    def save(*given):
        real(*given)
        (dest / NOTEBOOK).write_bytes(b"saved just now")

    monkeypatch.setattr(receive, "write_manifest", save)
    lines = receive.deliver({NOTEBOOK: (b"second", False)}, dest)
    assert (dest / NOTEBOOK).read_bytes() == b"saved just now"
    assert f"{NOTEBOOK}: changed while the course came; send again" in lines
    monkeypatch.undo()
    receive.deliver({NOTEBOOK: (b"second", False)}, dest)
    assert (dest / NOTEBOOK).read_bytes() == b"saved just now" and (dest / beside(b"second")).exists()


def test_two_deliveries_at_once_are_one_too_many(dest):
    with receive.one_at_a_time(dest), pytest.raises(receive.Problem, match="another delivery"):
        receive.deliver(course(), dest)


# ---- a student does anything, in any order

PATHS = [NOTEBOOK, "README.md", "src/a.py"]
COURSES = st.dictionaries(st.sampled_from(PATHS), st.sampled_from([b"course 1", b"course 2"]), min_size=1)
DEEDS = st.lists(st.tuples(st.sampled_from(["edit", "delete", "make"]), st.integers(0, 9)), max_size=4)


@settings(deadline=None, max_examples=150)
@given(st.lists(st.tuples(DEEDS, COURSES), min_size=1, max_size=5))
def test_no_bytes_of_a_student_are_lost_and_sending_twice_is_sending_once(days):
    with tempfile.TemporaryDirectory() as folder:
        for deeds, files in days:
            for deed, n in deeds:
                there = sorted(tree(folder)) or PATHS
                place = pathlib.Path(
                    folder, (PATHS if deed == "make" else there)[n % len(PATHS if deed == "make" else there)]
                )
                if deed == "delete":
                    place.unlink(missing_ok=True)
                else:
                    place.parent.mkdir(exist_ok=True)
                    place.write_bytes(b"mine %d" % n)
            mine = {path: data for path, data in tree(folder).items() if data.startswith(b"mine")}
            mine.pop(".course.json", None)  # garbled by the student: written anew
            receive.deliver({path: (data, False) for path, data in files.items()}, folder)
            once = tree(folder)
            assert mine.items() <= once.items()
            # What the course has is there for the student, as its own file or beside, unless it was there before.
            assert all(path in once for path in files)
            lines = receive.deliver({path: (data, False) for path, data in files.items()}, folder)
            assert tree(folder) == once
            assert lines[0].startswith("0 new, 0 updated, 0 removed")


# ---- the command


def receive_command(*words, send=b""):
    command = [sys.executable, "-I", str(DEPLOY / "receive.py"), *map(str, words)]
    return subprocess.run(command, input=send, capture_output=True)


def tar_of(*members) -> bytes:
    whole = io.BytesIO()
    with tarfile.open(fileobj=whole, mode="w:gz") as tar:
        for member, data in members:
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return whole.getvalue()


def test_from_a_folder_comes_the_course_and_nothing_else(tmp_path):
    source, secrets = (
        tmp_path / "course",
        ["terraform/a.tf", "deploy/x.tfvars", ".venv/x", "src/__pycache__/a.pyc", "build/x"],
    )
    for path in ["README.md", "notebooks/00.ipynb", "deploy/base/jupyter.yaml", *secrets]:
        (source / path).parent.mkdir(parents=True, exist_ok=True)
        (source / path).write_text(path)
    (source / "deploy/jupyter.yaml").symlink_to("base/jupyter.yaml")
    done = receive_command(source, tmp_path / "dest")
    assert done.returncode == 0, done.stderr
    found = {"README.md", "notebooks/00.ipynb", "deploy/base/jupyter.yaml", "deploy/jupyter.yaml", ".course.json"}
    assert set(tree(tmp_path / "dest")) == found  # the link has become a file
    assert done.stdout.decode().splitlines()[-1] == f"the course is in {tmp_path / 'dest'}"


def test_a_link_out_of_the_course_is_refused(tmp_path):
    (tmp_path / "course/src").mkdir(parents=True)
    (tmp_path / "course/src/a").symlink_to("/etc/hostname")
    done = receive_command(tmp_path / "course", tmp_path / "dest")
    assert done.returncode == 1 and b"src/a is a link out of" in done.stderr


def test_an_empty_folder_is_no_course(tmp_path):
    done = receive_command(tmp_path / "nothing", tmp_path / "dest")
    assert (done.returncode, done.stderr) == (1, b"receive: there is no course in what was given\n")


@pytest.mark.parametrize("keep, flip", [(0, 0), (-1, 0), (None, 1)])
def test_a_broken_stream_writes_nothing(keep, flip, tmp_path):
    data = tar_of((tarfile.TarInfo("src/a"), os.urandom(5000)))
    sent = bytearray(data[:keep] if keep is not None else data)
    if flip:
        sent[len(sent) // 2] ^= 1
    done = receive_command("-", tmp_path / "dest", len(data), hashlib.sha256(data).hexdigest(), send=bytes(sent))
    assert done.returncode == 3 and b"the stream broke" in done.stderr
    assert not (tmp_path / "dest").exists()


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE])
def test_a_link_in_the_stream_is_refused(kind, tmp_path):
    member = tarfile.TarInfo("src/a")
    member.type, member.linkname = kind, "/etc/passwd"
    data = tar_of((member, b""))
    done = receive_command("-", tmp_path / "dest", len(data), hashlib.sha256(data).hexdigest(), send=data)
    assert done.returncode == 1 and b"a link or a device" in done.stderr


def test_a_wrong_call_is_status_2(tmp_path):
    assert receive_command(tmp_path).returncode == 2
