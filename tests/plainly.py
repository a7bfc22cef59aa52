"""Run a function of the tests in a process of its own, with contracts off: for runs too long to be watched twice."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


def plainly(module: str, call: str, timeout: float = 300, **environment: str) -> Any:
    """The value of `call`, an expression over the names of `module`, as JSON.  An exception there fails the test."""
    code = f"import json\nfrom {module} import *\nprint(json.dumps({call}))"
    env = {**os.environ, "LAWFUL_CONTRACTS": "off", "PYTHONPATH": str(ROOT), **environment}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, cwd=ROOT, capture_output=True, text=True, timeout=timeout
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)
