"""Bytes and seconds, as people write and read them."""

import re

_UNITS = {
    "": 1,
    "b": 1,
    **{f"{u}b": 1000 ** (i + 1) for i, u in enumerate("kmgt")},
    **{f"{u}ib": 1024 ** (i + 1) for i, u in enumerate("kmgt")},
}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", re.I)


def parse_bytes(name: str, size: int | str) -> int:
    """A number of bytes from an integer, or from text such as "24GiB" or "500 MB".

    Args:
      name: what is given, for the error.
      size: the bytes.

    Raises:
      ValueError: it is none, or not above 0.

    Examples:
      >>> parse_bytes("memory", "1.5GiB")
      1610612736
    """
    if isinstance(size, str):
        found = _SIZE.fullmatch(size)
        unit = _UNITS.get(found[2].lower()) if found else None
        count = int(float(found[1]) * unit) if found and unit else 0
    else:
        count = int(size) if not isinstance(size, bool) else 0
    if count <= 0:
        raise ValueError(
            f"{name}={size!r} is no number of bytes above 0; write for instance "
            '"24GiB", "500MiB" or an integer'
        )
    return count


def bytes_text(count: int) -> str:
    """Bytes in the largest binary unit that leaves a number above 1."""
    size, units = float(count), ["KiB", "MiB", "GiB", "TiB"]
    if abs(size) < 1024:
        return f"{count} B"
    while abs(size) >= 1024 and units:
        size, unit = size / 1024, units.pop(0)
    return f"{size:,.2f} {unit}"


def seconds_text(seconds: float) -> str:
    """A time with three digits that count."""
    for scale, unit in ((1, "s"), (1e-3, "ms")):
        if seconds >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds / 1e-6:.3g} us"


def flops_text(flops: float) -> str:
    """Operations in GFLOP, or TFLOP where there are very many."""
    large = flops >= 1e13
    return f"{flops / (1e12 if large else 1e9):,.1f} {'TFLOP' if large else 'GFLOP'}"
