"""Values that cross between the tests and the code under test, and bytes that no honest side sends."""

import builtins
import collections
import datetime
import decimal
import fractions
import math
import os
import struct
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlab.sandbox.peer import CannotCrossError, Fault, GoneError, Peer, Remote
from kvlab.sandbox.solver import _OPERATIONS
from kvlab.sandbox.wire import Decoder, Encoder, MalformedError, TooLongError


def refuse(*_: object) -> Any:
    raise MalformedError("no references here")


def there(value: object, most: int = 1 << 20) -> bytes:
    return Encoder(refuse, most).bytes_of(value)


def back(value: object) -> Any:
    return Decoder(there(value), refuse).value()


SCALARS = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.complex_numbers(allow_nan=False)
    | st.text(st.characters(exclude_categories=())) | st.binary() | st.just(...) | st.fractions()
    | st.decimals(allow_nan=False) | st.sampled_from([int, str, list]) | st.dates() | st.timedeltas()
    | st.datetimes().map(lambda x: x.replace(fold=0)) | st.times().map(lambda x: x.replace(fold=0))
)  # fmt: skip
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(SCALARS, inner, max_size=4)
        | st.sets(SCALARS, max_size=4)
        | st.frozensets(SCALARS, max_size=4)
        | st.lists(inner, max_size=4).map(collections.deque)
        | st.dictionaries(SCALARS, inner, max_size=4).map(collections.OrderedDict)
    ),
    max_leaves=12,
)


def alike(a: Any, b: Any) -> bool:
    """Equal, and of the same types all the way down."""
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return list(map(repr, a)) == list(map(repr, b)) and all(map(alike, a.values(), b.values()))
    if isinstance(a, list | tuple | collections.deque):
        return len(a) == len(b) and all(map(alike, a, b))
    return a == b and repr(a) == repr(b) if not isinstance(a, set | frozenset) else a == b


@given(VALUES)
def test_plain_data_arrives_as_it_was(value: object) -> None:
    assert alike(back(value), value)


@pytest.mark.parametrize(
    "value",
    [
        -0.0, math.inf, -math.inf, 1 << 9000, -(1 << 63), -1, 127, 128, -128, -129, range(3, 9, 2), slice(1, None),
        bytearray(b"ab"), "\ud800", NotImplemented, collections.Counter("aab"), collections.defaultdict(list, {1: [2]}),
        collections.deque([1, 2], 2), decimal.Decimal("1.10"), fractions.Fraction(1, 3), datetime.timedelta(-1, 2, 3),
        datetime.datetime(2024, 2, 29, 1, 2, 3, 4), type(None), {(1, 2): {3}, frozenset({1}): [None, True, 1, 1.0]},
    ],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_corners_arrive_as_they_were(value: Any) -> None:
    assert alike(back(value), value)


def test_not_a_number_arrives() -> None:
    assert math.isnan(back(math.nan))


def test_what_is_shared_stays_shared() -> None:
    row = [0]
    grid = back([row, row, {"row": row}, [0]])
    assert grid[0] is grid[1] is grid[2]["row"]
    assert grid[3] is not grid[0]
    loop: list[object] = []
    loop.append({"loop": loop})
    again = back(loop)
    assert again[0]["loop"] is again


class _Yes(list):
    def __eq__(self, other: object) -> bool:
        return True

    def __iter__(self) -> Iterator[object]:
        return iter([4])

    __hash__ = None  # type: ignore[assignment]


class _Seven(int):
    def __eq__(self, other: object) -> bool:
        return True

    def __index__(self) -> int:
        return 4

    def to_bytes(self, *_: object, **__: object) -> bytes:  # type: ignore[override]
        return b"\x04"

    def bit_length(self) -> int:
        return 1

    __hash__ = int.__hash__


def test_subclasses_arrive_as_the_plain_type_with_the_content_they_hold() -> None:
    for value, plain in ((_Yes([1]), [1]), (_Seven(300), 300), (collections.namedtuple("P", "x")(1), (1,))):
        assert alike(back(value), plain)


def test_too_long_is_noticed_before_it_is_copied() -> None:
    for value in ("x" * 101, b"x" * 101, list(range(50)), 1 << 900, [["x" * 30] * 2, "y" * 60]):
        with pytest.raises(TooLongError, match="100 bytes"):
            there(value, 100)
    assert len(there("x" * 90, 100)) <= 100


@given(st.binary(max_size=60))
def test_no_bytes_do_anything_but_fail_or_decode(data: bytes) -> None:
    try:
        Decoder(data, refuse).value()
    except (MalformedError, RecursionError):
        return


@given(VALUES, st.integers(0, 10_000), st.integers(1, 255))
def test_damaged_messages_do_anything_but_fail_or_decode(value: object, place: int, flip: int) -> None:
    data = bytearray(there(value))
    data[place % len(data)] ^= flip
    for damaged in (bytes(data), bytes(data[: place % len(data)])):
        try:
            Decoder(damaged, refuse).value()
        except (MalformedError, RecursionError, MemoryError):
            continue


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"?",
        b"TT",
        b"l" + struct.pack("<I", 2**32 - 1),
        b"s" + struct.pack("<I", 9) + b"x",
        b"&" + struct.pack("<I", 0),
        b"n" + struct.pack("<I", 4) + b"exec",
        b"d" + struct.pack("<I", 1) + b"T",
        b"S" + struct.pack("<I", 1) + b"l" + struct.pack("<I", 0),
        b"k" + struct.pack("<I", 1) + b"s" + struct.pack("<I", 6) + b"system",
        b"k" + struct.pack("<I", 1) + b"N",
        b"k" + struct.pack("<I", 0),
        b"r" + struct.pack("<I", 0),
    ],
)
def test_what_no_encoder_writes_is_malformed(data: bytes) -> None:
    with pytest.raises(MalformedError):
        Decoder(data, refuse).value()


# -- two sides ---------------------------------------------------------------------------------------------------------


def raised(fault: Fault) -> Exception:
    return getattr(builtins, fault.name)(*fault.arguments)


def told(error: BaseException) -> tuple[str, str, tuple]:
    return "crashed", type(error).__name__, (str(error),)


@pytest.fixture
def pair() -> Iterator[tuple[Peer, Peer]]:
    """One side that may only be called, and one that serves everything, which is served by a thread."""
    to, fro = os.pipe(), os.pipe()
    world = {"x": 1}
    asks = Peer(fro[0], to[1], 1 << 16, {"call": lambda peer, f, a, n: (f(*a, **n), [])}, callable, raised, told)
    serves = {**_OPERATIONS, "world": lambda peer, name: globals().get(name, world)}
    answers = Peer(to[0], fro[1], 1 << 16, serves, lambda value: True, raised, told)

    def serve() -> None:
        try:
            answers.serve()
        except (GoneError, MalformedError):
            return
        finally:
            os.close(to[0])
            os.close(fro[1])

    thread = threading.Thread(target=serve)
    thread.start()
    yield asks, answers
    os.close(to[1])
    thread.join(60)
    os.close(fro[0])
    assert not thread.is_alive()


class Thing:
    def __init__(self, values: list[int]) -> None:
        self.values = values

    def __getitem__(self, place: int) -> int:
        return self.values[place]

    def __eq__(self, other: object) -> bool:
        return True

    def __bool__(self) -> bool:
        return bool(self.values)

    def sort(self, other: list[int]) -> None:
        other.sort()

    __hash__ = None  # type: ignore[assignment]


def test_a_reference_is_used_from_afar_and_equal_to_itself_only(pair: tuple[Peer, Peer]) -> None:
    asks, _ = pair
    make = asks.ask("world", "Thing")
    assert type(make) is Remote
    thing = make([3, 1])
    assert (thing.values, thing[0], bool(thing), bool(make([]))) == ([3, 1], 3, True, False)
    assert thing != 5
    assert thing != make([3, 1])
    assert thing in [1, thing]
    thing.values = [7]
    assert list(thing) == [7]
    with pytest.raises(AttributeError, match="missing"):
        _ = thing.missing
    assert not hasattr(thing, "__missing__")


def test_changes_of_arguments_come_back(pair: tuple[Peer, Peer]) -> None:
    asks, _ = pair
    thing, values = asks.ask("world", "Thing")([]), [3, 1, 2]
    same = values
    thing.sort(values)
    assert values == [1, 2, 3]
    assert same is values


def test_functions_are_lent_and_come_home_as_themselves(pair: tuple[Peer, Peer]) -> None:
    asks, _ = pair
    thing = asks.ask("world", "Thing")([])
    thing.values = lambda x: x + 1
    assert thing.values(1) == 2
    given = thing.values
    assert given is thing.values
    with pytest.raises(CannotCrossError, match="Thing can not be handed"):
        thing.values = Thing([])


def test_the_asking_side_answers_nothing_but_calls(pair: tuple[Peer, Peer]) -> None:
    asks, _ = pair
    secret = {"expected": 42}

    def checker() -> int:
        return secret["expected"]

    asks.ask("world", "Thing")([]).values = checker
    reads = globals()["read_more"] = lambda f: f.__globals__
    try:
        with pytest.raises(AttributeError, match="__globals__"):
            asks.ask("world", "read_more")(checker)
    finally:
        del globals()["read_more"]
    assert reads is not None
    globals()["peek"] = lambda f: f.secret  # asks for an attribute, which is not served
    try:
        with pytest.raises(MalformedError, match="'get'"):
            asks.ask("world", "peek")(checker)
    finally:
        del globals()["peek"]
    with pytest.raises(MalformedError):  # and the channel stays broken
        asks.ask("world", "Thing")


def test_a_dead_side_stays_dead(pair: tuple[Peer, Peer]) -> None:
    asks, _ = pair
    thing = asks.ask("world", "Thing")([1])
    os.write(asks.write, struct.pack("<I", 1) + b"?")  # ends the other side
    for _ in range(2):
        with pytest.raises(GoneError):
            _ = thing.values
