"""Two processes that call each other over two pipes. While one waits for an answer it serves what the other asks.

What each lets the other do is `serves`: the side that holds the tests lets itself be called and nothing else. Knows no
tests and no limits other than the size of a message.
"""

import os
import struct
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from kvlab.sandbox.wire import Decoder, Encoder, MalformedError, TooLongError

_COPIED_BACK = (list, dict, set, bytearray)


class GoneError(Exception):
    """The other side closed its end or died."""


class CannotCrossError(TypeError):
    """A value that neither is data nor may be referred to from the other side."""


class Fault(Exception):  # noqa: N818 - carries the other side's exception, is none of its own
    """An exception of the other side: `kind` is a verdict's name, `name` and `arguments` are the exception's."""

    def __init__(self, kind: str, name: str, arguments: tuple) -> None:
        super().__init__(kind, name, arguments)
        self.kind, self.name, self.arguments = kind, name, arguments


class Peer:
    """One end. `serves`: operation -> function(peer, *arguments); `refers(value)`: may it be referred to from there?
    `raises` turns a Fault into the exception to raise here; `tells` an exception into (kind, name, arguments)."""

    def __init__(
        self,
        read: int,
        write: int,
        most_bytes: int,
        serves: Mapping[str, Callable[..., Any]],
        refers: Callable[[object], bool],
        raises: Callable[[Fault], BaseException],
        tells: Callable[[BaseException], tuple[str, str, tuple]],
    ) -> None:
        self.read, self.write, self.most_bytes = read, write, most_bytes
        self.serves, self.refers, self.raises, self.tells = serves, refers, raises, tells
        self.lent: list[object] = []
        self.places: dict[int, int] = {}
        self.borrowed: dict[int, Remote] = {}
        self.broken: BaseException | None = None

    # values

    def _lend(self, value: object) -> tuple[bytes, int]:
        if isinstance(value, Remote):
            return b"h", _number_of(value)
        if not self.refers(value):
            raise CannotCrossError(
                f"a {type(value).__name__} can not be handed to the code under test: use built-in data, or define its "
                f"class on both sides"
            )
        if id(value) not in self.places:
            self.places[id(value)] = len(self.lent)
            self.lent.append(value)
        return b"r", self.places[id(value)]

    def _found(self, tag: bytes, number: int) -> object:
        if tag == b"h":
            return self.lent[number]
        if tag != b"r":
            raise MalformedError(f"unknown tag {tag!r}")
        if number not in self.borrowed:
            self.borrowed[number] = Remote(self, number)
        return self.borrowed[number]

    def encoded(self, value: object) -> bytes:
        return Encoder(self._lend, self.most_bytes).bytes_of(value)

    # messages

    def _send(self, value: object) -> None:
        data = self.encoded(value)
        view = memoryview(struct.pack("<I", len(data)) + data)
        while view:
            try:
                view = view[os.write(self.write, view) :]
            except OSError as error:
                raise GoneError(str(error)) from None

    def _bytes(self, count: int) -> bytes:
        parts = []
        while count:
            try:
                part = os.read(self.read, min(count, 1 << 20))
            except OSError as error:
                raise GoneError(str(error)) from None
            if not part:
                raise GoneError("the other side is gone")
            parts.append(part)
            count -= len(part)
        return b"".join(parts)

    def _receive(self) -> tuple:
        (length,) = struct.unpack("<I", self._bytes(4))
        if length > self.most_bytes:
            raise TooLongError(f"more than {self.most_bytes} bytes in one value")
        message = Decoder(self._bytes(length), self._found).value()
        if type(message) is not tuple or not message or type(message[0]) is not str:
            raise MalformedError("a message that is neither a question nor an answer")
        return message

    def ask(self, operation: str, *arguments: Any) -> Any:
        """What the other side answers. Raises what `raises` makes of its exceptions, GoneError, MalformedError."""
        if self.broken is not None:  # tests that catch everything do not bring a channel back
            raise self.broken
        try:
            self._send((operation, *arguments))
            word, *rest = self._receive()
            while word not in ("answer", "raise"):
                self._serve(word, rest)
                word, *rest = self._receive()
            if len(rest) != (1 if word == "answer" else 3):
                raise MalformedError("an answer of the wrong length")
            fault = self.raises(Fault(*rest)) if word == "raise" else None
        except (GoneError, MalformedError, TooLongError) as error:
            self.broken = error
            raise
        if fault is not None:
            raise fault
        return rest[0]

    def serve(self) -> None:
        """Answer until the other side closes."""
        while True:
            try:
                word, *rest = self._receive()
            except GoneError:
                return
            self._serve(word, rest)

    def _serve(self, word: str, arguments: list) -> None:
        if word not in self.serves:
            raise MalformedError(f"nothing here answers {word!r}")
        try:
            reply = ("answer", self.serves[word](self, *arguments))
            self._send(reply)
        except (GoneError, MalformedError):
            raise
        # Whatever code from outside raises, SystemExit included, is an answer and must not end this side.
        except BaseException as error:
            self._send(("raise", *self.tells(error)))


def call(peer: Peer, target: Callable[..., Any], arguments: tuple, named: dict) -> tuple[Any, list]:
    """Call `target`; the result, and the containers among `arguments` that it changed, by place."""
    watched = [(i, a, peer.encoded(a)) for i, a in enumerate(arguments) if type(a) in _COPIED_BACK]
    result = target(*arguments, **named)
    return result, [(i, a) for i, a, before in watched if peer.encoded(a) != before]


def _copy_back(arguments: tuple, changed: list) -> None:
    for place, new in changed:
        old = arguments[place]
        if type(old) is not type(new):
            raise MalformedError("a changed argument of another type")
        if isinstance(old, (list, bytearray)):
            old[:] = new
        else:
            old.clear()
            old.update(new)


class Remote:
    """Something that stays on the other side. It is equal to nothing but itself: whether two values are equal is
    never asked of the side that is being tested."""

    __slots__ = ("_number", "_peer")

    def __init__(self, peer: Peer, number: int) -> None:
        object.__setattr__(self, "_peer", peer)
        object.__setattr__(self, "_number", number)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        answer = _ask(self, "call", arguments, named)
        if type(answer) is not tuple or len(answer) != 2 or type(answer[1]) is not list:
            raise MalformedError("a call that was not answered as one")
        result, changed = answer
        try:
            _copy_back(arguments, changed)
        except (TypeError, ValueError, LookupError, AttributeError) as error:
            raise MalformedError(f"changed arguments that can not be read: {error}") from None
        return result

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # copy, pickle and others look for these and mean this object
            raise AttributeError(name)
        return _ask(self, "get", name)

    def __setattr__(self, name: str, value: Any) -> None:
        _ask(self, "set", name, value)

    def __getitem__(self, key: Any) -> Any:
        return _ask(self, "item", key)

    def __iter__(self) -> Iterator[Any]:
        steps = _ask(self, "iter")
        while True:
            more = _ask(steps, "next")
            if not more:
                return
            yield more[0]

    def __bool__(self) -> bool:
        return _ask(self, "bool") is True

    def __len__(self) -> int:
        return _ask(self, "len")

    def __str__(self) -> str:
        return _ask(self, "str")

    def __repr__(self) -> str:
        return _ask(self, "repr")


def _number_of(remote: Remote) -> int:
    return object.__getattribute__(remote, "_number")


def _ask(remote: Remote, operation: str, *arguments: Any) -> Any:
    return object.__getattribute__(remote, "_peer").ask(operation, remote, *arguments)
