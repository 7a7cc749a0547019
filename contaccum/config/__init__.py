"""What a training run can be told: the settings, the rules between them, and the file that holds them."""

from contaccum.config.mapping import from_mapping, parse_bytes, to_yaml, value_at
from contaccum.config.rules import check_total, validate
from contaccum.config.settings import (
    GROUPS,
    METRIC_CUTS,
    METRIC_MEASURES,
    AdapterConfig,
    BankConfig,
    BatchConfig,
    DataConfig,
    LossConfig,
    ModelConfig,
    OptimConfig,
    RunConfig,
    TrainConfig,
)
from contaccum.config.traits import TRAITS, MethodName, Traits

__all__ = [
    "GROUPS",
    "METRIC_CUTS",
    "METRIC_MEASURES",
    "TRAITS",
    "AdapterConfig",
    "BankConfig",
    "BatchConfig",
    "DataConfig",
    "LossConfig",
    "MethodName",
    "ModelConfig",
    "OptimConfig",
    "RunConfig",
    "TrainConfig",
    "Traits",
    "check_total",
    "from_mapping",
    "parse_bytes",
    "to_yaml",
    "validate",
    "value_at",
]
