"""Where a Chromium is for the tests of pages. Run as a program: finds one, or installs Debian's where it may."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

NAMES = (
    "chromium",
    "chromium-browser",
    "google-chrome",
    "google-chrome-stable",
    "chrome",
    "microsoft-edge",
    "microsoft-edge-stable",
    "msedge",
)
ELSEWHERE = (  # where programs are not on PATH
    "/Applications/Chromium.app/Contents/MacOS/Chromium",
    "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome",
    "/Applications/Microsoft Edge.app/Contents/MacOS/Microsoft Edge",
    r"C:\Program Files\Google\Chrome\Application\chrome.exe",
    r"C:\Program Files (x86)\Microsoft\Edge\Application\msedge.exe",
)
NAMED, WITHOUT = "JETTISON_BROWSER", "JETTISON_WITHOUT_BROWSER"
PACKAGES = ("chromium", "fonts-liberation")
APT = (["apt-get", "update", "-qq"], ["apt-get", "install", "-y", "-qq", "--no-install-recommends", *PACKAGES])


def find_chromium() -> str | None:
    """The program named by the environment, else one on PATH or in its usual place; None where there is none."""
    named = os.environ.get(NAMED)
    if named:
        return shutil.which(named)
    on_path = (shutil.which(name) for name in NAMES)
    return next((path for path in on_path if path), None) or next((p for p in ELSEWHERE if Path(p).exists()), None)


def needed() -> str:
    """What to do where there is none."""
    named = os.environ.get(NAMED)
    found = f"{NAMED}={named} is no program" if named else "there is no Chromium, Chrome or Edge on PATH"
    return (
        f"the tests of pages need a browser, and {found}: install one (Debian: apt-get install chromium), or "
        f"name one in {NAMED}, or set {WITHOUT}=1 to leave these tests out"
    )


def install() -> bool:
    """Debian's package, where this is root's machine and has apt. Whether there is a browser afterwards."""
    if not hasattr(os, "geteuid") or os.geteuid() != 0 or shutil.which("apt-get") is None:
        return False
    print("installing Debian's chromium for the tests of pages", file=sys.stderr)
    for command in APT:
        done = subprocess.run(
            command, env=os.environ | {"DEBIAN_FRONTEND": "noninteractive"}, stdout=subprocess.DEVNULL, check=False
        )
        if done.returncode != 0:
            return False
    return find_chromium() is not None


def main() -> int:
    """0 where there is a browser, or none is wanted."""
    if os.environ.get(WITHOUT) == "1" or find_chromium() is not None:
        return 0
    if not os.environ.get(NAMED) and install():
        return 0
    print(needed(), file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
