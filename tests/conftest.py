"""Of a test marked `first(n)`, the first n parameter sets run with `make test`, the others with `make long`."""

from collections import Counter

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    met: Counter[str] = Counter()
    for item in items:
        mark = item.get_closest_marker("first")
        if mark is not None:
            test = item.nodeid.split("[")[0]
            met[test] += 1
            if met[test] > mark.args[0]:
                item.add_marker(pytest.mark.long)
