"""Memory sizes as people write and read them."""

import re

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_SIZE = re.compile(r"(\d{1,18}(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", re.IGNORECASE)


def parse_size(text: str, *, or_none: bool = False) -> int:
    """Bytes of "512MiB", "4GiB", "1.5G" or "1048576"; units are powers of 1024. Raises ValueError.

    or_none: 0 is an answer too.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is not None:
        number = float(match[1])
        num_bytes = int(number * _UNITS[match[2].upper()])
        if num_bytes or (or_none and number == 0):
            return num_bytes
    raise ValueError(f"{text!r} is not a memory size; write it like 4GiB or 512MiB")


def format_size(num_bytes: int, *, up: bool = False) -> str:
    """1536 MiB as "1.5GiB", in the spelling that --memory takes; `up` rounds to enough."""
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if num_bytes >= scale:
            tenths = -(-num_bytes * 10 // scale) if up else round(num_bytes * 10 / scale)
            return f"{tenths / 10:g}{unit}"
    return f"{num_bytes}B"
