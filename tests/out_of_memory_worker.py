"""A job of test_out_of_memory.py: runs in which the last process runs out of memory in step 2.

arguments: DATA OUTPUT
"""

from pathlib import Path

import pytest
from helpers import train_config
from training.test_out_of_memory import CHANGES, spoil

from contaccum.config import validate
from contaccum.engine import Engine
from contaccum.training.loop import Training
from contaccum.training.signals import StopSignals

CASES = {
    "forward": ("cont_accum", 4 + 2),
    "gather": ("cont_accum", 4 + 2),
    "loss": ("cont_cache", 1 + 1),
    "backward": ("cont_accum", 4 + 2),
}
"""The method, and the call that fails: the second of its kind in the second step where there are several."""


def main(arguments: list[str]) -> None:
    data, output = arguments
    for place, (method, call) in CASES.items():
        engine = Engine(device="cpu")
        changes = {**CHANGES, "batch.micro_batch_size": 4 // engine.world, "optim.max_steps": 3, "run.save_steps": 0}
        config = train_config(Path(data), Path(output) / f"{place}-{method}", method, **changes)
        validate(config, engine.world)
        training = Training(config, engine)
        with pytest.MonkeyPatch.context() as patch:
            if engine.rank == engine.world - 1:
                alone = engine.world == 1 and place == "gather"  # gathers nothing
                spoil(patch, "forward" if alone else place, call, above=2 // engine.world)
            training.run(StopSignals())
