"""What failed while a model was read, as an error that names its file."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from retrofit.errors import CheckpointError, RetrofitError, first_line

OTHER_SHAPES = "ignore_mismatched_sizes"  # what transformers says of weights that do not fit; which they are, it logs


@contextlib.contextmanager
def name_file_in_errors(path: Path) -> Iterator[None]:
    """Whatever fails is a `RetrofitError` that names the file."""
    try:
        yield
    except RetrofitError as error:
        if str(path) not in error.what:
            error.what = f"{path}: {error.what}"
        raise
    except MemoryError:
        raise
    except Exception as error:
        if OTHER_SHAPES in str(error):
            raise CheckpointError(
                f"{path}: the weights do not fit the model",
                why="some of them have other shapes than config.json describes",
                remedy="give the config they were saved with",
            ) from error
        remedy = "fetch it again, or correct its config.json" if path.is_dir() else "fetch it again"
        raise CheckpointError(f"{path} cannot be loaded", why=first_line(error), remedy=remedy) from error
