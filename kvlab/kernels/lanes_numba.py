"""Lanes: sixteen float32 at once, as LLVM's vectors, for the loops in which compiled steps spend their time.

Loops over numbers compile to code half as wide as the CPU, with sums taken apart one by one; here width and order are
written out. Any CPU runs it: LLVM cuts vectors to what there is. Arrays are contiguous and flat, places in them counted
in numbers; whoever calls sees to it that sixteen are there.
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic as _intrinsic
from numba.extending import models, register_model

LANES = 16
_FLOATS = ir.VectorType(ir.FloatType(), LANES)
_WORDS = ir.VectorType(ir.IntType(32), LANES)
_HALVES = ir.VectorType(ir.HalfType(), LANES)
_BYTE, _WORD = ir.IntType(8), ir.IntType(32)
# A checker of types sees the first argument, which no caller gives.
intrinsic: Any = _intrinsic
_FAST = ("reassoc", "contract", "nsz")


class _Lanes(types.Type):
    def __init__(self) -> None:
        super().__init__(name="Lanes")


lanes = _Lanes()


@register_model(_Lanes)
class _Model(models.PrimitiveModel):
    def __init__(self, manager, fe_type):
        super().__init__(manager, fe_type, _FLOATS)


class _Block(types.Type):
    def __init__(self) -> None:
        super().__init__(name="Block")


# Four tokens of 64 codes, each as four lanes: as many as there are registers for, and a few to spare.
BLOCK, BLOCK_BYTES = 4, 2 * LANES
block = _Block()


@register_model(_Block)
class _BlockModel(models.PrimitiveModel):
    def __init__(self, manager, fe_type):
        super().__init__(manager, fe_type, ir.ArrayType(_FLOATS, BLOCK * 4))


def _place(context, builder, array_type, array, at, as_type):
    """Pointer to what begins at number `at` of a flat array."""
    held = context.make_array(array_type)(context, builder, array)
    return builder.bitcast(builder.gep(held.data, [at]), as_type.as_pointer())


def _bytes(context, builder, array_type, array, at):
    """Sixteen bytes, each a word."""
    packed = builder.load(_place(context, builder, array_type, array, at, ir.VectorType(_BYTE, LANES)))
    packed.align = 1
    return builder.zext(packed, _WORDS)


def _constant(type_, values):
    return ir.Constant(type_, list(values))


def _splat(builder, x, vector):
    one = builder.insert_element(ir.Constant(vector, ir.Undefined), x, ir.Constant(_WORD, 0))
    mask = _constant(ir.VectorType(_WORD, LANES), [0] * LANES)
    return builder.shuffle_vector(one, ir.Constant(vector, ir.Undefined), mask)


@intrinsic
def load(typingctx, array, at):
    """array[at : at + 16], float32."""

    def generate(context, builder, signature, args):
        return _lanes_at(context, builder, signature.args[0], args[0], args[1])

    return lanes(array, types.intp), generate


@intrinsic
def store(typingctx, array, at, x):
    """array[at : at + 16] = x."""

    def generate(context, builder, signature, args):
        done = builder.store(args[2], _place(context, builder, signature.args[0], args[0], args[1], _FLOATS))
        done.align = 4
        return context.get_dummy_value()

    return types.none(array, types.intp, lanes), generate


@intrinsic
def splat(typingctx, x):
    """x in every lane."""

    def generate(context, builder, signature, args):
        return _splat(builder, args[0], _FLOATS)

    return lanes(types.float32), generate


@intrinsic
def fma(typingctx, a, b, c):
    """a * b + c."""

    def generate(context, builder, signature, args):
        return _fma(builder, *args)

    return lanes(lanes, lanes, lanes), generate


@intrinsic
def codes(typingctx, array, at, shift, mask):
    """(array[at : at + 16] >> shift) & mask as floats; the array is of bytes."""

    def generate(context, builder, signature, args):
        words = _bytes(context, builder, signature.args[0], args[0], args[1])
        shifts, masks = (_splat(builder, builder.trunc(x, _WORD), _WORDS) for x in args[2:])
        return builder.sitofp(builder.and_(builder.lshr(words, shifts), masks), _FLOATS)

    return lanes(array, types.intp, types.intp, types.intp), generate


def _sums(builder, a, b, c, d):
    """The sums over the lanes of a, b, c and d."""

    def picked(x, y, order):
        return builder.shuffle_vector(x, y, _constant(ir.VectorType(_WORD, len(order)), order))

    def added(x, y, evens, odds):
        return builder.fadd(picked(x, y, evens), picked(x, y, odds), flags=_FAST)

    # Neighbours first: after two rounds each quarter holds a part of all four sums, in order.
    pairs = [[i + j for i in range(0, LANES, 2) for j in (o, o + LANES)] for o in (0, 1)]
    quads = [[i + j for i in range(0, LANES, 4) for j in (o, o + 1, o + LANES, o + LANES + 1)] for o in (0, 2)]
    x = added(added(a, b, *pairs), added(c, d, *pairs), *quads)
    x = added(x, x, range(8), range(8, 16))
    return added(x, x, range(4), range(4, 8))


@intrinsic
def store_sums(typingctx, array, at, a, b, c, d):
    """array[at : at + 4] = the sums over the lanes of a, b, c and d."""

    def generate(context, builder, signature, args):
        x = _sums(builder, *args[2:])
        done = builder.store(x, _place(context, builder, signature.args[0], args[0], args[1], x.type))
        done.align = 4
        return context.get_dummy_value()

    return types.none(array, types.intp, lanes, lanes, lanes, lanes), generate


@intrinsic
def lane_sum(typingctx, x):
    """The sum over the lanes."""

    def generate(context, builder, signature, args):
        return builder.extract_element(_sums(builder, *[args[0]] * 4), ir.Constant(_WORD, 0))

    return types.float32(lanes), generate


@intrinsic
def nibbles(typingctx, array, at, step):
    """A block of 4-bit codes as floats: BLOCK_BYTES from `at` on and from places `step`, 2 `step`, ... further.

    Of each token the low halves of its bytes, then the high ones.
    """

    def generate(context, builder, signature, args):
        made, place = ir.Constant(ir.ArrayType(_FLOATS, BLOCK * 4), ir.Undefined), args[1]
        for token in range(BLOCK):
            for part in range(2):
                first = builder.add(place, ir.Constant(place.type, part * LANES))
                words = _bytes(context, builder, signature.args[0], args[0], first)
                for high, x in enumerate((builder.and_(words, _all(15)), builder.lshr(words, _all(4)))):
                    made = builder.insert_value(made, builder.sitofp(x, _FLOATS), token * 4 + high * 2 + part)
            place = builder.add(place, args[2])
        return made

    return block(array, types.intp, types.intp), generate


def _apart(builder, at, half):
    """Where the four lanes of a block's token belong: two from `at` on, two `half` further."""
    low = [builder.add(at, ir.Constant(at.type, part * LANES)) for part in range(2)]
    return low + [builder.add(x, half) for x in low]


def _lanes_at(context, builder, array_type, array, at):
    found = builder.load(_place(context, builder, array_type, array, at, _FLOATS))
    found.align = 4
    return found


def _fma(builder, a, b, c):
    return builder.fadd(builder.fmul(a, b, flags=_FAST), c, flags=_FAST)


@intrinsic
def block_dots(typingctx, codes, q, at, half, into, place, more):
    """into[place : place + 4] = the block's tokens times q at `at` and `half` further; added to it where `more`."""

    def generate(context, builder, signature, args):
        x, (_, q_type, _, _, into_type, _, _) = args[0], signature.args
        query = [_lanes_at(context, builder, q_type, args[1], one) for one in _apart(builder, args[2], args[3])]
        sums = []
        for token in range(BLOCK):
            total = builder.fmul(builder.extract_value(x, token * 4), query[0], flags=_FAST)
            for part in range(1, 4):
                total = _fma(builder, builder.extract_value(x, token * 4 + part), query[part], total)
            sums.append(total)
        found = _sums(builder, *sums)
        where = _place(context, builder, into_type, args[4], args[5], found.type)
        before = builder.load(where)
        before.align = 4
        zero = ir.Constant(found.type, [0.0] * BLOCK)
        found = builder.fadd(found, builder.select(args[6], before, zero), flags=_FAST)
        builder.store(found, where).align = 4
        return context.get_dummy_value()

    return types.none(codes, q, types.intp, types.intp, into, types.intp, types.boolean), generate


@intrinsic
def block_mix(typingctx, codes, weights, first, out, at, half):
    """Add to out, at `at` and `half` further, the block's tokens times weights[first : first + 4]."""

    def generate(context, builder, signature, args):
        x, (_, weights_type, _, out_type, _, _) = args[0], signature.args
        four = builder.load(
            _place(context, builder, weights_type, args[1], args[2], ir.VectorType(ir.FloatType(), BLOCK))
        )
        four.align = 4
        shares = [
            builder.shuffle_vector(four, four, _constant(ir.VectorType(_WORD, LANES), [token] * LANES))
            for token in range(BLOCK)
        ]
        for part, one in enumerate(_apart(builder, args[4], args[5])):
            total = _lanes_at(context, builder, out_type, args[3], one)
            for token in range(BLOCK):
                total = _fma(builder, builder.extract_value(x, token * 4 + part), shares[token], total)
            builder.store(total, _place(context, builder, out_type, args[3], one, _FLOATS)).align = 4
        return context.get_dummy_value()

    return types.none(codes, weights, types.intp, out, types.intp, types.intp), generate


@intrinsic
def halves(typingctx, array, at):
    """array[at : at + 16], fp16 bits in uint16, as float32. Only where HAS_HALVES."""

    def generate(context, builder, signature, args):
        packed = builder.load(_place(context, builder, signature.args[0], args[0], args[1], _HALVES))
        packed.align = 2
        return builder.fpext(packed, _FLOATS)

    return lanes(array, types.intp), generate


def _wide(builder, halves_as_words):
    """Words, the low halves of which are fp16, as float32."""
    narrow = builder.trunc(halves_as_words, ir.VectorType(ir.IntType(16), LANES))
    return builder.fpext(builder.bitcast(narrow, _HALVES), _FLOATS)


def _all(x):
    return _constant(_WORDS, [x] * LANES)


@intrinsic
def e5m2(typingctx, array, at):
    """array[at : at + 16], bytes, as the fp8 they are: the upper bytes of fp16. Only where HAS_HALVES."""

    def generate(context, builder, signature, args):
        words = _bytes(context, builder, signature.args[0], args[0], args[1])
        return _wide(builder, builder.shl(words, _all(8)))

    return lanes(array, types.intp), generate


@intrinsic
def e4m3(typingctx, array, at):
    """array[at : at + 16], bytes, as the fp8 they are: fp16 with an exponent 8 too small. Only where HAS_HALVES."""

    def generate(context, builder, signature, args):
        words = _bytes(context, builder, signature.args[0], args[0], args[1])
        sign, magnitude = builder.and_(words, _all(0x80)), builder.and_(words, _all(0x7F))
        bits = builder.or_(builder.shl(sign, _all(8)), builder.shl(magnitude, _all(7)))
        scaled = builder.fmul(_wide(builder, bits), _constant(_FLOATS, [256.0] * LANES))
        unknown = builder.icmp_unsigned("==", magnitude, _all(0x7F))
        return builder.select(unknown, _constant(_FLOATS, [float("nan")] * LANES), scaled)

    return lanes(array, types.intp), generate


@intrinsic
def prefetch(typingctx, array, at):
    """Ask for the cache line of array[at], bytes, which may lie outside the array."""

    def generate(context, builder, signature, args):
        place = _place(context, builder, signature.args[0], args[0], args[1], _BYTE)
        kind = ir.FunctionType(ir.VoidType(), [place.type, _WORD, _WORD, _WORD])
        ask = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        builder.call(ask, [place, *(ir.Constant(_WORD, x) for x in (0, 3, 1))])  # to read, into every level, data
        return context.get_dummy_value()

    return types.none(array, types.intp), generate
