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


def test_the_first_failed_test_is_named_whatever_became_of_the_summary() -> None:
    said = "tests/a.py::test[FAILED x] PASSED  [ 33%]\ntests/a.py::test[x - y] FAILED  [ 66%]\n"
    said += "tests/b.py::test ERROR  [100%]"
    assert failed_test(f"{said}\n\nTraceback (most recent call last):\n") == "tests/a.py::test[x - y]"
    assert failed_test("tests/b.py::test ERRORTraceback (most recent call last):\n") == "tests/b.py::test"
    assert failed_test("tests/b.py::test Current thread 0x1 (most recent call first):\n") == "tests/b.py::test"
    assert failed_test("tests/a.py::test PASSED  [100%]\n1 passed\n") == ""
