"""The check of our English finds words to avoid in prose, leaves names alone, and only ever allows less."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests import prose

MODULE = '''\
"""A module, for whoever reads it."""
told = lest = {"told": 1}  # Begun
# anew.


def test_a_word_that_is_no_name(kin):
    """Whether it is.

    It is not had for
    ever.
    """
    if told is None:
        raise ValueError(f"{told!r} is no {kin}")
    return "there is no twin", told.mend, "told"


class What:
    """A class may be a noun."""

    def a(self):
        """A noun."""

    def an(self):
        """Return an answer; there is none, or it is no longer here."""
'''


def found(lines: list[str]) -> list[str]:
    """Return the places and words of findings without what to write instead."""
    return [line.partition("; write")[0] for line in lines]


def test_words_are_found_in_docstrings_comments_texts_and_names_of_tests() -> None:
    assert found([*prose.in_module("m.py", MODULE)]) == [
        "m.py:1: 'whoever'",
        "m.py:3: 'anew'",
        "m.py:6: 'is no name'",
        "m.py:9: 'for ever'",
        "m.py:13: 'is no {}'",
        "m.py:14: 'twin'",
        "m.py:7: 'Whether …' opens a docstring",
        "m.py:21: 'A …' opens a docstring",
    ]


def test_a_finding_says_what_to_write() -> None:
    assert [*prose.words("docs/x.md", 3, "one\nwhoever")] == [
        "docs/x.md:4: 'whoever'; write: any process that, anyone who"
    ]


@pytest.mark.parametrize("pattern", prose.AVOID)
def test_what_to_write_instead_is_plain(pattern: str) -> None:
    assert [*prose.words("", 1, prose.AVOID[pattern])] == []


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("It waits for ever.", ["for ever"]),
        ("A text that is none.", ["is none"]),
        ("how many it were", ["it were"]),
        ("It is had by one, and had rather not.", ["it is had", "had rather"]),
        ("is no\nJSON", ["is no JSON"]),
        ("`told` and ``", []),
        ("There is none, there is no row, it is no longer there, x is None.", []),
        ("#told {% if it is none %} id=\"twin\"", []),
        ("```\n# Whoever\n```", ["Whoever"]),
    ],
)  # fmt: skip
def test_words_are_found_in_documents_and_names_are_not(text: str, words: list[str]) -> None:
    assert [line.split("'")[1] for line in prose.in_document("x", text)] == [
        word.replace("it is had", "It is had") for word in words
    ]


def test_more_than_allowed_is_listed() -> None:
    assert [*prose.complaints({"src": ["a", "b"], "docs": []}, {"src": 1})] == [
        "a", "b", "src: 2 findings, 1 allowed: rewrite those that you added",
    ]  # fmt: skip


def test_fewer_than_allowed_lowers_the_number() -> None:
    (complaint,) = prose.complaints({"src": ["a"]}, {"src": 2})
    assert complaint.startswith("src: lower the number to 1:")


def test_no_number_is_raised() -> None:
    assert prose.lowered({"src": ["a"], "docs": ["b"], "new": ["c"]}, {"src": 3, "docs": 0}) == {
        "src": 1, "docs": 0, "new": 0,
    }  # fmt: skip


def test_the_check_passes_prints_its_counts_and_lists_a_path(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(prose, "in_project", lambda: {"src": ["src/a:1: x", "src/b:1: y"], "docs": []})
    monkeypatch.setattr(prose, "ALLOWED", tmp_path / "prose.json")
    prose.ALLOWED.write_text(json.dumps({"src": 3}))
    assert prose.main([]) == 1
    assert "lower the number to 2" in capsys.readouterr().err
    assert prose.main(["--lower"]) == 0
    assert json.loads(prose.ALLOWED.read_text()) == {"src": 2, "docs": 0}
    capsys.readouterr()
    assert prose.main(["src/b"]) == 0
    assert capsys.readouterr().out == "src/b:1: y\nprose: src 2, docs 0\n"
