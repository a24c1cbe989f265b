"""Bytes, seconds and operations, as the tables of planning show them."""


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
