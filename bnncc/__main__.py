"""Run the command line as ``python -m bnncc``."""

from __future__ import annotations

import sys

from bnncc.cli.main import main

sys.exit(main())
