"""Sizes and times for the eye."""


def gigabytes(size: float) -> str:
    return f"{size / 1e9:.2f} GB"


def duration(seconds: float) -> str:
    """Two units at most: 3 d 4 h, 2 h 5 min, 4 min 10 s, 7.2 s."""
    for name, length, smaller, part in (("d", 86400, "h", 3600), ("h", 3600, "min", 60), ("min", 60, "s", 1)):
        if seconds >= length:
            return f"{int(seconds // length)} {name} {int(seconds % length // part)} {smaller}"
    return f"{seconds:.2g} s"
