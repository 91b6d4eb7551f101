"""The figures of the proof count for the core that they were taken of, and for no other."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import grimp
import pytest

from tests.proof import __main__ as command
from tests.proof import core, page, parts
from tests.proof.check import LEAST, lacking
from tests.proof.parts import DATABASES, PARTS, SIMULATION, CoreChanged, Run

TESTED = "planted-bugs"
BESIDE = frozenset(
    f"relaybox.{name}"
    for name in (
        "core.commands",
        "core.fingerprint",
        "core.imports",
        "core.redact",
        "core.schemes",
        "core.settings",
        "core.text",
        "core.values",
        "errors",
        "operate.admin",
        "operate.observers.log",
        "operate.observers.traces",
    )
)
"""What the core imports and is not of it: it shows, configures, or is used by operators alone."""


def run_of(part: str, core: str = "now", **figures: Any) -> Run:
    return Run(part, "2026-11-17", "abc", 60.0, {"first": 0, "schedules": 1, "tests": 1} | figures, core)


def all_parts(core: str = "now", less: int = 0) -> list[Run]:
    return [run_of(part, core, schedules=LEAST.get(part, 1) - less) for part in PARTS]


@pytest.fixture
def package(tmp_path: Path) -> Path:
    return shutil.copytree(core.PACKAGE, tmp_path / "elsewhere", ignore=shutil.ignore_patterns("__pycache__"))


def test_the_core_is_the_same_wherever_it_lies(package: Path) -> None:
    assert core.digest(package) == core.digest()


@pytest.mark.parametrize("name", ["relay/lane.py", "database/statements/claim.py", "core/outcome.py"])
def test_a_change_of_the_core_changes_its_hash(package: Path, name: str) -> None:
    before = core.digest(package)
    (package / name).write_bytes((package / name).read_bytes() + b"MORE = '# not a comment'\n")
    after = core.digest(package)
    assert after != before
    (package / name).write_bytes((package / name).read_bytes().replace(b"# not a", b"# no "))
    assert core.digest(package) not in (before, after)


def test_comments_docstrings_and_blank_lines_are_not_part_of_the_core() -> None:
    bare = "LIMIT = 2\nclass Lane:\n    SQL = 'SELECT 1 # %s'\n    def run(self):\n        return 1"
    told = '''"""Run a lane.

    It has two paragraphs.
    """

LIMIT = 2  # Rows
"""How many rows."""

class Lane:
    # Why
    SQL = 'SELECT 1 # %s'

    def run(self):
        """Return one."""
        return 1  # noqa
'''
    assert core.code(told) == core.code(bare) == bare


def test_a_file_that_is_new_or_moved_changes_the_hash(package: Path) -> None:
    seen = {core.digest(package)}
    (package / "relay" / "new.py").write_text("")
    seen.add(core.digest(package))
    (package / "relay" / "new.py").rename(package / "stores" / "new.py")
    seen.add(core.digest(package))
    assert len(seen) == 3


def test_a_change_of_a_face_leaves_the_core_as_it_is(package: Path) -> None:
    before = core.digest(package)
    (package / "cli" / "relay.py").write_text("")
    assert core.digest(package) == before


def test_what_the_core_imports_is_of_the_core_or_known_to_be_beside_it() -> None:
    graph = grimp.build_graph("relaybox")
    own = {_module(file) for file in core.files().values()}
    imported = {name for module in own for name in graph.find_modules_directly_imported_by(module)}
    assert imported - own == BESIDE


def _module(file: Path) -> str:
    names = ("relaybox", *file.relative_to(core.PACKAGE).with_suffix("").parts)
    return ".".join(names).removesuffix(".__init__")


def test_a_release_lacks_nothing_with_enough_figures_of_the_present_core() -> None:
    assert list(lacking(all_parts(), "now")) == []


def test_figures_of_another_core_do_not_count() -> None:
    lines = list(lacking(all_parts("before"), "now"))
    assert len(lines) == len(PARTS)
    assert lines[0] == (
        "simulation: no figures of the present core; the last are of core before, from 2026-11-17"
    )


def test_runs_of_one_core_are_summed() -> None:
    half = [run_of(SIMULATION, schedules=50_000)]
    [line] = lacking(half, "now", [SIMULATION])
    assert line == "simulation: 50,000 schedules of the present core; 100,000 are asked for"
    assert list(lacking([*half, run_of(SIMULATION, "before"), *half], "now", [SIMULATION])) == []


def test_a_run_that_broke_a_promise_counts_for_nothing_and_is_named() -> None:
    broken = run_of(DATABASES[0], schedules=1_000, broken=2)
    lines = list(lacking([*all_parts(), broken], "now", DATABASES))
    assert lines == ["chaos-postgresql-18: 2 schedules broke a promise on 2026-11-17"]


def test_the_page_sums_the_present_core_and_lists_every_run() -> None:
    runs = [run_of(SIMULATION, "before", schedules=7_777), run_of(SIMULATION, schedules=1_234)]
    summed, listed = page.render(runs, "now").split("## Runs")
    assert "1,234" in summed
    assert "7,777" not in summed
    assert "seeds 0 to 7,776" in listed
    assert f"| {SIMULATION} " in summed
    assert "those of this core" in summed
    assert page.render(runs[:1], "now").count("none of this core") == len(PARTS)


def test_a_run_keeps_the_core_that_it_began_with(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "_test", lambda *_: ({"tests": 1}, True))
    done, _ = parts.run(TESTED, 1.0, 1)
    assert done.core == core.digest()
    digests = iter(["one", "another"])
    monkeypatch.setattr(parts, "digest", lambda: next(digests))
    with pytest.raises(CoreChanged):
        parts.run(TESTED, 1.0, 1)


def test_the_check_exits_with_1_where_something_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["proof", "--check", "--only", SIMULATION])
    monkeypatch.setattr(command, "digest", lambda: "now")
    monkeypatch.setattr(page, "is_current", lambda: True)
    monkeypatch.setattr(command, "kept", all_parts)
    assert command.main() == 0
    monkeypatch.setattr(command, "kept", lambda: all_parts("before"))
    assert command.main() == 1
    assert "simulation: no figures of the present core" in capsys.readouterr().out
    monkeypatch.setattr(command, "kept", all_parts)
    monkeypatch.setattr(page, "is_current", lambda: False)
    assert command.main() == 1
    assert "docs/proof.md" in capsys.readouterr().out
