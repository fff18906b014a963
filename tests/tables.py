"""Tables of cases that one test goes through, where a case takes less time than a test
of its own costs.
"""

import functools
import inspect
from collections.abc import Callable, Iterable
from itertools import product

__all__ = ["for_each"]


def for_each(**columns: Iterable[object]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Call a test with each combination of these arguments, as with a `parametrize` for
    each. All cases run, and the failure names those that failed. They share the
    fixtures of the test: so it must not change any.
    """
    cases = [dict(zip(columns, values, strict=True)) for values in product(*columns.values())]
    assert cases

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def run(**fixtures: object) -> None:
            failures = []
            for case in cases:
                try:
                    test(**fixtures, **case)
                except Exception as error:  # noqa: BLE001 - all of them are told at the end
                    error.add_note(f"for {case}")
                    failures.append(error)
            if failures:
                raise ExceptionGroup(f"{len(failures)} of {len(cases)} cases failed", failures)

        signature = inspect.signature(test)
        left = [parameter for name, parameter in signature.parameters.items() if name not in columns]
        run.__signature__ = signature.replace(parameters=left)  # type: ignore[attr-defined]
        del run.__wrapped__
        return run

    return decorate
