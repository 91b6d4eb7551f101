"""The projects that documents spell out, file by file, do what the documents say."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.django.databases import database
from tests.docs.project import FENCE, FILE, Project, is_project

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])


@pytest.mark.parametrize("kind", ["postgresql-18", "sqlite"])
@pytest.mark.parametrize("document", list(filter(is_project, DOCUMENTS)), ids=lambda path: path.stem)
def test_the_project_of_a_document_does_what_it_says(
    document: Path, kind: str, tmp_path: Path, fresh_database: Callable[[str], str]
) -> None:
    aliases = ["default", *(["archive"] if '"archive"' in document.read_text() else [])]
    databases = {alias: database(fresh_database(kind)) for alias in aliases}
    ran = Project(document, tmp_path, databases).run()
    assert ran.returncode == 0, ran.stdout


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_block_of_python_is_run_by_some_test(document: Path) -> None:
    words = {word for word, _ in FENCE.findall(document.read_text())}
    known = {"", "shell", *(word for word in words if FILE.fullmatch(word))}
    # Those of this page are run by tests/django/test_plugin.py.
    known |= {"django"} if document.name == "test.md" else set()
    assert words <= known
