"""The script of the README runs as it is, and has the right types."""

import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[3]


def script() -> str:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert len(blocks) == 1
    return blocks[0]


def test_it_is_short() -> None:
    assert len(script().strip().splitlines()) <= 15


def test_it_prints_the_answers(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "script.py"
    file.write_text(script())
    found = subprocess.run([sys.executable, str(file)], capture_output=True, text=True, timeout=120)
    assert found.returncode == 0, found.stderr
    assert "81" in found.stdout, found.stdout


def test_its_types_are_right(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "script.py"
    file.write_text(script())
    wrong = tmp_path / "wrong.py"
    wrong.write_text("import deepinfer\ndeepinfer.SamplingParams(temperature='hot')\n")
    mypy = [sys.executable, "-m", "mypy", "--strict", "--cache-dir", str(tmp_path / "cache")]
    found = subprocess.run([*mypy, str(file)], capture_output=True, text=True)
    assert found.returncode == 0, found.stdout + found.stderr
    package = subprocess.run([*mypy, "-p", "deepinfer"], capture_output=True, text=True)
    assert package.returncode == 0, package.stdout + package.stderr
    refused = subprocess.run([*mypy, str(wrong)], capture_output=True, text=True)
    assert refused.returncode == 1 and "temperature" in refused.stdout, refused.stdout
