"""What a test leaves open fails its module, whether the test or a fixture opened it."""

from __future__ import annotations

import pytest

pytest_plugins = ["pytester"]

CONFTEST = """
import gc
import pytest

gc.disable()  # what is collected, and when, is up to the code under test

class Open:
    def __init__(self, name):
        self.name, self.itself = name, self  # a cycle: only the garbage collector finds it

    def __del__(self):
        raise ResourceWarning(f"unclosed {self.name}")

@pytest.fixture
def opened(request):
    return Open(request.node.name)

@pytest.fixture(scope="session")
def kept():
    return Open("run")
"""
TESTS = {
    "test_a": "from conftest import Open\ndef test_local(): Open('local')\ndef test_last(): pass",
    "test_b": "def test_fixture(opened): pass\ndef test_last(): pass",
    "test_c": "from conftest import Open\ndef test_last_local(): Open('last_local')",
    "test_d": "def test_last_fixture(opened): pass",
    "test_e": "def test_innocent(): pass",
    "test_f": "def test_of_the_run(kept): pass",
}


def test_a_leak_fails_the_module_that_made_it_and_no_other(
    pytester: pytest.Pytester, pytestconfig: pytest.Config
) -> None:
    pytester.makepyfile(conftest=CONFTEST, **TESTS)
    own = (f"--config-file={pytestconfig.inipath}", f"--rootdir={pytester.path}", "-p", "tests.leaks")
    result = pytester.runpytest_subprocess(*own, pytester.path)
    result.assert_outcomes(passed=8, errors=5)
    result.stdout.fnmatch_lines(
        [
            *("* ERROR at teardown of test_last *", "*ResourceWarning: unclosed local"),
            *("* ERROR at teardown of test_last *", "*ResourceWarning: unclosed test_fixture"),
            *("* ERROR at teardown of test_last_local *", "*ResourceWarning: unclosed last_local"),
            *("* ERROR at teardown of test_last_fixture *", "*ResourceWarning: unclosed test_last_fixture"),
            *("* ERROR at teardown of test_of_the_run *", "*ResourceWarning: unclosed run"),
        ]
    )
