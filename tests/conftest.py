"""Of a test marked `first(n)`, the first n parameter sets run with `make test`, the others with `make long`.

Garbage is collected seldom, and only among what the tests of a file made: looking through torch, transformers and their caches took
more than a sixth of the time. No test of hypothesis fails for the time that it takes. Equal models of transformers share a captured
program in tests of what is done with it, but for long ones.
"""

import gc
from collections import Counter
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings
from support.command_server import CommandServer

UNSHARED = {"cli", "onnx", "program"}  # folders that meet few models twice, and the one whose tests are of the capture itself

gc.set_threshold(50_000, 20, 50)
settings.register_profile("busy machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy machine")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "tries_graph: a pass that does not fit a transformers model is tried on its graph")


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


def pytest_collection_finish() -> None:
    forget_what_is_there()


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    yield
    if nextitem is None or nextitem.path != item.path:
        forget_what_is_there()


def forget_what_is_there() -> None:
    """Keep the objects of imports and caches from being looked through by later collections: each run of a Trainer has several."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    from support import shared_programs

    short = item.get_closest_marker("long") is None
    shared_programs.share(short and item.path.parent.name not in UNSHARED, quick=short)


@pytest.fixture(scope="session")
def server() -> Iterator[CommandServer]:
    """A process that runs commands and programs without the seconds that their imports take."""
    with CommandServer() as running:
        yield running


@pytest.fixture(autouse=True)
def no_trial_as_graph(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass that does not fit a transformers model is refused without a trial on its graph, which takes seconds.

    Long tests, and those marked `tries_graph`, have the trial.
    """
    if not any(map(request.node.get_closest_marker, ("long", "tries_graph"))):
        monkeypatch.setattr("retrofit.rewriting.fits_as_graph", lambda *given: False)
