"""What README says is what the repository prints and holds."""

import pathlib
import re

from PIL import Image

from attnlab import curves, records, tables
from attnlab.notebook_files import course_notebooks

ROOT = pathlib.Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_table_is_what_the_command_prints(capsys):
    tables.show_saved("03")
    printed = capsys.readouterr().out
    block = re.search(r"<!-- saved: 03_cudnn, first timing -->\n```\n(.+?)```", README, re.DOTALL)[1]
    assert block.startswith("03_cudnn, first timing (NVIDIA H200")
    assert len(block.splitlines()) == 6
    assert block in printed


def test_the_figure_is_what_the_command_draws(tmp_path):
    path, command = re.search(r"!\[[^]]+\]\((src/[^)]+\.png)\)\n\n`make saved (.+?)`", README).groups()
    assert command == 'ARGS="05 --figure FILE"'
    words = curves.save_length_figure(tmp_path / "again.png")
    assert (
        Image.open(ROOT / path).text["Description"] == Image.open(tmp_path / "again.png").text["Description"] == words
    )
    assert "16384" in words and "NVIDIA H200" in words and words.count("cuDNN, bfloat16") == 1


def test_the_course_map_is_the_notebooks():
    rows = re.findall(r"^\| \[(\w+)\]\(notebooks/(\w+)\.ipynb\) \| (\d+) \|", README, re.MULTILINE)
    assert rows == [(nb.name, nb.name, str(nb.minutes)) for nb in course_notebooks(ROOT / "notebooks")]


def test_the_two_commands_stand_at_the_top():
    first = README.split("```")[1].split()
    assert first[:2] == ["make", "run"]
    assert first[first.index("test") - 1] == "make"


def test_what_it_says_of_the_recorded_run_is_true():
    envs = {(r.env["device"], r.env["kind"]) for r in records.saved()}
    assert envs == {("NVIDIA H200", "gpu")}


def test_the_costs_are_those_of_terraforms_note():
    text = (ROOT / "terraform" / "outputs.tf").read_text(encoding="utf-8")
    price = {name: float(value) for name, value in re.findall(r"(\w+) = (\d+\.\d+)", text)}
    machine = re.search(
        r'"machine_type" \{.*?default +=\s*"([\w-]+)"', (ROOT / "terraform/variables.tf").read_text(), re.S
    )
    always = f"{price['system_node'] + price['cluster']:.2f}"
    node = f"{price['l4'] + price['g2_vcpu'] * int(machine[1].split('-')[-1]):.2f}"
    words = " ".join(README.split())
    assert f"the cluster fee cost USD {always} an hour" in words and f"a GPU node costs USD {node} an hour" in words
    said = re.search(r"(\d+) × (\d+) × ([\d.]+) \+ (\d+) × ([\d.]+) = USD ([\d.]+)", words)
    students, hours, *rest, total = map(float, said.groups())
    assert rest == [float(node), hours, float(always)]
    assert f"{students * hours * rest[0] + hours * rest[2]:.2f}" == said[6]
