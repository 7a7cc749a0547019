"""Text of the page on PyPI: README.md, with relative links made absolute.

Everything else about the package is in pyproject.toml.
"""

import re
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent
project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
(home,) = re.findall('^Homepage = "(.+)"$', project, re.MULTILINE)
setup(
    long_description=re.sub(
        r"(!?)(\[[^]]*\]\()(?!https:)",
        lambda link: f"{link[1]}{link[2]}{home}/{'raw' if link[1] else 'blob'}/main/",
        (ROOT / "README.md").read_text(encoding="utf-8"),
    ),
    long_description_content_type="text/markdown",
)
