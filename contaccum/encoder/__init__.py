"""The encoders: two towers, pooling, similarity, and the folders that they are loaded from and saved to."""

from contaccum.encoder.adapters import Adapters
from contaccum.encoder.dual import DualEncoder
from contaccum.encoder.loading import load_tower
from contaccum.encoder.settings import EncoderSettings, make_settings
from contaccum.encoder.sources import Source
from contaccum.encoder.tower import Tower, pool

__all__ = ["Adapters", "DualEncoder", "EncoderSettings", "Source", "Tower", "load_tower", "make_settings", "pool"]
