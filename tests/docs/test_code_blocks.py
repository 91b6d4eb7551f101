"""Every Python block of the documents is run: alone, in order with those before it, or as a project."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import sqlalchemy as sa

from tests.django.databases import database
from tests.docs.failures import DOCUMENTS, ROOT, checks, line_at
from tests.docs.project import FENCE, FILE, Project, is_project

BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)

SERVERS = {
    "AWS_ENDPOINT_URL": "moto_url",
    "KAFKA_URL": "kafka_url",
    "MEILISEARCH_URL": "meilisearch_url",
    "NATS_URL": "nats_url",
    "RABBITMQ_URL": "rabbitmq_url",
    "REDIS_URL": "redis_url",
}
"""The fixture of a server, by the variable in which a document expects its URL."""


def test_the_code_of_a_document_runs_in_order_and_in_one_namespace(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    fresh_database: Callable[[str], str],
    request: pytest.FixtureRequest,
) -> None:
    with checks() as check:
        for number, document in enumerate(DOCUMENTS):
            text = document.read_text()
            blocks = list(BLOCK.finditer(text))
            with check(document), monkeypatch.context() as patch:
                (tmp_path / str(number)).mkdir()
                patch.chdir(tmp_path / str(number))
                if blocks and "DATABASE_URL" in text:
                    patch.setenv("DATABASE_URL", fresh_database("postgresql-18"))
                for name in SERVERS.keys() & set(re.findall(r"\w+", text)) if blocks else ():
                    patch.setenv(name, request.getfixturevalue(SERVERS[name]))
                namespace: dict[str, object] = {"__name__": "__main__"}
                for block in blocks:
                    # Blank lines ahead make a traceback show the line of the document.
                    code = "\n" * text.count("\n", 0, block.start(1)) + block[1]
                    exec(compile(code, document, "exec", dont_inherit=True), namespace)
                for value in namespace.values():
                    if isinstance(value, sa.Engine):
                        value.dispose()


@pytest.mark.parametrize("kind", ["postgresql-18", "sqlite"])
def test_the_project_of_a_document_does_what_it_says(
    kind: str, tmp_path: Path, fresh_database: Callable[[str], str]
) -> None:
    documents = list(filter(is_project, DOCUMENTS))
    assert documents
    with checks() as check:
        for document in documents:
            aliases = ["default", *(["archive"] if '"archive"' in document.read_text() else [])]
            databases = {alias: database(fresh_database(kind)) for alias in aliases}
            ran = Project(document, tmp_path / document.stem, databases).run()
            with check(document):
                assert ran.returncode == 0, ran.stdout


def test_every_block_of_python_is_run_by_some_test() -> None:
    with checks() as check:
        for document in DOCUMENTS:
            # Those of this page are run by tests/django/test_plugin.py.
            known = {"", None, "shell", *(["django"] if document == ROOT / "docs/how-to/test.md" else [])}
            text = document.read_text()
            for block in FENCE.finditer(text):
                with check(document, line_at(text, block.start())):
                    assert block[1] in known or FILE.fullmatch(block[1]), block[1]
