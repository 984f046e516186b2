"""`python -m retrofit` is `retrofit`, the command line."""

import runpy

runpy.run_module("retrofit.cli", run_name="__main__", alter_sys=True)
