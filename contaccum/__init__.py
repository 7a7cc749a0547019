"""Fine-tune embedding models for search with large batches, holding only a few pairs in memory.

Use the package as a library with ``from contaccum import DualEncoder, TrainConfig, train, evaluate,
search``. Each name is imported from its module at the first use, so ``import contaccum`` is fast.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from contaccum.config import TrainConfig
    from contaccum.encoder import DualEncoder, merge
    from contaccum.errors import InputError
    from contaccum.evaluation.answers import evaluate_questions
    from contaccum.evaluation.benchmark import evaluate_benchmark
    from contaccum.evaluation.evaluate import evaluate
    from contaccum.evaluation.run_files import evaluate_run_file
    from contaccum.retrieval.encode import encode
    from contaccum.retrieval.mine import mine
    from contaccum.retrieval.retriever import Retriever, look, search
    from contaccum.training.loop import train

__version__ = "0.3.0"
__all__ = [
    "DualEncoder",
    "InputError",
    "Retriever",
    "TrainConfig",
    "encode",
    "evaluate",
    "evaluate_benchmark",
    "evaluate_questions",
    "evaluate_run_file",
    "look",
    "merge",
    "mine",
    "search",
    "train",
]

_HOMES = {
    "DualEncoder": "contaccum.encoder",
    "InputError": "contaccum.errors",
    "TrainConfig": "contaccum.config",
    "Retriever": "contaccum.retrieval.retriever",
    "encode": "contaccum.retrieval.encode",
    "evaluate": "contaccum.evaluation.evaluate",
    "evaluate_benchmark": "contaccum.evaluation.benchmark",
    "evaluate_questions": "contaccum.evaluation.answers",
    "evaluate_run_file": "contaccum.evaluation.run_files",
    "look": "contaccum.retrieval.retriever",
    "merge": "contaccum.encoder",
    "mine": "contaccum.retrieval.mine",
    "search": "contaccum.retrieval.retriever",
    "train": "contaccum.training.loop",
}


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})  # shells complete names from this list


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'contaccum' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
