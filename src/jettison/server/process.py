"""Processes of the server: our own source in a fresh interpreter, deaf to what the terminal sends."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import jettison


async def started_process(module_and_arguments: tuple[str, ...], line_bytes: int) -> asyncio.subprocess.Process:
    """Start ``python -m MODULE ARGUMENT ...`` with pipes, whatever the working directory is.

    Args:
        line_bytes: longest line that is read from it.
    """
    source = str(Path(jettison.__file__).resolve().parents[1])
    path = os.pathsep.join([source, *(os.path.abspath(p) for p in sys.path if p)])
    env = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", *module_and_arguments),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env=env,
        limit=line_bytes,
        start_new_session=True,  # what the terminal sends to us does not go to it
    )
