"""The README tells the truth: its snippet runs, its commands parse, links and paths exist. (CI runs the examples.)"""

import ast
import re
import shlex
from pathlib import Path

import jax
import pytest

from oomb_jax.train.__main__ import parse
from oomb_jax.train.config import TrainConfig

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^    python -m oomb_jax\.train (--.*)$", README, re.MULTILINE)
PAGES = [
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "docs/method.md",
    "docs/your-model.md",
    "docs/compare.md",
    "docs/top-k.md",
    "docs/plan.md",
]


def without_docstring(path):
    source = path.read_text(encoding="utf-8")
    first = ast.parse(source).body[0]
    return "\n".join(source.splitlines()[first.end_lineno :]).strip()


def test_snippet_of_the_readme_is_the_example_and_learns():
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert code.strip() == without_docstring(ROOT / "examples" / "value_and_grad.py")
    printed = []
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        exec(compile(code, "README.md", "exec"), {"print": printed.append})
    losses = [float(line.removeprefix("loss ")) for line in printed]
    assert len(losses) == 10
    assert losses[-1] < losses[0] - 1


def test_the_readme_has_commands():
    assert len(COMMANDS) >= 5


@pytest.mark.parametrize("command", [command for command in COMMANDS if "--help" not in command])
def test_commands_of_the_readme_parse(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    saved = Path("runs/books/settings.json")
    saved.parent.mkdir(parents=True)
    TrainConfig(model="tiny", ctx=999).save(saved)
    settings = parse(shlex.split(command))
    assert (settings.ctx == 999) == ("--config" in command)


@pytest.mark.parametrize("page", PAGES)
def test_links_between_pages_exist(page):
    source = (ROOT / page).read_text(encoding="utf-8")
    links = re.findall(r"\]\(([^)]+)\)", source)
    here = [link for link in links if not link.startswith("http")]
    missing = [link for link in here if not _exists((ROOT / page).parent, page, link)]
    assert not missing


def test_layout_of_the_readme_exists():
    layout = README.split("## Layout")[1].split("## ")[0]
    inside = re.findall(r"^      (\S+)", layout, re.MULTILINE)
    assert len(inside) > 8
    assert not [name for name in inside if not (ROOT / "oomb_jax" / name).exists()]
    modules = {path.name for path in (ROOT / "oomb_jax").glob("*.py")} - {"__init__.py"}
    assert modules <= set(inside)


def _exists(folder, page, link):
    path, _, anchor = link.partition("#")
    target = folder / path if path else ROOT / page
    if not target.exists():
        return False
    if not anchor:
        return True
    headings = re.findall(r"^#+ (.*)$", target.read_text(encoding="utf-8"), re.MULTILINE)
    return anchor in {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
