"""Job of test_out_of_memory.py: the last process runs out of memory in step 2.

arguments: DATA OUTPUT
"""

from pathlib import Path

import pytest
from helpers import train_config
from training.test_out_of_memory import CHANGES, spoil

from contaccum.config import validate
from contaccum.runtime.engine import Engine
from contaccum.runtime.launch import StopSignals
from contaccum.training import run_folder
from contaccum.training.loop import Training

CASES = [
    ("forward", "cont_accum", 4 + 2, {}),
    ("gather", "cont_accum", 4 + 2, {}),
    ("gather", "cont_cache", 4 + 2, {"replay.share": 0.5}),
    ("loss", "cont_cache", 1 + 1, {}),
    ("backward", "cont_accum", 4 + 2, {}),
]
"""Place, method and failing call, in the second step: the second call of its kind if there are several."""


def main(arguments: list[str]) -> None:
    data, output = arguments
    for place, method, call, more in CASES:
        engine = Engine(device="cpu", replay_share=more.get("replay.share", 1.0))
        changes = {
            **CHANGES,
            **more,
            "batch.micro_batch_size": 4 // engine.world,
            "optim.max_steps": 3,
            "run.save_steps": 0,
        }
        config = train_config(Path(data), Path(output) / f"{place}-{method}", method, **changes)
        validate(config, engine.world)
        with run_folder.claimed_folder(config), pytest.MonkeyPatch.context() as patch:
            training = Training(config, engine)
            if engine.rank == engine.world - 1:
                alone = engine.world == 1 and place == "gather"  # gathers nothing
                spoil(patch, "forward" if alone else place, call, above=2 // engine.world)
            training.run(StopSignals())
