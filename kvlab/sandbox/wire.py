"""Values as bytes and back, for two processes of which one must not trust the other.

Plain data crosses as data and arrives as exactly the built-in type: a list subclass with an `__eq__` of its own arrives
as a list. What is no data stays where it is and crosses as a reference, which the other side can use but not look
into. Decoding runs nothing that the bytes name. Shared and cyclic lists, dicts and sets stay shared and cyclic.

Beside built-in types those of `_KNOWN` cross, by their arguments. Everything else is up to `foreign` and `reference`.
"""

import collections
import datetime
import decimal
import fractions
import struct
from collections.abc import Callable, Iterable
from typing import Any

# Classes that may cross by name. None of them runs code when called with plain data.
PLAIN_TYPES = (bool, bytearray, bytes, complex, dict, float, frozenset, int, list, object, set, str, tuple, type(None))
_TYPE_NAMES = {kind.__name__: kind for kind in PLAIN_TYPES}
_SINGLE: dict[bytes, object] = {b"N": None, b"T": True, b"F": False, b"E": ..., b"I": NotImplemented}
_SINGLE_TAGS = {id(value): tag for tag, value in _SINGLE.items()}


def _plain_time(x: datetime.time | datetime.datetime) -> bool:
    return x.tzinfo is None and not x.fold


# Standard classes that cross by name and arguments. `None` from the function: this one stays a reference.
_KNOWN: dict[type, Callable[[Any], tuple | None]] = {
    collections.Counter: lambda x: (dict(dict.items(x)),),
    collections.OrderedDict: lambda x: (list(dict.items(x)),),
    collections.defaultdict: lambda x: (
        (x.default_factory, dict(dict.items(x))) if x.default_factory in (None, *PLAIN_TYPES) else None
    ),
    collections.deque: lambda x: (list(x), x.maxlen),
    decimal.Decimal: lambda x: (str(x),),
    fractions.Fraction: lambda x: (x.numerator, x.denominator),
    datetime.date: lambda x: (x.year, x.month, x.day),
    datetime.timedelta: lambda x: (x.days, x.seconds, x.microseconds),
    datetime.time: lambda x: (x.hour, x.minute, x.second, x.microsecond) if _plain_time(x) else None,
    datetime.datetime: lambda x: (
        (x.year, x.month, x.day, x.hour, x.minute, x.second, x.microsecond) if _plain_time(x) else None
    ),
}
_KNOWN_NAMES = {kind.__name__: kind for kind in _KNOWN}


class MalformedError(ValueError):
    """Bytes that no honest encoder writes."""


class TooLongError(Exception):
    """A message longer than the limit."""


class Encoder:
    """One message. `foreign(value)` gives the tag and number under which a value that is no data crosses.

    Raises TooLongError once `most_bytes` are passed, before what is too long is copied.
    """

    def __init__(self, foreign: Callable[[object], tuple[bytes, int]], most_bytes: int) -> None:
        self.foreign, self.most_bytes, self.size = foreign, most_bytes, 0
        self.parts: list[bytes | bytearray] = []
        self.seen: dict[int, int] = {}
        self.kept: list[object] = []  # ids must not be used again while this message is written

    def bytes_of(self, value: object) -> bytes:
        self.put(value)
        return b"".join(self.parts)

    def put(self, value: Any) -> None:
        tag = _SINGLE_TAGS.get(id(value))
        if tag is not None:
            self._add(tag)
        elif isinstance(value, int):
            # The C function itself: a subclass can not put other digits in their place.
            self._block(b"i", int.to_bytes(value, int.bit_length(value) // 8 + 1, "little", signed=True))
        elif isinstance(value, float):
            self._add(b"f" + struct.pack("<d", value))
        elif isinstance(value, str):
            self._room(str.__len__(value))
            self._block(b"s", str.encode(value, "utf-8", "surrogatepass"))
        elif isinstance(value, (list, dict, set, bytearray)):
            self._shared(value)
        elif isinstance(value, (tuple, frozenset)):
            self._many(b"t" if isinstance(value, tuple) else b"z", value)
        else:
            self._rare(value)

    def _room(self, size: int) -> None:
        if self.size + size > self.most_bytes:
            raise TooLongError(f"more than {self.most_bytes} bytes in one value")

    def _add(self, part: bytes | bytearray) -> None:
        self._room(len(part))
        self.size += len(part)
        self.parts.append(part)

    def _block(self, tag: bytes, data: bytes | bytearray) -> None:
        self._room(len(data))
        self._add(tag + struct.pack("<I", len(data)))
        self._add(data)

    def _many(self, tag: bytes, values: Iterable[object]) -> None:
        items = list(values)
        self._add(tag + struct.pack("<I", len(items)))
        for item in items:
            self.put(item)

    def _shared(self, value: Any) -> None:
        before = self.seen.get(id(value))
        if before is not None:
            self._add(b"&" + struct.pack("<I", before))
            return
        known = self._known(value)
        self.seen[id(value)] = len(self.seen)
        self.kept.append(value)
        if known is not None:
            self._many(b"k", known)
        elif isinstance(value, dict):
            self._many(b"d", [part for pair in dict.items(value) for part in pair])
        elif isinstance(value, list):
            self._many(b"l", list.__iter__(value))
        elif isinstance(value, set):
            self._many(b"S", set.__iter__(value))
        else:
            self._block(b"a", value)

    def _rare(self, value: Any) -> None:
        if isinstance(value, bytes):
            self._block(b"b", value)
        elif isinstance(value, complex):
            self._add(b"c" + struct.pack("<dd", value.real, value.imag))
        elif type(value) is range:
            self._many(b"R", (value.start, value.stop, value.step))
        elif type(value) is slice:
            self._many(b"L", (value.start, value.stop, value.step))
        elif any(value is kind for kind in PLAIN_TYPES):
            self._block(b"n", value.__name__.encode())
        elif known := self._known(value):  # those with no built-in type underneath
            self.seen[id(value)] = len(self.seen)
            self.kept.append(value)
            self._many(b"k", known)
        else:
            tag, number = self.foreign(value)
            self._add(tag + struct.pack("<I", number))

    @staticmethod
    def _known(value: object) -> tuple | None:
        arguments = _KNOWN.get(type(value))
        given = None if arguments is None else arguments(value)
        return None if given is None else (type(value).__name__, *given)


class Decoder:
    """One message back. `reference(tag, number)` gives what a crossing reference stands for."""

    def __init__(self, data: bytes, reference: Callable[[bytes, int], object]) -> None:
        self.data, self.place, self.reference = data, 0, reference
        self.seen: list[object] = []

    def value(self) -> Any:
        """The one value of the message. Raises MalformedError, or RecursionError for one nested too deep."""
        try:
            out = self._get()
        except (struct.error, TypeError, ValueError, LookupError, OverflowError, ArithmeticError) as error:
            raise MalformedError(f"a message that can not be read: {error}") from None
        if self.place != len(self.data):
            raise MalformedError("a message with something behind its end")
        return out

    def _take(self, count: int) -> bytes:
        part = self.data[self.place : self.place + count]
        if len(part) != count:
            raise MalformedError("a message that ends too early")
        self.place += count
        return part

    def _number(self) -> int:
        return struct.unpack("<I", self._take(4))[0]

    def _many(self) -> list[Any]:
        return [self._get() for _ in range(self._number())]

    def _get(self) -> Any:
        tag = self._take(1)
        if tag in _SINGLE:
            return _SINGLE[tag]
        if tag == b"i":
            return int.from_bytes(self._take(self._number()), "little", signed=True)
        if tag == b"f":
            return struct.unpack("<d", self._take(8))[0]
        if tag == b"s":
            return self._take(self._number()).decode("utf-8", "surrogatepass")
        if tag in (b"l", b"d", b"S", b"a"):
            return self._shared(tag)
        if tag == b"t":
            return tuple(self._many())
        if tag == b"&":
            return self.seen[self._number()]
        return self._rare(tag)

    def _shared(self, tag: bytes) -> Any:
        """Into `seen` before its parts are read: a list may hold itself."""
        out: Any = {b"l": list, b"d": dict, b"S": set, b"a": bytearray}[tag]()
        self.seen.append(out)
        if tag == b"a":
            out += self._take(self._number())
        elif tag == b"l":
            out += self._many()
        elif tag == b"S":
            out.update(self._many())
        else:
            parts = self._many()
            out.update(zip(parts[::2], parts[1::2], strict=True))
        return out

    def _rare(self, tag: bytes) -> Any:
        if tag == b"b":
            return self._take(self._number())
        if tag == b"c":
            return complex(*struct.unpack("<dd", self._take(16)))
        if tag == b"z":
            return frozenset(self._many())
        if tag in (b"R", b"L"):
            return (range if tag == b"R" else slice)(*self._many())
        if tag == b"n":
            return _TYPE_NAMES[self._take(self._number()).decode()]
        if tag == b"k":
            return self._known()
        return self.reference(tag, self._number())

    def _known(self) -> Any:
        place = len(self.seen)
        self.seen.append(None)
        name, *arguments = self._many()
        self.seen[place] = _KNOWN_NAMES[name](*arguments)
        return self.seen[place]
