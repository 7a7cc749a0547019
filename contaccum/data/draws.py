"""Random numbers by key: what is drawn depends on the seed and on what it is for, never on what was drawn before."""

import numpy as np

# independent random streams: more hard negatives leave the positives as they were
ORDER, POSITIVES, NEGATIVES, SETS, SHUFFLE, MEMBER = range(6)


def random_stream(*key: int) -> np.random.Generator:
    """The generator of a key: a seed, one of the numbers above, and a step or an epoch."""
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(key)))
