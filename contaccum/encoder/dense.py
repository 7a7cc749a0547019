"""Dense layers behind the pooling, as sentence-transformers models of some families have them (LaBSE, distiluse)."""

from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers.utils import cached_file

from contaccum.encoder.sources import optional_json
from contaccum.errors import InputError
from contaccum.files import write_json

WEIGHTS = "model.safetensors"


class Dense(nn.Module):
    """A linear layer and an activation: vectors (n, inputs) to (n, outputs)."""

    def __init__(self, inputs: int, outputs: int, bias: bool, activation: nn.Module) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs, bias=bias)
        self.activation = activation

    def forward(self, vectors: Tensor) -> Tensor:
        return self.activation(self.linear(vectors))

    def save(self, folder: Path) -> None:
        """In the form of a sentence-transformers module."""
        kind = type(self.activation)
        write_json(
            folder / "config.json",
            {
                "in_features": self.linear.in_features,
                "out_features": self.linear.out_features,
                "bias": self.linear.bias is not None,
                "activation_function": f"{kind.__module__}.{kind.__qualname__}",
            },
        )
        save_file({name: tensor.contiguous() for name, tensor in self.state_dict().items()}, folder / WEIGHTS)


def load_dense(name: str, subfolder: str, dtype: torch.dtype) -> Dense:
    """The Dense module in a subfolder of a model's folder or hub name."""
    where = f"{name}/{subfolder}"
    config = optional_json(name, f"{subfolder}/config.json") or {}
    if config.get("use_residual") or config.get("module_input_name", "sentence_embedding") != "sentence_embedding":
        raise InputError(f"{where}: a Dense module with a residual or over tokens, expected one over the pooled vector")
    path = cached_file(name, WEIGHTS, subfolder=subfolder, _raise_exceptions_for_missing_entries=False)
    if path is None:
        raise InputError(f"{where}: a Dense module without {WEIGHTS}, expected its weights in safetensors")
    activation = _activation(config.get("activation_function", "torch.nn.modules.activation.Tanh"), where)
    try:
        layer = Dense(config["in_features"], config["out_features"], config.get("bias", True), activation)
        layer.load_state_dict(load_file(path))
    except (KeyError, TypeError, RuntimeError, SafetensorError) as error:
        reason = " ".join(str(error).split())
        raise InputError(f"{where}: its Dense module could not be loaded ({reason})") from error
    return layer.to(dtype)


def _activation(path: str, where: str) -> nn.Module:
    """An activation of torch.nn by its dotted name; nothing else is imported."""
    kind = getattr(nn, path.rpartition(".")[2], None) if path.startswith("torch.nn.") else None
    if not (isinstance(kind, type) and issubclass(kind, nn.Module)):
        raise InputError(f"{where}: activation_function is {path!r}, expected an activation of torch.nn")
    return kind()
