"""Entry points of the distribution retrofit-transformers: its command, and its hook in `import torch`. Import `retrofit`, not this.

`import retrofit` need not give this distribution's package. The distribution called `retrofit` is another project's and has a
package of that name: installed later it replaces `retrofit/__init__.py`, uninstalled it removes it. A program may lie in a file
`retrofit.py`, too. So the package is found and read before it is imported, and nobody else's code is run from here.
`retrofit/__init__.py` names this module: that is how it is recognized.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import warnings
from typing import NamedTuple

PACKAGE = "retrofit"
AGAIN = "pip install --force-reinstall --no-deps retrofit-transformers, or the path of its checkout"
APART = f"pip uninstall {PACKAGE}, and then {AGAIN}"
BOTH = "it has a package retrofit too: a file of both is that of the later one, and is gone once either is uninstalled"


class Conflict(NamedTuple):
    """A defect of the installed package, its reason and the fix."""

    what: str
    why: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.what}\n  why: {self.why}\n  fix: {self.remedy}"


def main() -> int:
    """Run the command line and return its exit code; 2 where the package is not this distribution's, with the reason on stderr."""
    found = conflict()
    if found is None:
        try:
            from retrofit.cli import main as run
        except Exception as error:
            found = damaged(error)
        else:
            return run()
    print(f"retrofit: error: {found}", file=sys.stderr)
    return 2


def install() -> None:
    """Have transformers replay recipes. Warn, never raise, where that fails: `import torch` calls this in any program."""
    try:
        found = conflict()
        if found is None:
            from retrofit.storage import transformers_hook

            transformers_hook.install()
    except Exception as error:
        found = damaged(error)
    if found is not None:
        warn(found)


def conflict() -> Conflict | None:
    """Return what is wrong where `import retrofit` gives something else than this distribution's package. Imports nothing."""
    try:
        spec = importlib.util.find_spec(PACKAGE)
    except (ImportError, ValueError):  # a module without a spec was put in its place
        spec = None
    if spec is None:
        return Conflict("the package retrofit is not found", "retrofit-transformers is installed, its files are gone", AGAIN)
    if spec.origin is not None and is_ours(spec.loader, spec.origin):
        return None
    places = list(spec.submodule_search_locations or ())  # none where it is one file
    where = spec.origin or ", ".join(places)  # no origin: folders without __init__.py
    others = [other for place in places or [where] for other in distributions(os.path.dirname(place))]
    ours = next((place for place in places if os.path.isfile(os.path.join(place, "storage", "transformers_hook.py"))), None)
    if ours is None:
        what = f"`import retrofit` gives {where}, not the package of retrofit-transformers"
        if others:
            return Conflict(what, f"the distribution {others[0]} has a package of that name", f"pip uninstall {PACKAGE}")
        return Conflict(what, "it comes earlier on sys.path", "rename it, or run the program from elsewhere")
    file = os.path.join(ours, "__init__.py")
    if others:
        return Conflict(f"the distribution {others[0]} has replaced {file} of retrofit-transformers", BOTH, APART)
    return Conflict(
        f"{file} is missing, or not that of retrofit-transformers", f"another distribution had one too: {PACKAGE}?", AGAIN
    )


def is_ours(loader: object, origin: str) -> bool:
    """Return whether the package's first file is this distribution's: it names this module."""
    try:
        return __name__.encode() in loader.get_data(origin)  # type: ignore[attr-defined]
    except (AttributeError, OSError):
        return False


def distributions(folder: str) -> list[str]:
    """Return the names and versions of the distributions in a folder whose name is `retrofit`."""
    try:
        names = os.listdir(folder or ".")
    except OSError:
        return []
    return [
        " ".join(name.rsplit(".", 1)[0].split("-")[:2])
        for name in names
        if name.lower().startswith(f"{PACKAGE}-") and name.endswith((".dist-info", ".egg-info"))
    ]


def warn_of_others(folder: str) -> None:
    """Warn of a distribution called `retrofit` in the folder of this one, whose package is whole."""
    for other in distributions(folder):
        warn(Conflict(f"the distribution {other} is installed beside retrofit-transformers, in {folder}", BOTH, APART))


def damaged(error: Exception) -> Conflict:
    """Return what is wrong where importing the package, though it is this distribution's, raised an error."""
    return Conflict("retrofit cannot be imported", f"{type(error).__name__}: {error}", AGAIN)


def warn(found: Conflict) -> None:
    """Warn of a conflict; where warnings are errors, say it on stderr, since `import torch` must not fail of it."""
    try:
        warnings.warn(str(found), UserWarning, stacklevel=3)
    except UserWarning:
        print(f"retrofit: warning: {found}", file=sys.stderr)
