"""What `attnlab doctor` asks of a machine: each check with a machine that passes and one that does not."""

import json
import os
import pathlib
import re
import stat
import sys
import tomllib

import pytest

from attnlab import cli, device, doctor, features

ROOT = pathlib.Path(__file__).parents[1]


def check(name):
    (found,) = [c for c in doctor.checks() if c.name == name]
    return found


def plugin(folder, monkeypatch, major):
    """A distribution as JAX's CUDA plugin installs it."""
    info = folder / f"jax_cuda{major}_plugin-0.9.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: jax-cuda{major}-plugin\nVersion: 0.9.2\n")
    monkeypatch.syspath_prepend(folder)


def driver(monkeypatch, words):
    monkeypatch.setattr(device, "nvidia_smi", lambda *arguments: words)


def test_modules_are_what_run_needs():
    names = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    needed = {re.split("[<>=]", name)[0] for name in names} - {"jupyterlab", "nbval"}  # as in deploy/make_env.py
    assert {module.lower() for module in doctor.MODULES} == needed


def test_all_modules_are_here():
    assert check("modules").ok


def test_a_module_that_is_not_there_is_named(monkeypatch):
    monkeypatch.setattr(doctor, "MODULES", (*doctor.MODULES, "no_such_module"))
    found = check("modules")
    assert not found.ok and found.reason == "not there: no_such_module" and "init container" in found.todo


@pytest.mark.parametrize("body, words", [("import no_such_thing", "no_such_thing"), ("raise OSError('gone')", "gone")])
def test_a_module_that_does_not_import_is_named_with_its_reason(tmp_path, monkeypatch, body, words):
    (tmp_path / "breaks_here.py").write_text(body)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(doctor, "MODULES", ("breaks_here",))
    found = check("modules")
    assert not found.ok and "import fails: breaks_here" in found.reason and words in found.reason


@pytest.mark.parametrize(
    "offered, built, ok",
    [("CUDA Version: 13.0", 13, True), ("CUDA Version: 12.8", 13, False), ("CUDA UMD Version: 13.3", 12, True)],
)
def test_the_driver_must_offer_the_cuda_of_jax(tmp_path, monkeypatch, offered, built, ok):
    plugin(tmp_path, monkeypatch, built)
    driver(monkeypatch, ["| NVIDIA-SMI 580.65   Driver Version: 580.65   " + offered + " |"])
    found = check("driver against CUDA")
    assert found.ok == ok, found
    assert offered.split()[-1] in found.reason and f"built for CUDA {built}" in found.reason
    assert ok or "gpu_driver_version LATEST" in found.todo


@pytest.mark.parametrize(
    "gpus, built, platforms, ok, words",
    [
        (["GPU 0: NVIDIA L4"], 13, "", False, "nvidia-smi sees a GPU but JAX does not use it"),
        (None, 13, "", False, "JAX is built for CUDA 13, and nvidia-smi finds no GPU"),
        (None, None, "", True, "none is expected"),
        (["GPU 0: NVIDIA L4"], 13, "cpu", True, "JAX_PLATFORMS=cpu"),
    ],
)
def test_a_gpu_that_jax_does_not_use_is_red(tmp_path, monkeypatch, gpus, built, platforms, ok, words):
    monkeypatch.setattr(doctor.metadata, "distributions", lambda: [])
    if built:
        monkeypatch.setattr(doctor, "_cuda_of_jax", lambda: built)
    monkeypatch.setenv("JAX_PLATFORMS", platforms)
    monkeypatch.setattr(device, "current", lambda: device.Device("a CPU", "cpu", None, 1, live=True))
    driver(monkeypatch, gpus)
    found = check("JAX uses the GPU")
    assert found.ok == ok and words in found.reason
    assert ok or found.todo


def test_a_driver_without_words_is_red(tmp_path, monkeypatch):
    plugin(tmp_path, monkeypatch, 13)
    driver(monkeypatch, ["NVIDIA-SMI has failed"])
    assert not check("driver against CUDA").ok


def test_a_jax_without_cuda_beside_a_driver_is_red(monkeypatch):
    monkeypatch.setattr(doctor.metadata, "distributions", lambda: [])
    driver(monkeypatch, ["CUDA Version: 13.0"])
    found = check("driver against CUDA")
    assert not found.ok and "no CUDA plugin" in found.reason


def test_a_machine_without_a_driver_has_nothing_to_compare(monkeypatch):
    driver(monkeypatch, None)
    assert check("driver against CUDA").ok


@pytest.mark.parametrize("ok", [True, False])
def test_cupti_is_asked_for_as_this_user(monkeypatch, ok):
    clock = features.Feature("CUPTI, the device clock", ok, "counted one kernel" if ok else "ERR_NVGPUCTRPERM", "")
    monkeypatch.setattr(device, "current", lambda: device.Device("NVIDIA Test", "gpu", (8, 9), 1, live=False))
    gpu = features.Feature("NVIDIA GPU", True, "NVIDIA Test")
    monkeypatch.setattr(doctor, "feature", lambda key: {"cupti": clock, "gpu": gpu}[key])
    found = check("CUPTI, the device clock")
    assert found.ok == ok and found.reason.endswith(f"as user {os.getuid()}")


def test_a_place_that_can_not_be_written_is_named(tmp_path, monkeypatch):
    blocked = tmp_path / "blocked"
    blocked.write_text("a file, where a folder should be")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert check("places to write").ok
    monkeypatch.setattr(doctor, "_unwritable", lambda path: "read-only file system" if path == str(tmp_path) else "")
    found = check("places to write")
    assert not found.ok and f"home ({tmp_path}): read-only file system" in found.reason


def test_writing_is_really_tried(tmp_path):
    assert doctor._unwritable(str(tmp_path)) == ""
    assert doctor._unwritable(str(tmp_path / "not" / "yet")) == ""
    assert not any(tmp_path.iterdir())
    if os.getuid():
        tmp_path.chmod(stat.S_IRUSR | stat.S_IXUSR)
        assert doctor._unwritable(str(tmp_path)) == "permission denied"
    else:  # root may write everywhere but in /proc
        assert doctor._unwritable("/proc")


def test_a_full_place_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(doctor, "ROOM", 2**70)
    assert re.fullmatch(r"only [\d.]+ \w+ free", doctor._unwritable(str(tmp_path)))


def test_the_command_fails_when_a_check_does(monkeypatch, capsys):
    assert cli.main(["doctor"]) == 0
    assert f"Is this machine ready, for user {os.getuid()}?" in capsys.readouterr().out
    monkeypatch.setattr(doctor, "MODULES", ("no_such_module",))
    assert cli.main(["doctor"]) == 1
    assert "not there: no_such_module" in capsys.readouterr().out
    assert cli.main(["doctor", "--json"]) == 0  # its reader judges
    known = json.loads(capsys.readouterr().out)
    assert [c["ok"] for c in known["checks"] if c["name"] == "modules"] == [False]


def test_python_of_the_tests_is_the_one_that_is_checked():
    assert json.loads(doctor.line())["python"] == ".".join(map(str, sys.version_info[:3]))
