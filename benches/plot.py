"""Grouped bars as SVG: the median of the rounds, and their spread as a line on each."""

import statistics
from xml.sax.saxutils import escape

COLOURS = ["#0b7285", "#adb5bd", "#868e96", "#e8590c"]
BAR, LEFT, TOP, HEIGHT, LINE = 26, 70, 60, 260, 14


def round_up(value):
    """The next number that four steps of an axis divide well."""
    unit = 10 ** (len(str(int(value))) - 1)
    return next(step * unit for step in (1, 2, 4, 6, 8, 10, 12) if step * unit >= value)


def bars(title, groups, legend=215, gap=24, most=None):
    """`groups`: (lines of the label, {series: values of each round}); every group has the series of the first, or fewer.
    `legend`: room for a series' name; `most`: the end of the axis."""
    series = list(groups[0][1])
    group_width = BAR * len(series) + gap
    width = LEFT + max(group_width * len(groups), legend * len(series)) + 20
    most = most or round_up(max(max(values) for _, found in groups for values in found.values()))
    digits = 0 if most >= 4 else 1
    y = lambda value: TOP + HEIGHT - HEIGHT * value / most
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{TOP + HEIGHT + 60}" '
           f'font-family="sans-serif" font-size="11"><rect width="100%" height="100%" fill="white"/>',
           f'<text x="{LEFT}" y="18" font-size="14">{escape(title)}</text>']
    for i, name in enumerate(series):
        out.append(f'<rect x="{LEFT + i * legend}" y="28" width="10" height="10" fill="{COLOURS[i]}"/>'
                   f'<text x="{LEFT + 14 + i * legend}" y="37">{escape(name)}</text>')
    for step in range(5):
        value = most * step / 4
        out.append(f'<line x1="{LEFT}" x2="{width - 10}" y1="{y(value):.1f}" y2="{y(value):.1f}" stroke="#dee2e6"/>'
                   f'<text x="{LEFT - 6}" y="{y(value) + 4:.1f}" text-anchor="end">{value:,.{digits}f}</text>')
    for g, (label, found) in enumerate(groups):
        x0 = LEFT + gap / 2 + g * group_width
        for i, name in enumerate(series):
            if name in found:
                out.append(_bar(x0 + i * BAR, y, found[name], COLOURS[i]))
        middle = x0 + (group_width - gap) / 2
        for row, text in enumerate(label):
            out.append(f'<text x="{middle}" y="{TOP + HEIGHT + 18 + LINE * row}" text-anchor="middle">{escape(text)}</text>')
    return "\n".join(out) + "</svg>\n"


def _bar(x, y, values, colour):
    top = y(statistics.median(values))
    return (f'<rect x="{x}" y="{top:.1f}" width="{BAR - 4}" height="{TOP + HEIGHT - top:.1f}" fill="{colour}"/>'
            f'<line x1="{x + 11}" x2="{x + 11}" y1="{y(min(values)):.1f}" y2="{y(max(values)):.1f}" stroke="black"/>')
