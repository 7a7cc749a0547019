"""Train dense retrievers under a fixed memory budget, and weigh the ways to do it against each other.

The library's door: ``from contaccum import DualEncoder, TrainConfig, train, evaluate, search``. Each name is imported when it
is first used, so that importing the package is quick.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from contaccum.api import evaluate, search
    from contaccum.config import TrainConfig
    from contaccum.encoder import DualEncoder
    from contaccum.errors import InputError
    from contaccum.training.loop import train

__version__ = "0.1.0"
__all__ = ["DualEncoder", "InputError", "TrainConfig", "evaluate", "search", "train"]

_HOMES = {
    "DualEncoder": "contaccum.encoder",
    "InputError": "contaccum.errors",
    "TrainConfig": "contaccum.config",
    "evaluate": "contaccum.api",
    "search": "contaccum.api",
    "train": "contaccum.training.loop",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'contaccum' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
