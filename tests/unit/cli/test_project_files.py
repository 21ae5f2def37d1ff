"""Proves that pages and project files cannot drift from the code they describe."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from osaurus.cli import app

ROOT = Path(__file__).resolve().parents[3]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
TEXT_FILES = sorted(
    path
    for pattern in ("*.md", "docs/**/*.md", "scripts/*", ".ci/run", "pyproject.toml", "src/**/*.py")
    for path in ROOT.glob(pattern)
    if path.is_file()
)
#: Sources that comments may cite; an index to install from is the machine's affair.
CITED_HOSTS = {"github.com", "huggingface.co", "arxiv.org", "platform.openai.com"}


def _package_names(requirements: list[str]) -> set[str]:
    return {re.split(r"[\[>=;<]", requirement)[0].strip() for requirement in requirements}


def _imported_by_the_package() -> set[str]:
    """Top-level names of every import under src/, those inside functions too."""
    names: set[str] = set()
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names.update(alias.name.partition(".")[0] for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names.add(node.module.partition(".")[0])
    return names


def test_every_core_dependency_is_imported_and_every_import_is_declared() -> None:
    declared = {name.replace("-", "_").lower() for name in _package_names(PROJECT["dependencies"])}
    imported = _imported_by_the_package() - sys.stdlib_module_names - {"osaurus"}
    assert declared - imported == set()
    assert imported - declared - {"transformers", "triton", "pynvml"} == set()


def test_every_dependency_has_its_line_on_the_page() -> None:
    page = (ROOT / "docs/dependencies.md").read_text()
    declared = _package_names(PROJECT["dependencies"])
    for extra in PROJECT["optional-dependencies"].values():
        declared |= _package_names(extra)
    explained = set(re.findall(r"^\| ([a-z0-9-]+) \| [^|]+ \| [^|]+ \|$", page, re.MULTILINE))
    assert explained - {"package", "hatchling"} == declared - {"osaurus"}


def test_requirements_are_floors() -> None:
    extras = PROJECT["optional-dependencies"].values()
    for requirement in [*PROJECT["dependencies"], *(name for extra in extras for name in extra)]:
        assert re.fullmatch(r"osaurus\[test\]|[\w\[\]-]+>=[\d.]+(; .*)?", requirement)


def test_the_readme_names_every_verb_that_works_without_explanation() -> None:
    readme = (ROOT / "README.md").read_text()
    mentioned = set(re.findall(r"\bosaurus ([a-z]+)\b", readme))
    verbs = {verb.name if isinstance(verb.name, str) else verb.name[0] for verb in app.VERBS}
    assert {"run", "serve", "list", "pull", "bench", "doctor"} <= mentioned & verbs


def test_the_readmes_two_commands_exist_and_can_be_run() -> None:
    readme = (ROOT / "README.md").read_text()
    for script in ("./scripts/run", "./scripts/test"):
        assert f"    {script}" in readme
        assert (ROOT / script).stat().st_mode & 0o111


def test_links_between_pages_lead_somewhere() -> None:
    for page in [ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").rglob("*.md")]:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_every_package_of_the_tree_is_on_the_map() -> None:
    page = (ROOT / "docs/architecture.md").read_text()
    rooms = {path.parent.name for path in (ROOT / "src/osaurus").glob("*/__init__.py")}
    assert {room for room in rooms if f"{room}/" not in page} == set()


@pytest.mark.parametrize("path", TEXT_FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_file_names_a_host_to_install_from(path: Path) -> None:
    hosts = set(re.findall(r"https?://([\w.-]+)", path.read_text()))
    assert {host for host in hosts if not host.startswith(("127.", "localhost"))} <= CITED_HOSTS


def test_imports_go_down_only() -> None:
    """The contract in pyproject.toml, as scripts/lint checks it."""
    linter = Path(sys.executable).with_name("lint-imports")
    if not linter.exists():
        pytest.skip("import-linter comes with the extra `dev`")
    done = subprocess.run(
        [linter, "--no-cache"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout
