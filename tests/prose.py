"""Check that our English is plain: ``python -m tests.prose``, a part of ``make lint``.

It counts words to avoid in prose (docstrings, comments, texts, names of tests, documents, the command's help)
and docstrings of functions that do not start with a verb. ``prose.json`` says how many each folder may have:
more fails, and fewer fails until ``--lower`` lowers the number. With a path it prints what it found there.
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
ALLOWED = Path(__file__).with_suffix(".json")
FOLDERS = ("src", "docs", "tests", "benchmarks", "examples", "deploy")
FILES = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "Makefile")
TEXTS = {"", ".css", ".html", ".java", ".js", ".md", ".service", ".sql", ".toml", ".txt", ".yaml", ".yml"}
# Of generated documents the generators are checked, and the test of this module quotes what to avoid.
SKIPPED = re.compile(r"docs/(proof\.|performance)|tests/unit/test_prose\.py$")
AVOID = {
    r"(?i)\bwhoever\b": "any process that, anyone who",
    r"(?i)\blest\b": "so that … not",
    r"(?i)\banew\b": "again",
    r"(?i)\bfor\s+ever\b": "always, forever",
    r"(?i)\bmend(s|ed|ing)?\b": "fix, repair",
    r"(?i)\btwins?\b": "counterpart, or its name",
    r"(?i)\bkin\b": "of the same kind, or its name",
    r"(?i)\btold\b": "reported, notified, given",
    r"(?<![Tt]here\s)\b[Ii]s\s+none\b": "is not one, is not a …",
    r"(?i)\bit\s+were\b": "it was, there were",
    r"(?i)\bit\s+is\s+had\b": "the name of what has it",
    r"(?i)\bhad\s+rather\b": "prefer",
    r"(?i)(?<!\bthere\s)\bis\s+no\s+(?!(longer|more|less|fewer|matter|other)\b)\S+": "is not a …",
}
# In a document these are not prose: `inline code`, .names and #names, ="names", a condition of a template.
NAMES = re.compile(r"(?<!`)`[^`\n]+`(?!`)|[#.][\w-]+|=\"[\w-]+\"|\bis\ none\b(?=[^{}\n]*[%}]\})")
NO_VERB = re.compile(r"(Whether|What|An?)\s")
VERB = "a verb (Return, Yield, Check) or 'True if'"
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
Findings = dict[str, list[str]]


def words(place: str, line: int, text: str) -> Iterator[str]:
    """Yield the words to avoid in a text that starts on this line."""
    for pattern, better in AVOID.items():
        for found in re.finditer(pattern, text):
            at = line + text.count("\n", 0, found.start())
            yield f"{place}:{at}: '{' '.join(found[0].split())}'; write: {better}"


def in_document(name: str, text: str) -> Iterator[str]:
    """Yield what is found in a file that is not Python."""
    yield from words(name, 1, NAMES.sub("…", text))


def in_module(name: str, source: str) -> Iterator[str]:
    """Yield what is found in a module."""
    for line, text in sorted(_texts(source)):
        yield from words(name, line, text)
    functions = [node for node in ast.walk(ast.parse(source)) if isinstance(node, FUNCTIONS)]
    for node in functions:
        if found := NO_VERB.match(ast.get_docstring(node) or ""):
            yield f"{name}:{node.body[0].lineno}: '{found[1]} …' opens a docstring; write: {VERB}"


def _texts(source: str) -> Iterator[tuple[int, str]]:
    """Yield names of tests, comments and texts with their lines; a text without a blank is a name."""
    within: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, FUNCTIONS) and node.name.startswith("test_"):
            yield node.lineno, node.name.replace("_", " ")
        elif isinstance(node, ast.JoinedStr):
            within.update(map(id, node.values))
            yield (
                node.lineno,
                "".join(getattr(each, "value", "") if _is_text(each) else "{}" for each in node.values),
            )
        elif _is_text(node) and id(node) not in within and re.search(r"\s", node.value):
            yield node.lineno, node.value
    for token in tokenize.generate_tokens(iter(source.splitlines(keepends=True)).__next__):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def _is_text(node: Any) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def in_help() -> Iterator[str]:
    """Yield what is found in the help of each command."""
    import typer

    from relaybox.cli import app

    commands: list[tuple[str, Any]] = [("relaybox", typer.main.get_command(app))]
    for name, command in commands:
        commands += [(f"{name} {each}", part) for each, part in getattr(command, "commands", {}).items()]
        texts = [command.help, command.epilog, *(getattr(option, "help", "") for option in command.params)]
        yield from words(f"{name} --help", 1, "\n".join(text or "" for text in texts))


def in_project() -> Findings:
    """Return what is found in each folder, in each file beside them and in the help."""
    found: Findings = {name: [] for name in (*FOLDERS, *FILES)}
    listing = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *found]
    for name in subprocess.check_output(listing, cwd=ROOT, text=True).splitlines():
        file, look = ROOT / name, in_module if name.endswith(".py") else in_document
        if file.exists() and file.suffix in {*TEXTS, ".py"} and not SKIPPED.match(name):
            found[name.partition("/")[0]] += look(name, file.read_text())
    return {**found, "help": [*in_help()]}


def complaints(found: Findings, allowed: dict[str, int]) -> Iterator[str]:
    """Yield the findings of each folder that has too many, and the new number of one that has fewer."""
    for folder, each in found.items():
        limit = allowed.get(folder, 0)
        if len(each) > limit:
            yield from each
            yield f"{folder}: {len(each)} findings, {limit} allowed: rewrite those that you added"
        elif len(each) < limit:
            yield f"{folder}: lower the number to {len(each)}: .venv/bin/python -m tests.prose --lower"


def lowered(found: Findings, allowed: dict[str, int]) -> dict[str, int]:
    """Return the numbers as low as they can be; none is raised."""
    return {folder: min(len(each), allowed.get(folder, 0)) for folder, each in found.items()}


def main(arguments: Iterable[str]) -> int:
    found, allowed = in_project(), json.loads(ALLOWED.read_text())
    if "--lower" in arguments:
        allowed = lowered(found, allowed)
        ALLOWED.write_text(json.dumps(allowed, indent=2) + "\n")
    for path in arguments:
        print(*(each for part in found.values() for each in part if each.startswith(path)), sep="\n")
    print("prose:", ", ".join(f"{folder} {len(each)}" for folder, each in found.items()))
    wrong = [*complaints(found, allowed)]
    print(*wrong, sep="\n", end="\n" if wrong else "", file=sys.stderr)
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
