"""A notebook is run without Jupyter, and holds afterwards what its cells printed and drew.

python examples/run_notebook.py examples/retrofit.ipynb
"""

from __future__ import annotations

import base64
import contextlib
import io
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("MPLBACKEND", "agg")


def run_cells(notebook: dict[str, Any]) -> Iterator[tuple[dict[str, Any], list[dict[str, Any]]]]:
    """Each cell of code and its outputs, as the format of notebooks has them; all cells share one namespace."""
    from matplotlib import pyplot

    namespace: dict[str, Any] = {"__name__": "__main__"}
    for number, cell in enumerate(notebook["cells"]):
        if cell["cell_type"] != "code":
            continue
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile("".join(cell["source"]), f"cell {number}", "exec"), namespace)
        outputs: list[dict[str, Any]] = []
        if printed.getvalue():
            outputs.append({"output_type": "stream", "name": "stdout", "text": printed.getvalue().splitlines(keepends=True)})
        for figure in map(pyplot.figure, pyplot.get_fignums()):
            drawn = io.BytesIO()
            figure.savefig(drawn, format="png", dpi=80, metadata={"Software": None})
            picture = base64.b64encode(drawn.getvalue()).decode()
            outputs.append({"output_type": "display_data", "data": {"image/png": picture}, "metadata": {}})
        pyplot.close("all")
        yield cell, outputs


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit("give one notebook: python examples/run_notebook.py examples/retrofit.ipynb")
    file = Path(sys.argv[1])
    notebook = json.loads(file.read_text(encoding="utf-8"))
    for count, (cell, outputs) in enumerate(run_cells(notebook), 1):
        cell["outputs"], cell["execution_count"] = outputs, count
    file.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
