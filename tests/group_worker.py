"""A job of test_launch.py: joins the other processes and leaves them right after a message, many
times."""

import torch

from contaccum.runtime.processes import joined


def main(rounds: list[str]) -> None:
    for _ in range(int(rounds[0])):
        with joined(timeout_minutes=1) as group:
            assert len(group.gather(torch.ones(1))) == group.world == 2
