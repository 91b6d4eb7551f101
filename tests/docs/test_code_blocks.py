"""Every Python block of the documents runs, those of one document in order and in one namespace."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import sqlalchemy as sa

ROOT = Path(__file__).parents[2]
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


def documents() -> list[Path]:
    return [
        path for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")] if BLOCK.search(path.read_text())
    ]


@pytest.mark.parametrize("document", documents(), ids=lambda path: str(path.relative_to(ROOT)))
def test_the_code_of_a_document_runs(
    document: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    fresh_database: Callable[[str], str],
    request: pytest.FixtureRequest,
) -> None:
    monkeypatch.chdir(tmp_path)
    text = document.read_text()
    if "DATABASE_URL" in text:
        monkeypatch.setenv("DATABASE_URL", fresh_database("postgresql-18"))
    for name in SERVERS.keys() & set(re.findall(r"\w+", text)):
        monkeypatch.setenv(name, request.getfixturevalue(SERVERS[name]))
    namespace: dict[str, object] = {"__name__": "__main__"}
    for block in BLOCK.finditer(text):
        # Blank lines ahead make a traceback show the line of the document.
        code = "\n" * text.count("\n", 0, block.start(1)) + block[1]
        exec(compile(code, document, "exec", dont_inherit=True), namespace)
    for value in namespace.values():
        if isinstance(value, sa.Engine):
            value.dispose()
