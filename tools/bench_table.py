"""Writes a CSV of te_bench as a plot and a table beside it, and a few of its rows into README.md; texts go between their markers. Needs Python alone.

    python3 tools/bench_table.py tests/bench/h200.csv      writes tests/bench/h200.svg, tests/bench/h200.md, README.md
    python3 tools/bench_table.py tests/bench/h200x2.csv    of ranks: tools/two_gpus.sh; the README has none of its rows
"""
import csv
import math
import pathlib
import sys
from html import escape

BEGIN, END = "<!-- te_bench: begin -->\n", "<!-- te_bench: end -->\n"
# The rows that the README shows.
README_ROWS = ["gemm bf16 TN", "gemm fp8 fast accumulation", "gemm fp8 1x128 by 128x128", "few bf16", "rmsnorm forward", "quantize mxfp8 both copies",
               "adam bf16 with f32 states", "layer bf16", "layer fp8 current scaling", "layer fp8 delayed scaling", "attention forward", "attention backward", "attention backward, sustained", "a training step", "a decoded id"]
# Of the plot: which colour stands for what a row is compared with. Both are told apart on white and on black.
COLOURS = {"cuBLASLt": "#2e6fe4", "cuDNN": "#c2410c", "torch.compile bf16": "#8250df", "copy": "#1f9d55", "our bf16": "#d9730d", "our dense": "#d9730d", "without it": "#b4419b", "padded": "#7a7f87"}
LABEL, SCALE, ROW, TOP, MOST = 330, 290, 16, 78, 1.75  # pixels; pixels a ratio of 1; the ratio at the right edge


def read(path):
    """The head line, and the rows by name, in the order of the file."""
    head, *lines = path.read_text().splitlines()
    rows = {}
    for row in csv.DictReader(lines):
        rows.setdefault(row["what"], []).append(row)
    return head.lstrip("# "), rows


def mean(ratios):
    if min(ratios) <= 0:  # an exchange of which nothing shows
        return sum(ratios) / len(ratios)
    return math.exp(sum(map(math.log, ratios)) / len(ratios))


def number(text):
    x = float(text)
    return f"{x:.0f}" if x >= 1e4 else f"{x:.4g}"


def table(rows):
    lines = ["| what | shape | te.h | compared with | ratio | all shapes: mean | least |", "|---|---|---|---|---|---|---|"]
    for what, of_it in rows.items():
        first, compared = of_it[0], [r for r in of_it if r["ratio"]]
        cells = [what, first["shape"], f'{number(first["ours"])} {first["unit"]}']
        cells += [f'{first["against"]} {number(first["theirs"])}', f'{float(first["ratio"]):.2f}'] if first["ratio"] else ["", ""]
        if len(compared) > 1:
            least = min(compared, key=lambda r: float(r["ratio"]))
            cells += [f'{mean([float(r["ratio"]) for r in compared]):.2f} ({len(compared)})', f'{float(least["ratio"]):.2f} at {least["shape"]}']
        else:
            cells += ["", ""]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def plot(head, rows):
    """A line for each kind of row, a dot for each shape, a stroke at their geometric mean. Milliseconds and MiB, of which more is worse, are in the table alone."""
    rows = {what: compared for what, of_it in rows.items() if (compared := [r for r in of_it if r["ratio"] and r["unit"] not in ("ms", "MiB")])}
    x = lambda ratio: LABEL + SCALE * min(ratio, MOST)
    bottom, width = TOP + ROW * len(rows), int(x(MOST)) + 30
    out = [
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width} {bottom + 34}' font-family='sans-serif' font-size='11'>",
        "<style>rect{fill:#fff}text{fill:#1f2328}.line{stroke:#d0d7de}.one{stroke:#57606a}"
        "@media(prefers-color-scheme:dark){rect{fill:#0d1117}text{fill:#e6edf3}.line{stroke:#30363d}.one{stroke:#8b949e}}</style>",
        "<rect width='100%' height='100%'/>",
        "<text x='10' y='20' font-size='14'>Speed over that of what the colour names: a dot for each shape, a stroke at their geometric mean</text>",
        f"<text x='10' y='36' font-size='10'>{escape(head)}</text>",
    ]
    at, line = 10, 50
    for against in dict.fromkeys(r["against"] for of_it in rows.values() for r in of_it):
        colour = COLOURS.get(against, "#888")
        if at + 40 + 6 * len(against) > width:
            at, line = 10, line + 14
        out.append(f"<circle cx='{at + 4}' cy='{line}' r='4' fill='{colour}'/><text x='{at + 12}' y='{line + 4}'>{escape(against)}</text>")
        at += 40 + 6 * len(against)
    for tick in range(0, int(MOST * 4) + 1):
        ratio = tick / 4
        out.append(f"<path class='{'one' if ratio == 1 else 'line'}' d='M{x(ratio):.1f} {TOP}V{bottom}'/>"
                   f"<text x='{x(ratio):.1f}' y='{bottom + 14}' text-anchor='middle'>{ratio:g}</text>")
    out.append(f"<text x='{x(MOST / 2):.1f}' y='{bottom + 28}' text-anchor='middle'>ratio; more is faster; what lies beyond {MOST:g} is drawn there</text>")
    for i, (what, of_it) in enumerate(rows.items()):
        y, ratios = TOP + ROW * i + ROW / 2, [float(r["ratio"]) for r in of_it]
        colour = COLOURS.get(of_it[0]["against"], "#888")
        out.append(f"<text x='{LABEL - 8}' y='{y + 4:.0f}' text-anchor='end'>{escape(what)}</text>")
        for r, ratio in zip(of_it, ratios):
            out.append(f"<circle cx='{x(ratio):.1f}' cy='{y:.0f}' r='3' fill='{colour}' fill-opacity='.45'><title>{escape(r['shape'])}: {ratio:.2f}</title></circle>")
        out.append(f"<path d='M{x(mean(ratios)):.1f} {y - 6:.0f}v12' stroke='{colour}' stroke-width='3'/>")
    return "\n".join(out) + "\n</svg>\n"


def replace(path, text):
    """Puts `text` between the markers of a file."""
    before, marker, rest = path.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    if not marker or not end:
        sys.exit(f"bench_table.py: {path} lacks {BEGIN.strip()} or {END.strip()}")
    path.write_text(before + BEGIN + text + END + after)


def main(path):
    head, rows = read(path)
    picture, whole = path.with_suffix(".svg"), path.with_suffix(".md")
    picture.write_text(plot(head, rows))
    if not whole.exists():
        whole.write_text(f"# Measurements: {path.stem}\n\n{BEGIN}{END}")
    measured, plotted = f"{head}; random normal data, L2 flushed, clocks as found.\n\n", "Speed of every kernel relative to cuBLASLt, to a copy, or to another of ours"
    replace(whole, f"{measured}![{plotted}]({picture.name})\n\nThe first shape of each kind, and what all shapes of it give; every row is in [{path.name}]({path.name}).\n\n" + table(rows))
    if any(what in rows for what in README_ROWS):
        replace(pathlib.Path("README.md"), f"{measured}![{plotted}]({picture})\n\n" + table({what: rows[what] for what in README_ROWS if what in rows}))


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(pathlib.Path(sys.argv[1]))
