"""Small pictures as inline SVG: stacked bars, a map of shares, points in a plane. A path for each colour, so that many
marks stay few bytes. Each has words for those who do not see it.
"""

from collections.abc import Mapping, Sequence

from kvlab.show.page import esc

# seaborn's colour-blind palette, in an order of its own.
COLOURS = ("#0173b2", "#de8f05", "#029e73", "#cc78bc", "#ca9161", "#949494", "#56b4e9", "#d55e00", "#fbafe4", "#ece133")
MOST_BARS, MOST_ROWS, LEVELS = 64, 16, 4
_WIDTH, _HEIGHT = 640, 80
_FILL = "var(--k-fill)"  # a blue that the style makes lighter on dark ground


def bars(parts: Mapping[str, Sequence[float]], colours: Mapping[str, str], label: str) -> str:
    """Stacked bars: for each name one number a bar. More than MOST_BARS bars are averaged in groups."""
    grouped = {name: group(values, MOST_BARS) for name, values in parts.items()}
    count = max((len(v) for v in grouped.values()), default=0)
    top = max((sum(v[i] for v in grouped.values()) for i in range(count)), default=0) or 1
    step = _WIDTH / max(count, 1)
    at, sums, paths = [0] * count, [0.0] * count, []
    for name, values in grouped.items():
        moves = []
        for i in range(count):
            # Heights from running sums, so that rounding never opens a gap.
            sums[i] += values[i]
            high = round(_HEIGHT * sums[i] / top)
            if high > at[i]:
                moves.append(f"M{round(step * (i + 0.5))} {_HEIGHT - at[i]}v{at[i] - high}")
            at[i] = high
        paths.append(_stroke("".join(moves), colours[name], max(1.0, round(step * 0.86, 1))))
    return _svg(_WIDTH, _HEIGHT, "".join(paths), label)


def shares(rows: Sequence[Sequence[float]], label: str) -> str:
    """A map: a row of numbers from 0 to 1 each, the fuller the darker. More than MOST_ROWS rows are averaged."""
    columns = max((len(r) for r in rows), default=0)
    rows = [list(r) for r in zip(*(group([r[i] for r in rows], MOST_ROWS) for i in range(columns)), strict=True)]
    tall, levels = 8, [""] * LEVELS
    for y, row in enumerate(rows):
        start = 0
        for x in range(1, columns + 1):
            here = _level(row[start])
            if x == columns or _level(row[x]) != here:
                if here:
                    levels[here - 1] += f"M{start} {tall * y + tall // 2}h{x - start}"
                start = x
    paths = "".join(_stroke(moves, _FILL, tall - 1, opacity=(n + 1) / LEVELS) for n, moves in enumerate(levels))
    return _svg(columns or 1, tall * max(1, len(rows)), paths, label, stretched=True)


def points(marks: Sequence[tuple[float, float, bool]], front: Sequence[tuple[float, float]], label: str) -> str:
    """Points (x, y, fits) with the smallest x and y at the lower left; those that do not fit are crosses."""
    xs, ys = [m[0] for m in marks], [m[1] for m in marks]
    if not marks:
        return ""
    wide, high = _WIDTH // 2, _HEIGHT * 2
    span_x, span_y = (max(xs) - min(xs)) or 1.0, (max(ys) - min(ys)) or 1.0

    def place(x: float, y: float) -> tuple[int, int]:
        return round(12 + (wide - 24) * (x - min(xs)) / span_x), round(high - 12 - (high - 24) * (y - min(ys)) / span_y)

    inside, outside, line = "", "", ""
    for x, y, fits in marks:
        px, py = place(x, y)
        if fits:
            inside += f"M{px} {py}h0"
        else:
            outside += f"M{px - 3} {py - 3}l6 6m-6 0l6-6"
    for n, (x, y) in enumerate(front):
        px, py = place(x, y)
        line += f"{'L' if n else 'M'}{px} {py}"
    body = _stroke(line, COLOURS[5], 1) + _stroke(outside, COLOURS[5], 1.5) + _stroke(inside, _FILL, 7, round_=True)
    return _svg(wide, high, body, label, limit="20rem")


def group(values: Sequence[float], most: int) -> list[float]:
    """At most `most` means of neighbours."""
    each = -(-len(values) // most) if len(values) > most else 1
    return [sum(part) / len(part) for i in range(0, len(values), each) if (part := values[i : i + each])]


def swatch(colour: str) -> str:
    """A small square of one colour."""
    return f'<i style="background:{colour}"></i>'


def _level(value: float) -> int:
    """0 for nothing, LEVELS for all; little is never shown as nothing."""
    return 0 if value <= 0 else max(1, min(LEVELS, round(value * LEVELS)))


def _stroke(moves: str, colour: str, width: float, *, opacity: float = 1, round_: bool = False) -> str:
    if not moves:
        return ""
    more = f' stroke-opacity="{opacity:g}"' if opacity < 1 else ""
    more += ' stroke-linecap="round"' if round_ else ""
    paint = f'style="stroke:{colour}"' if colour.startswith("var") else f'stroke="{colour}"'
    return f'<path d="{moves}" {paint} stroke-width="{width:g}" fill="none"{more}/>'


def _svg(wide: int, high: int, body: str, label: str, *, stretched: bool = False, limit: str = "") -> str:
    fixed = ' preserveAspectRatio="none"' if stretched else ""
    # In a style: Jupyter's own would stretch a height that is an attribute.
    rules = [f"height:{high}px"] * stretched + [f"max-width:{limit}"] * bool(limit)
    style = f' style="{";".join(rules)}"' if rules else ""
    return f'<svg viewBox="0 0 {wide} {high}" role="img" aria-label="{esc(label)}"{fixed}{style}>{body}</svg>'
