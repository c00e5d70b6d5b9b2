"""The benchmarks are programs, not a package: what stands beside them is imported as they import it."""

import sys
from pathlib import Path

SCRIPTS = Path(__file__).parents[2] / "scripts"
sys.path[:0] = [str(SCRIPTS), str(SCRIPTS / "offline_bench" / "engines")]
