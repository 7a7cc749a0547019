"""How an encoder runs when it only encodes: batches of a fixed number of tokens."""

from collections.abc import Iterator, Sequence

import torch

WINDOW = 4096  # texts that are sorted together: enough for little padding, few enough to be tokenised ahead
CPU_TOKENS = 1024  # for each thread: the widest layer's output, 6 MB at a width of 384, then stays in the cache
DEVICE_TOKENS = 16_384
PACK_FROM = 64  # texts: packing the linear layers costs about as much as encoding a few of them


def default_batch_tokens(device: torch.device) -> int:
    """Tokens in one forward pass where nothing else is asked for."""
    return min(CPU_TOKENS * torch.get_num_threads(), DEVICE_TOKENS) if device.type == "cpu" else DEVICE_TOKENS


def token_batches(lengths: Sequence[int], budget: int) -> Iterator[list[int]]:
    """Indices of texts that share a forward pass, longest first: little padding, and too large a budget fails at once.

    No batch holds more than ``budget`` tokens, padding counted, but a text longer than that is a batch of its own.
    """
    order = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    start = 0
    while start < len(order):
        size = max(1, budget // max(1, lengths[order[start]]))
        yield order[start : start + size]
        start += size
