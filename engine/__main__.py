"""python -m engine is the command lawful."""

import sys

from engine.cli import main

sys.exit(main())
