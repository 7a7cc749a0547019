"""Imports go down only, and each heavy library has the one home that the design names."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "contaccum"
FLOORS = [
    {"__main__"},
    {"cli", "__init__"},
    {"experiments", "integrations", "doctor"},
    {"training"},
    {"evaluation"},
    {"retrieval"},
    {"methods", "encoder", "data"},
    {"catalog"},
    {"formats"},
    {"runtime", "config"},
    {"batch", "errors"},
]
MAY_STAND_BESIDE: set[tuple[str, str]] = set()
HOMES = {
    "faiss": {"retrieval/faiss_library.py"},
    "torch.distributed": {"runtime/processes.py", "runtime/sharding.py"},
    "bm25s": {"retrieval/retriever.py"},
    "beir": {"evaluation/beir.py"},
    "pytrec_eval": {"evaluation/metrics.py"},
    "bitsandbytes": {"training/parts.py"},
    "peft": {"encoder/adapters.py"},
    "scipy": {"evaluation/significance.py"},
    "matplotlib": {"experiments/page.py"},
    "sentence_transformers": {"integrations/sentence_transformers.py", "retrieval/negatives.py"},
    "lightning": {"integrations/lightning.py"},
    "huggingface_hub": {
        "catalog/hub_sets.py",
        "catalog/pinned.py",
        "doctor.py",
        "integrations/push.py",
        "runtime/hub.py",
    },
    "pyarrow.parquet": {"catalog/hub_sets.py", "retrieval/shards.py"},
}


def imports(path: Path) -> list[str]:
    """Every module that a file imports, at any depth, type-checking imports left out."""
    found = []
    tree = ast.parse(path.read_text(encoding="utf-8"))
    skipped = {
        id(node)
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and getattr(block.test, "id", "") == "TYPE_CHECKING"
        for node in ast.walk(block)
    }
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            found += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return found


def part_of(module: str) -> str:
    return module.split(".")[1] if "." in module else "__init__"


def floor(part: str) -> int:
    return next(number for number, parts in enumerate(FLOORS) if part in parts)


FILES = sorted(PACKAGE.rglob("*.py"))


def names_of(path: Path) -> tuple[str, str]:
    relative = path.relative_to(PACKAGE)
    return str(relative), relative.parts[0].removesuffix(".py")


def breaches(own: str, modules: list[str]) -> list[str]:
    """The imports that climb, or go sideways where that was not agreed."""
    found = []
    for module in modules:
        if not module.startswith("contaccum."):
            continue
        other = part_of(module)
        if other == own or not any(other in parts for parts in FLOORS):
            continue
        if (own, other) in MAY_STAND_BESIDE:
            continue
        sideways = floor(other) == floor(own) < len(FLOORS) - 1
        if floor(other) < floor(own) or sideways:
            found.append(module)
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_go_down_only(path):
    _, own = names_of(path)
    assert breaches(own, imports(path)) == []


@pytest.mark.parametrize(("library", "homes"), HOMES.items())
def test_each_library_has_its_home(library, homes):
    users = {
        names_of(path)[0]
        for path in FILES
        if any(module == library or module.startswith(f"{library}.") for module in imports(path))
    }
    assert users == homes


def test_the_rule_sees_a_breach():
    """Negative control."""
    assert breaches("methods", ["contaccum.training.loop"]) == ["contaccum.training.loop"]
    assert breaches("methods", ["contaccum.encoder"]) == ["contaccum.encoder"]
    assert breaches("encoder", ["contaccum.runtime.files", "contaccum.batch"]) == []
