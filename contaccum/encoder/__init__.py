"""The encoders: two towers, pooling, similarity, and the folders that they are loaded from and saved to."""

from contaccum.encoder.dual import DualEncoder
from contaccum.encoder.settings import EncoderSettings, make_settings
from contaccum.encoder.sources import Source
from contaccum.encoder.tower import Tower, load_tower, pool

__all__ = ["DualEncoder", "EncoderSettings", "Source", "Tower", "load_tower", "make_settings", "pool"]
