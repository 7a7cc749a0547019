"""Counts, sizes and durations as text."""


def counted(number: int, noun: str) -> str:
    """Return a number and its noun, such as: 1 query, 2 queries, 0 hard negatives."""
    if number == 1:
        return f"1 {noun}"
    return f"{number} {noun[:-1]}ies" if noun.endswith("y") else f"{number} {noun}s"


def gigabytes(size: float) -> str:
    return f"{size / 1e9:.2f} GB"


def duration(seconds: float) -> str:
    """Return a duration as text with one or two units, such as: 3 d 4 h, 2 h, 4 min 10 s, 7.2 s."""
    for name, length, smaller, part in (
        ("d", 86400, "h", 3600),
        ("h", 3600, "min", 60),
        ("min", 60, "s", 1),
    ):
        if seconds >= length:
            rest = int(seconds % length // part)
            return f"{int(seconds // length)} {name}" + (f" {rest} {smaller}" if rest else "")
    return f"{seconds:.2g} s"
