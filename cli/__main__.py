"""`python -m retrofit.cli` is `retrofit`."""

import sys

from retrofit.cli import main

sys.exit(main())
