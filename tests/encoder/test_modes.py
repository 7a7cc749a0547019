"""Models and checkpoints follow the umask, so that colleagues on a shared mount can load them."""

import os
import stat

import pytest
from tiny_families import family_folder

from contaccum import DualEncoder
from contaccum.config import AdapterConfig
from contaccum.encoder import Adapters


def modes(folder) -> set[str]:
    return {oct(stat.S_IMODE(path.stat().st_mode)) for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(params=[0o077, 0o002])
def umask(request):
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def test_models_follow_the_umask(umask, tmp_path):
    base = family_folder("bert", tmp_path / "base")
    size = {"max_query_length": 8, "max_passage_length": 8}
    DualEncoder.load(base, **size).save(tmp_path / "tied")
    DualEncoder.load(base, tie_towers=False, **size).save(tmp_path / "two")
    DualEncoder.load(base, adapters=Adapters(AdapterConfig(rank=2)), **size).save(
        tmp_path / "adapter"
    )
    for name in ("tied", "two", "adapter"):
        assert modes(tmp_path / name) == {oct(0o666 & ~umask)}, name
