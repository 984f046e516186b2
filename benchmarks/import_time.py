"""What `import torch` takes longer where retrofit is installed: the processor time of its entry point, in fresh processes.

torch looks its entry points up in any case; what is added is loading and calling retrofit's. The bar is 5 ms.

    python benchmarks/import_time.py
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys

CODE = """
import time
from importlib.metadata import entry_points
import torch
(entry,) = entry_points(group="torch.backends", name="retrofit")
began = time.process_time()
entry.load()()
print(1000 * (time.process_time() - began))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    environment = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    found = [
        float(subprocess.run([sys.executable, "-c", CODE], env=environment, check=True, capture_output=True, text=True).stdout)
        for _ in range(options.rounds)
    ]
    print(f"{statistics.median(found):.2f} ms ({min(found):.2f} … {max(found):.2f}) of {options.rounds} processes")


if __name__ == "__main__":
    main()
