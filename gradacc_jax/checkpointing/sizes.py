"""Numbers of bytes, as people write and read them."""

import math
import numbers
import re
from typing import Any

_UNITS = {"B": 1, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
_UNITS |= {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


def parse_size(name: str, given: Any) -> int:
    """A number of bytes from what a user gave.

    Args:
      name: of the option, for errors.
      given: a number of bytes, or a string such as "200MiB" or "1.5 GB".

    Returns:
      The number, a positive integer.

    Raises:
      ValueError: for anything else.

    Examples:
      >>> parse_size("max_temp_bytes", "1.5 KiB")
      1536
    """
    nbytes: Any = given
    if isinstance(given, str):
        found = re.fullmatch(r"\s*([\d.]+(?:[eE]\d+)?)\s*([a-zA-Z]*)\s*", given)
        unit = _UNITS.get((found[2] or "B").upper()) if found else None
        if found is None or unit is None or found[1].count(".") > 1:
            raise ValueError(
                f"{name}={given!r} is no number of bytes; write an integer, or a "
                'string like "200MiB" or "1.5GB"'
            )
        nbytes = float(found[1]) * unit
    is_number = isinstance(nbytes, numbers.Real) and not isinstance(nbytes, bool)
    if not is_number:
        raise ValueError(
            f"{name}={given!r} is no number of bytes; write an integer, or a string "
            'like "200MiB"'
        )
    if not 0 < nbytes < math.inf:
        raise ValueError(f"{name}={given!r} is no number of bytes above 0; choose one")
    return int(nbytes)


def size_text(nbytes: float) -> str:
    """A number of bytes in three digits, such as ``"1.46 KiB"``."""
    for unit, bits in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if (value := nbytes / 2**bits) >= 0.9995:
            return f"{value:.{max(0, 2 - int(math.log10(value + 0.0005)))}f} {unit}"
    return f"{nbytes:.0f} B"
