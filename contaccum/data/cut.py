"""How the pairs of one optimizer step are divided into micro-batches: by number of pairs, or by padded tokens.

A cut is a list of position lists (W * B_k,), one per micro-batch: which of the step's N pairs it holds, those of process 0
first, then those of process 1, equally many each. It is a pure function of the step's rows, so that every process finds the
same one by itself.
"""

import numpy as np


def cut_by_pairs(pairs: int, size: int, world: int) -> list[np.ndarray]:
    """Micro-batches of ``size`` pairs per process, in the step's own order."""
    width = size * world
    assert pairs % width == 0, "the configuration divides the global batch evenly"
    return np.split(np.arange(pairs), range(width, pairs, width))


def cut_by_tokens(queries: np.ndarray, passages: np.ndarray, budget: int, world: int) -> list[np.ndarray]:
    """Micro-batches of pairs of like length, each of at most ``budget`` padded tokens in each process.

    queries (N,) and passages (N, 1 + H) are lengths in tokens. B pairs cost B * (longest query + (1 + H) * longest passage).
    The pairs are sorted, the longest first (so what is too large fails at once), and divided into as few micro-batches as the
    budget allows; among those cuts, the one whose largest micro-batch is smallest. The unit is W pairs of like length, one per
    process, so that all processes have equally many rows.
    """
    longest = passages.max(axis=1)
    order = np.lexsort((-queries, -longest)).reshape(-1, world)  # (N / W, W); stable
    query_tokens = queries[order].max(axis=1)
    passage_tokens = longest[order].max(axis=1) * passages.shape[1]  # falls from unit to unit
    alone = int((query_tokens + passage_tokens).max())
    assert alone <= budget, "BatchSource refuses a budget below its longest pair"
    fewest = len(_ends(query_tokens, passage_tokens, budget))
    low, high = alone, budget
    while low < high:
        middle = (low + high) // 2
        if len(_ends(query_tokens, passage_tokens, middle)) > fewest:
            low = middle + 1
        else:
            high = middle
    ends = _ends(query_tokens, passage_tokens, low)
    return [order[start:end].T.reshape(-1) for start, end in zip([0, *ends[:-1]], ends, strict=True)]


def _ends(query_tokens: np.ndarray, passage_tokens: np.ndarray, limit: int) -> list[int]:
    """Where micro-batches end that are filled one after the other up to ``limit``; no cut into runs needs fewer."""
    ends = [0]
    while ends[-1] < len(query_tokens):
        start = ends[-1]
        tokens = int(passage_tokens[start])
        widest = np.maximum.accumulate(query_tokens[start : start + limit // tokens])
        costs = np.arange(1, len(widest) + 1) * (widest + tokens)
        ends.append(start + int(np.searchsorted(costs, limit, side="right")))
    return ends[1:]
