"""Tiles of stored K or V, read through page ids and multiplied out, as Triton functions for other kernels.

Quantized streams are multiplied out in fp16 whatever the model's dtype: codes are exact there, its rounding is finer
than bfloat16's, and the interpreter can check it. Codes come as words of four bytes: the compiler copies words ahead
of their use where it would hold bytes one by one in registers.
"""

# Constants arrive as plain values; the checker takes them for `tl.constexpr`.
# pyright: reportArgumentType=false, reportAssignmentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false, reportAttributeAccessIssue=false

import triton
import triton.language as tl


@triton.constexpr_function
def _pair(value: float) -> str:
    """`value` twice in fp16, as PTX writes 32 bits. It must be normal and exact there."""
    fraction, exponent = abs(value), 15
    while fraction >= 2:
        fraction, exponent = fraction / 2, exponent + 1
    while fraction < 1:
        fraction, exponent = fraction * 2, exponent - 1
    half = (0x8000 if value < 0 else 0) | exponent << 10 | int((fraction - 1) * 1024)
    return f"0x{half * 0x10001:08x}"


@triton.constexpr_function
def unpacking(bits: int, less: int) -> str:
    """PTX for a word of four bytes of packed codes, to `code - less` in fp16: four of plane 0, four of plane 1...

    What the compiler makes of the same in Triton is about three times as long. Bytes are spread to 16-bit lanes; a code
    that sits k bits up in its byte is read as 1024 + 2**k * code and scaled by 2**-k. All of it is exact.
    """
    planes = 8 // bits
    word = f"${4 * planes}"
    lines = [".reg .b32 x0, x1, y, k, c;"]
    # The byte above each code is 0x64 at 8 bits, where the code fills its byte; else it is masked away.
    lines += [f"prmt.b32 x0, {word}, 0x64646464, 0x{'4140' if bits == 8 else '1100'};"]
    lines += [f"prmt.b32 x1, {word}, 0x64646464, 0x{'4342' if bits == 8 else '3322'};"]
    for plane in range(planes):
        up = plane * bits
        lines += [f"mov.b32 k, {_pair(2.0**-up)};", f"mov.b32 c, {_pair(-(1024 / 2**up + less))};"]
        for i in (0, 1):
            if bits == 8:
                lines.append(f"add.f16x2 y, x{i}, c;")
            else:
                lines.append(f"lop3.b32 y, x{i}, 0x{((2**bits - 1) << up) * 0x10001:08x}, 0x64006400, 0xEA;")
                lines.append("add.f16x2 y, y, c;" if up == 0 else "fma.rn.f16x2 y, y, k, c;")
            at = 4 * plane + 2 * i
            lines.append(f"mov.b32 {{${at}, ${at + 1}}}, y;")
    return "{" + "\n".join(lines) + "}"


@triton.constexpr_function
def fp8_bits(e5m2: bool) -> str:
    """PTX for a word of four fp8 as fp16: e5m2 as it is, e4m3 as 2**-8 of itself."""
    lines = [".reg .b32 x, y;"]
    for i, spread in enumerate(("0x1404", "0x3424")):
        lines.append(f"prmt.b32 x, $4, 0, {spread};")
        if not e5m2:
            lines += ["and.b32 y, x, 0x7f007f00;", "shr.b32 y, y, 1;", "lop3.b32 x, x, 0x80008000, y, 0xEA;"]
        lines.append(f"mov.b32 {{${2 * i}, ${2 * i + 1}}}, x;")
    return "{" + "\n".join(lines) + "}"


@triton.constexpr_function
def registers(outputs: int) -> str:
    """Constraints of inline PTX with that many 16-bit results, all written before the one word is read last."""
    return ",".join(["=&h"] * outputs + ["r"])


@triton.constexpr_function
def results(outputs: int) -> tuple[tl.dtype, ...]:
    """Types to go with `registers`."""
    return (tl.float16,) * outputs


@triton.jit
def locate(index, selected, t, count, width, PAGE: tl.constexpr, CHUNK: tl.constexpr):
    """Page id, slot and validity of the tokens `t`, which count through the selected chunks where CHUNK > 0."""
    slot = t
    valid = t < count
    if CHUNK > 0:
        chunk = tl.load(selected + t // CHUNK, mask=t < width * CHUNK, other=-1)
        slot = chunk * CHUNK + t % CHUNK
        valid = (chunk >= 0) & (slot < count)
    page = tl.load(index + slot // PAGE, mask=valid, other=0)
    return page, slot, valid


@triton.jit
def _spread(small, TILE: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):
    """[TILE / ROWS, WIDTH / COLS] repeated to [TILE, WIDTH]."""
    if ROWS == 1:
        wide = tl.broadcast_to(small[:, :, None], (TILE, WIDTH // COLS, COLS))
        return tl.reshape(wide, (TILE, WIDTH))
    else:
        wide = tl.broadcast_to(small[:, None, :], (TILE // ROWS, ROWS, WIDTH))
        return tl.reshape(wide, (TILE, WIDTH))


@triton.jit
def _beside(a, b, TILE: tl.constexpr, WIDTH: tl.constexpr):
    """[TILE, WIDTH] twice -> [TILE, 2 * WIDTH]."""
    return tl.reshape(tl.permute(tl.join(a, b), (0, 2, 1)), (TILE, 2 * WIDTH))


@triton.jit
def _between(a, b, c, d, TILE: tl.constexpr, WIDTH: tl.constexpr):
    """Byte 0, 1, 2 and 3 of each word, [TILE, WIDTH / 4] each -> [TILE, WIDTH]."""
    return tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), (TILE, WIDTH))


@triton.jit
def channels(WIDTH: tl.constexpr, PLANES: tl.constexpr, DIM: tl.constexpr):
    """Channel of each column of a tile, and whether there is such a channel."""
    n = tl.arange(0, PLANES * WIDTH)
    return n // WIDTH * (DIM // PLANES) + n % WIDTH, n % WIDTH < DIM // PLANES


@triton.jit
def _small(codes, LESS: tl.constexpr, DTYPE: tl.constexpr):
    """codes - LESS, exactly. In fp16 by putting the code into the mantissa of 1024."""
    if tl.float16 == DTYPE:
        return (codes.to(tl.uint16) | 0x6400).to(tl.float16, bitcast=True) - (1024 + LESS)
    else:
        return codes.to(DTYPE) - LESS


@triton.jit
def _plane(words, UP: tl.constexpr, BITS: tl.constexpr, LESS: tl.constexpr, TILE: tl.constexpr,
           WIDTH: tl.constexpr, DTYPE: tl.constexpr):  # fmt: skip
    """One plane of packed words as code - LESS [TILE, WIDTH]."""
    MASK: tl.constexpr = 2**BITS - 1
    return _between(
        _small((words >> UP) & MASK, LESS, DTYPE), _small((words >> (UP + 8)) & MASK, LESS, DTYPE),
        _small((words >> (UP + 16)) & MASK, LESS, DTYPE), _small((words >> (UP + 24)) & MASK, LESS, DTYPE),
        TILE, WIDTH,
    )  # fmt: skip


@triton.jit
def _integers(
    words, BITS: tl.constexpr, LESS: tl.constexpr, TILE: tl.constexpr, WIDTH: tl.constexpr, DTYPE: tl.constexpr,
    PTX: tl.constexpr,
):  # fmt: skip
    """Packed words [TILE, WIDTH / 4] -> code - LESS [TILE, planes * WIDTH]."""
    if PTX:
        if BITS == 8:
            x = tl.inline_asm_elementwise(unpacking(BITS, LESS), registers(4), [words], results(4), True, 1)
            return _between(x[0], x[1], x[2], x[3], TILE, WIDTH)
        elif BITS == 4:
            x = tl.inline_asm_elementwise(unpacking(BITS, LESS), registers(8), [words], results(8), True, 1)
            a, b = _between(x[0], x[1], x[2], x[3], TILE, WIDTH), _between(x[4], x[5], x[6], x[7], TILE, WIDTH)
            return _beside(a, b, TILE, WIDTH)
        else:
            x = tl.inline_asm_elementwise(unpacking(BITS, LESS), registers(16), [words], results(16), True, 1)
            a, b = _between(x[0], x[1], x[2], x[3], TILE, WIDTH), _between(x[4], x[5], x[6], x[7], TILE, WIDTH)
            c, d = _between(x[8], x[9], x[10], x[11], TILE, WIDTH), _between(x[12], x[13], x[14], x[15], TILE, WIDTH)
            return _beside(_beside(a, b, TILE, WIDTH), _beside(c, d, TILE, WIDTH), TILE, 2 * WIDTH)
    else:
        a = _plane(words, 0, BITS, LESS, TILE, WIDTH, DTYPE)
        if BITS < 8:
            a = _beside(a, _plane(words, BITS, BITS, LESS, TILE, WIDTH, DTYPE), TILE, WIDTH)
        if BITS == 2:
            b = _plane(words, 4, BITS, LESS, TILE, WIDTH, DTYPE)
            b = _beside(b, _plane(words, 6, BITS, LESS, TILE, WIDTH, DTYPE), TILE, WIDTH)
            a = _beside(a, b, TILE, 2 * WIDTH)
        return a


@triton.jit
def _three_bits(codes, high, LESS: tl.constexpr, TILE: tl.constexpr, WIDTH: tl.constexpr, DTYPE: tl.constexpr):
    """3-bit codes from bytes [TILE, WIDTH] of the 2-bit plane; the third bit of its plane i is bit 2 * i of `high`."""
    a, b = codes & 3 | ((high & 1) << 2), (codes >> 2) & 3 | (high & 4)
    c, d = (codes >> 4) & 3 | ((high >> 2) & 4), (codes >> 6) | ((high >> 4) & 4)
    a = _beside(_small(a, LESS, DTYPE), _small(b, LESS, DTYPE), TILE, WIDTH)
    c = _beside(_small(c, LESS, DTYPE), _small(d, LESS, DTYPE), TILE, WIDTH)
    return _beside(a, c, TILE, 2 * WIDTH)


@triton.jit
def _fp8_half(words, AT: tl.constexpr, E5M2: tl.constexpr, DTYPE: tl.constexpr):
    x = (words >> AT).to(tl.uint16)
    bits = x << 8 if E5M2 else (x & 0x7F) << 7 | (x & 0x80) << 8
    return bits.to(tl.float16, bitcast=True).to(DTYPE)


@triton.jit
def _fp8(words, E5M2: tl.constexpr, TILE: tl.constexpr, WIDTH: tl.constexpr, DTYPE: tl.constexpr, PTX: tl.constexpr):
    """fp8 by moving bits into fp16, exactly: e5m2 as it is, e4m3 as 2**-8 of itself."""
    if PTX:
        x = tl.inline_asm_elementwise(fp8_bits(E5M2), registers(4), [words], results(4), True, 1)
        return _between(x[0], x[1], x[2], x[3], TILE, WIDTH)
    else:
        return _between(
            _fp8_half(words, 0, E5M2, DTYPE), _fp8_half(words, 8, E5M2, DTYPE),
            _fp8_half(words, 16, E5M2, DTYPE), _fp8_half(words, 24, E5M2, DTYPE), TILE, WIDTH,
        )  # fmt: skip


@triton.jit
def _fp8_tile(
    words, scale, row, valid, E5M2: tl.constexpr, TILE: tl.constexpr, WIDTH: tl.constexpr, DTYPE: tl.constexpr,
    PTX: tl.constexpr,
):  # fmt: skip
    """fp8 as `_fp8` gives it; where exponents are per token, multiplied out."""
    x = _fp8(words, E5M2, TILE, WIDTH, DTYPE, PTX)
    if scale is not None:
        exponent = tl.load(scale + row, mask=valid, other=0).to(tl.int32) + (0 if E5M2 else 8)
        if tl.float16 == DTYPE:
            # A larger factor would not fit fp16, and neither would the values.
            exponent = tl.minimum(exponent, 15)
        x = x * tl.exp2(exponent.to(tl.float32)).to(DTYPE)[:, None]
    return x


@triton.jit
def _scaled(
    integers, scale, zero, page, slot, valid,
    MODE: tl.constexpr, GROUP: tl.constexpr, CHANNEL: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr,
    PLANES: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, PAGE: tl.constexpr, TILE: tl.constexpr,
    DTYPE: tl.constexpr,
):  # fmt: skip
    """Integers [TILE, PLANES * WIDTH] multiplied out; page, slot and valid say where each ROWS tokens' scales lie."""
    WHOLE: tl.constexpr = PLANES * WIDTH
    W: tl.constexpr = DIM // PLANES
    if W == WIDTH and (1 if CHANNEL else GROUP) == COLS:
        # Written so that the compiler sees neighbours, and loads several at once.
        column = tl.arange(0, WHOLE // COLS)
        there = valid[:, None] & (column >= 0)[None, :]
    else:
        first = tl.arange(0, WHOLE // COLS) * COLS
        column = (first // WIDTH * W + first % WIDTH) // (1 if CHANNEL else GROUP)
        there = valid[:, None] & (first % WIDTH < W)[None, :]
    if CHANNEL:
        at = page.to(tl.int64)[:, None] * DIM + column[None, :]
    else:
        row = page.to(tl.int64) * PAGE + slot % PAGE
        at = row[:, None] * (DIM // GROUP) + column[None, :]
    step = tl.load(scale + at, mask=there, other=0.0).to(DTYPE)
    x = integers * _spread(step, TILE, WHOLE, ROWS, COLS)
    if MODE == "midrise":
        x += _spread(step * 0.5, TILE, WHOLE, ROWS, COLS)
    elif MODE == "asymmetric":
        base = tl.load(zero + at, mask=there, other=0.0).to(DTYPE)
        x += _spread(base, TILE, WHOLE, ROWS, COLS)
    return x


@triton.jit
def tile(
    data, scale, zero, page, slot, valid, unit_page, unit_slot, unit_valid,
    KIND: tl.constexpr, BITS: tl.constexpr, MODE: tl.constexpr, GROUP: tl.constexpr, CHANNEL: tl.constexpr,
    DIM: tl.constexpr, ROW: tl.constexpr, WIDTH: tl.constexpr, PLANES: tl.constexpr, UNIT: tl.constexpr,
    COLS: tl.constexpr, PAGE: tl.constexpr, TILE: tl.constexpr, DTYPE: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """K or V of TILE tokens as [TILE, PLANES * WIDTH], column n being channel n // WIDTH * W + n % WIDTH where
    W = DIM / PLANES. Columns with n % WIDTH >= W and tokens that are not valid are finite and never used.
    """
    W: tl.constexpr = DIM // PLANES
    row = page.to(tl.int64) * PAGE + slot % PAGE
    if KIND == "raw":
        column = tl.arange(0, WIDTH)
        inside = valid[:, None] & (column < W)[None, :]
        return tl.load(data + row[:, None] * ROW + column[None, :], mask=inside, other=0.0).to(DTYPE)
    elif BITS == 3:
        column = tl.arange(0, WIDTH)
        inside = valid[:, None] & (column < W)[None, :]
        # Bit e of byte j % (D/8) belongs to channel e * D/8 + j % (D/8): two eighths to each plane.
        EIGHTH: tl.constexpr = DIM // 8
        address = data + row[:, None] * ROW
        codes = tl.load(address + column[None, :], mask=inside, other=0)
        high = tl.load(address + W + (column % EIGHTH)[None, :], mask=inside, other=0)
        high = high >> (column >= EIGHTH).to(tl.uint8)[None, :]
        x = _three_bits(codes, high, 3 if MODE == "symmetric" else (4 if MODE == "midrise" else 0), TILE, WIDTH, DTYPE)
        return _scaled(
            x, scale, zero, unit_page, unit_slot, unit_valid,
            MODE, GROUP, CHANNEL, DIM, WIDTH, PLANES, UNIT, COLS, PAGE, TILE, DTYPE,
        )  # fmt: skip
    else:
        word = tl.arange(0, WIDTH // 4)
        inside = valid[:, None] & (word < W // 4)[None, :]
        words = tl.load(data + row[:, None] * ROW + word[None, :], mask=inside, other=0)
        if KIND == "fp8":
            return _fp8_tile(words, scale, row, valid, MODE == "e5m2", TILE, WIDTH, DTYPE, PTX)
        else:
            HALF: tl.constexpr = 2 ** (BITS - 1)
            LESS: tl.constexpr = HALF - 1 if MODE == "symmetric" else (HALF if MODE == "midrise" else 0)
            x = _integers(words, BITS, LESS, TILE, WIDTH, DTYPE, PTX)
            return _scaled(
                x, scale, zero, unit_page, unit_slot, unit_valid,
                MODE, GROUP, CHANNEL, DIM, WIDTH, PLANES, UNIT, COLS, PAGE, TILE, DTYPE,
            )  # fmt: skip
