"""Small numbers in as few bytes as they need: seven bits each, the last one's top bit clear."""

from __future__ import annotations

from collections.abc import Iterable


def varints(numbers: Iterable[int]) -> bytes:
    """Each number from 0 on, one after the other."""
    data = bytearray()
    for number in numbers:
        while number > 127:
            data.append(number & 127 | 128)
            number >>= 7
        data.append(number)
    return bytes(data)


def read_varints(data: bytes, at: int, count: int) -> tuple[list[int], int]:
    """``count`` numbers from byte ``at`` on, and where the last one ends.

    Raises ``IndexError`` when there are fewer.
    """
    numbers: list[int] = []
    for _ in range(count):
        number, shift = data[at] & 127, 7
        while data[at] > 127:
            at += 1
            number |= (data[at] & 127) << shift
            shift += 7
        at += 1
        numbers.append(number)
    return numbers, at
