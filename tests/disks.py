"""Small and read-only file systems for tests; they skip with their reason where none can be mounted."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def small_disk(folder: Path, size: int = 1 << 20) -> Iterator[Path]:
    """A file system of ``size`` bytes in memory, mounted at ``folder``."""
    with _mounted(folder, f"size={size}"):
        yield folder


@contextmanager
def read_only(folder: Path) -> Iterator[Path]:
    """A file system that nobody can write to, root included, mounted at ``folder``."""
    with _mounted(folder, "ro"):
        yield folder


@contextmanager
def _mounted(folder: Path, options: str) -> Iterator[None]:
    folder.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        pytest.skip(f"needs the right to mount a file system ({done.stderr.strip()})")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)
