"""What is said of the bugs of the past holds, as far as can be told without running
their tests: `make mutants GLUE=1` does that.
"""

from .glue import PROJECT, failed_test, known_bugs


def test_every_bug_of_the_past_can_be_put_back_and_its_tests_are_there() -> None:
    bugs = known_bugs() + known_bugs(unseen=True)
    assert len({bug.name for bug in bugs}) == len(bugs)
    for bug in bugs:
        compile(bug.source(), bug.file, "exec", dont_inherit=True)
        assert bug.tests
        assert [test for test in bug.tests if not (PROJECT / test.partition("::")[0]).exists()] == [], bug.name


def test_the_first_failed_test_of_a_summary_is_named() -> None:
    assert failed_test("F\n=== short test summary info ===\nFAILED tests/a.py::test[x - y] - assert 0\n1 failed\n") == (
        "tests/a.py::test[x - y]"
    )
    assert failed_test("ERROR tests/a.py::test\nFAILED tests/b.py::test\n") == "tests/a.py::test"
    assert failed_test("1 passed\n") == ""
