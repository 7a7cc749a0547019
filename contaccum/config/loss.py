"""Options of the loss. This module does not import torch."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from contaccum.config.declare import setting

if TYPE_CHECKING:
    from contaccum.config import TrainConfig


@dataclass
class LossConfig:
    """Negatives of the loss, and additional training targets."""

    mask_false_negatives: bool = True
    """Mask negatives that are known, by their passage id, to be relevant for the query. This applies to the negatives of the
    batch and of the bank."""
    guide: str | None = None
    """Encoder that finds false negatives: a folder or a name on the Hub, which may be `model.name`. A negative
    (in-batch, hard, or from the bank) is masked if its score by the guide is above the positive's score by the guide minus
    `guide_margin`. The guide encodes all training queries and passages once. Its vectors are kept in the cache, in float16.
    Default: no guide."""
    guide_margin: float = setting(0.0, needs="loss.guide")
    """Margin for `guide`, see `margin_strategy`. A larger margin masks more negatives."""
    false_negative_margin: float | None = None
    """Mask negatives whose score from the trained model is above the score of the query's positive minus this margin, see
    `margin_strategy`. The scores are similarities, not divided by `model.temperature`. Default: no such mask."""
    margin_strategy: Literal["absolute", "relative"] = setting(
        "absolute", unused_with=("loss.false_negative_margin null",), used_with="loss.guide"
    )
    """Meaning of `guide_margin` and `false_negative_margin`: a difference of scores (absolute), or a share of the positive's
    score (relative, from 0 to 1)."""
    hardness: float = setting(0.0, at_least=0)
    """Weight the negatives by exp(hardness x similarity), so that negatives similar to the query count more. The weight has no
    gradient. Negatives of the batch and of the bank are weighted. The similarity is not divided by the temperature."""
    symmetric: bool = False
    """Also compare each positive with all queries of the batch and of the bank. The loss is the mean of the two directions, from
    query to passage and from passage to query. Hard negatives are compared only in the direction from query to passage. The
    method `passage_bank` stores no queries."""
    matryoshka_dims: list[int] = setting(factory=list, unit="dimensions")
    """Widths to which vectors may be truncated after training, such as [256, 128, 64]. The loss at each width is added to the
    loss of the full vectors. With cosine, truncated vectors are scaled to length 1 again. Each width has its own bank."""
    matryoshka_weights: list[float] = setting(factory=list)
    """Weight of the loss at each width of `matryoshka_dims`. The loss of the full vectors has weight 1. Default: 1 for each
    width."""
    distillation: Literal["none", "kl", "margin"] = "none"
    """Learn also from the scores that a teacher gives to the positive and the hard negatives of each query. The training data
    must contain these scores. `kl` is the KL divergence from the softmax of the teacher. `margin` is the squared error of score
    differences (margin-MSE). The scores of the model are similarities divided by `model.temperature`."""
    distillation_weight: float = setting(1.0, above=0, unused_with=("loss.distillation none",))
    """Weight of the distillation loss. The InfoNCE loss has weight 1."""
    teacher_temperature: float = setting(1.0, above=0, unused_with=("loss.distillation none",))
    """Number by which the scores of the teacher are divided."""

    def broken(self, config: "TrainConfig", world: int) -> Iterator[str]:
        widths, weights = self.matryoshka_dims, self.matryoshka_weights
        if any(width < 1 for width in widths) or len(set(widths)) < len(widths):
            yield f"loss.matryoshka_dims is {widths}, expected integers of at least 1, each only once"
        if weights and len(weights) != len(widths):
            yield f"loss.matryoshka_weights has {len(weights)} numbers, expected {len(widths)}: one per width in matryoshka_dims"
        if not all(0 < weight < math.inf for weight in weights):
            yield f"loss.matryoshka_weights is {weights}, expected finite numbers above 0"
        yield from self._broken_margins(config)
        if config.distils and not config.data.hard_negatives:
            found = f"loss.distillation is {self.distillation}, but data.hard_negatives is 0"
            yield f"{found}; set it to at least 1, because the teacher's scores compare a positive with hard negatives"

    @property
    def margin(self) -> float | None:
        """Margin of the similarity rule (see ``contaccum.methods.masking``). None: no similarity rule."""
        return self.guide_margin if self.guide is not None else self.false_negative_margin

    def _broken_margins(self, config: "TrainConfig") -> Iterator[str]:
        obstacles = {
            "which has random weights and cannot detect false negatives; give a trained encoder": self.guide == "tiny",
            "which computes no vectors; give an encoder": self.guide == "bm25",
            "expected a folder or a name on the Hub": self.guide == "",
        }
        yield from (f"loss.guide is {self.guide!r}, {why}" for why, found in obstacles.items() if found)
        if self.guide is not None and config.data.streaming:
            yield "loss.guide is set, but data.streaming is true; a stream is read only once, so use data.streaming false"
        if self.guide is not None and self.false_negative_margin is not None:
            yield "loss.guide and loss.false_negative_margin are both set; set only one (the margin of a guide is guide_margin)"
        name = "guide_margin" if self.guide is not None else "false_negative_margin"
        if self.margin_strategy == "relative" and not 0 <= (self.margin or 0.0) <= 1:
            yield f"loss.{name} is {self.margin}, expected a number from 0 to 1, because loss.margin_strategy is relative"
