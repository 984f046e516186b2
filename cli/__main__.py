"""`python -m retrofit.cli` runs the command `retrofit`."""

import sys

from retrofit.cli import main

sys.exit(main())
