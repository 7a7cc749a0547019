"""Partial replay: the second pass of GradCache encodes only a random sample of the texts.

A text with a large gradient is more likely to be in the sample. Text i has the cached gradient g_i
and is kept with probability pi_i = min(1, c |g_i|). The number c is chosen so that the sum of all
pi_i is share * n, where share is ``replay.share`` and n is the number of texts. The gradient of a
kept text is multiplied by 1 / pi_i. With these weights alone, the expected gradient is the gradient
of GradCache. With independent draws, the sampling would add a variance of the sum of
|g_i|^2 (1 / pi_i - 1), and these probabilities would make it smallest. The systematic sample
changes it, and ``missing_gradient`` lowers it, for a small bias. Training has no dropout, because
the second pass would draw new noise. Sources: Horvitz and Thompson 1952 (weights 1 / pi); Madow
1949 (systematic sampling).
"""

import torch
from torch import Tensor

from contaccum.methods.step_engine import StepEngine, StepTexts

HUGE = 1e300
"""Value that replaces a NaN or infinite gradient norm. With it, replay keeps the text, so the
training loop finds the error."""


def sample(
    engine: StepEngine, texts: StepTexts, gradients: tuple[Tensor, Tensor]
) -> tuple[tuple[Tensor, Tensor], Tensor, dict[str, float | Tensor]]:
    """Choose the texts of the second pass, and weight their gradients.

    gradients: with respect to the queries (N, d) and the passages (N, 1 + H, d). Queries and
    passages are sampled separately. Returns the weighted gradients, the numbers of the chosen texts
    of this process (see ``Pass``), and statistics: the ratio of chosen texts to all texts, and the
    relative variance, which is the variance that the sampling adds, divided by the sum of the
    squared gradient norms.
    """
    weighted, of_texts = [], []
    kept, count, noise, signal = 0, 0, 0.0, 0.0
    for side, of_side in enumerate(gradients):
        flat = of_side.flatten(0, -2)  # (texts, d)
        weights, added, total = sample_texts(flat, engine.replay_share, engine.uniform(side))
        # rows of texts that are not kept are never read
        balanced = flat * weights.to(flat).unsqueeze(1) + missing_gradient(flat, weights)
        weighted.append(balanced.view_as(of_side))
        of_texts.append(weights.view(of_side.shape[:-1]))
        kept, count = kept + int(weights.count_nonzero()), count + len(weights)
        noise, signal = noise + added, signal + total
    chosen = texts.own_rows(*of_texts).nonzero().flatten()
    statistics: dict[str, float | Tensor] = {
        "replay_share": kept / count,
        "replay_variance": noise / signal if signal else 0.0,
    }
    return (weighted[0], weighted[1]), chosen, statistics


def sample_texts(gradients: Tensor, share: float, offset: float) -> tuple[Tensor, float, float]:
    """Sample about share * n of n texts. A text with a larger gradient is more likely to be kept.

    gradients: (n, d). offset: random number in [0, 1). Returns (weights, noise, signal). weights:
    (n,) on the CPU, 1 / p for a text that was kept with probability p, 0 for the other texts.
    noise: variance that independent draws would add (see above). signal: sum of |g_i|^2.
    """
    norms = gradients.float().norm(dim=1).cpu().double()  # (n,); this copy waits for the device
    probabilities = keep_probabilities(norms, share * len(norms))
    kept = systematic_sample(probabilities, offset)
    weights = torch.zeros_like(norms)
    weights[kept] = 1 / probabilities[kept]
    drawn = probabilities > 0  # the other texts have probability 0 and no gradient
    noise = (norms[drawn].square() * (1 / probabilities[drawn] - 1)).sum()
    return weights.float(), float(noise), float(norms.square().sum())


def missing_gradient(gradients: Tensor, weights: Tensor) -> Tensor:
    """Return a correction (d,) to add to the weighted gradient of each text that replay keeps.

    gradients: of all n texts, (n, d). weights: 1 / probability for a kept text, 0 for the others,
    (n,). With the correction, the weighted gradients of the kept texts have the same sum as the
    gradients of all texts. For example, in the query-to-passage loss without a bank, the gradients
    of all passages sum to 0. Without the correction, the weighted gradients of the kept passages
    would have another sum, and this sum would move all passage embeddings in one direction. The
    correction has a bias of order 1 / (number of kept texts).
    """
    weights = weights.to(gradients)
    return (gradients.sum(0) - weights @ gradients) / (weights > 0).sum().clamp(min=1)


def keep_probabilities(norms: Tensor, expected: float) -> Tensor:
    """Return the probability of keeping each text: min(1, c * norm), (n,) float64.

    The number c is chosen so that the sum of the probabilities is ``expected``. An ``expected``
    below 1 counts as 1. If fewer than ``expected`` texts have a gradient norm above 0, these texts
    get probability 1, and all texts with norm 0 get the same probability.
    """
    norms = norms.double().nan_to_num(nan=HUGE, posinf=HUGE)
    expected = min(max(expected, 1.0), float(len(norms)))
    ordered, order = norms.sort(descending=True)
    # for each norm, the sum of this norm and all smaller ones; small norms are added first
    tails = ordered.flip(0).cumsum(0).flip(0)
    certain = 0  # number of texts with probability 1; these texts have the largest norms
    while certain < expected and ordered[certain] * (expected - certain) >= tails[certain] > 0:
        certain += 1
    probabilities = torch.ones_like(norms)
    if certain < len(norms):
        tail, total = ordered[certain:], tails[certain]
        shares = tail / total if total > 0 else torch.full_like(tail, 1 / len(tail))
        probabilities[order[certain:]] = (shares * (expected - certain)).clamp(max=1)
    return probabilities


def systematic_sample(probabilities: Tensor, offset: float) -> Tensor:
    """Keep text i with probability ``probabilities[i]``.

    Return the indices of the kept texts in ascending order.

    Each text has an interval whose length is its probability. The intervals follow each other on a
    line that starts at 0. A text is kept if its interval contains one of the points offset, offset
    + 1, offset + 2 and so on. The number of kept texts is therefore the sum of the probabilities,
    rounded up or down.
    """
    # kept in any case, because rounding could move the point out of the interval
    is_certain = probabilities > 1 - 1e-9
    certain = is_certain.nonzero().flatten()
    # without probability 0: rounding could move the last point beyond the last interval
    uncertain = (~is_certain & (probabilities > 0)).nonzero().flatten()
    ends = probabilities[uncertain].cumsum(0)
    total = round(float(ends[-1]), 6) if len(ends) else 0.0
    points = (
        torch.arange(offset, total, 1.0, dtype=torch.float64)
        if offset < total
        else ends.new_zeros(0)
    )
    chosen = torch.searchsorted(ends, points, right=True).clamp(max=len(ends) - 1)
    return torch.cat([certain, uncertain[chosen]]).sort().values
