"""Run a module on a simulated device: ``python -m support.simulated_cuda MODULE [arguments]``."""

import subprocess
import sys

from support.simulated_cuda import environment

sys.exit(subprocess.run([sys.executable, "-m", *sys.argv[1:]], env=environment()).returncode)
