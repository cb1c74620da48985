"""The report of a reconciliation: one HTML file that needs nothing else.

    render(report) -> text      no script, no address outside, charts as SVG in the page

Rules:
    - Whatever came from a message, a group or a member is escaped: it is shown, never executed. The
      page forbids scripts and addresses for itself too, by its content security policy.
    - It fits a phone, follows the reader's choice of light or dark, and prints.
    - A colour never stands alone: legends, numbers and titles say the same in words.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from html import escape

from onward.durations import format_instant
from onward.pipeline.html_style import STYLE
from onward.pipeline.report import Bar, Found, GroupLine, Report, Verdicts

LINES_MAX = 500
"""Pairs of topic and group that a page shows; its numbers count all."""
BAR_WIDE_MAX = 79
LABEL_WIDE = 60
"""Of the longest label below the chart, `11:09:00`."""
FEW = 6
"""So many bars need only a narrow chart, which a phone shows whole."""


def render(report: Report) -> str:
    """Return the page.

    >>> page = render(Report("localhost:7700", None, 60_000, 60_000, 0, 60_000))
    >>> page.startswith("<!doctype html>"), "<script" in page
    (True, False)
    """
    return "".join(
        (
            "<!doctype html>\n<html lang=en>\n<head>\n", _HEAD, f"<style>{STYLE}</style>\n",
            "</head>\n<body>\n<main>\n", _top(report), _tiles(report), _notes(_all_notes(report)),
            _over_time(report), _by_group(report), _latencies(report), _group_table(report),
            _lists(report), _foot(report), "</main>\n</body>\n</html>\n",
        )
    )  # fmt: skip


# --- the words at the top ----------------------------------------------------------------------


def _top(report: Report) -> str:
    total = report.verdicts
    open_count = total.total - total.settled
    if report.unchecked and not open_count:
        mood, sentence = "bad", "Not proven"
        said = (
            f"{_n(report.unchecked)} messages were gone before they could be looked at; "
            f"the {_n(total.total)} deliveries that could be checked are settled."
        )
    elif not total.total:
        mood, sentence = "calm", "Nothing to settle"
        said = "No group had to do with a message that was published in this window."
    elif report.is_settled:
        mood, sentence = "good", "All settled"
        said = f"Every one of {_n(total.total)} deliveries that were due is settled."
    else:
        mood, sentence = "bad", f"{_n(open_count)} not settled"
        said = f"Of {_n(total.total)} deliveries that were due, {_n(total.settled)} are settled."
        if report.unchecked:
            said += f" {_n(report.unchecked)} messages were gone before they could be looked at."
    since = "the beginning" if report.since_ms is None else _time(report.since_ms)
    return (
        f"<header class={mood}><p class=eyebrow>Reconciliation</p><h1>{sentence}</h1>"
        f"<p>{said}</p><p class=window>Published from <b>{since}</b> to "
        f"<b>{_time(report.until_ms)}</b></p></header>\n"
    )


def _tiles(report: Report) -> str:
    total = report.verdicts
    slow, repeated = report.slow_total, report.repeated_total
    tiles = (
        ("Published", report.published, "", "messages"),
        ("Settled", total.settled, "good", _share(total.settled, total.total)),
        ("Not delivered yet", total.undelivered, "warn" if total.undelivered else "", "backlog"),
        ("Missing", total.missing, "bad" if total.missing else "", "passed over, no outcome"),
        ("Retrying", total.retrying, "warn" if total.retrying else "", "will come again"),
        ("Dead", total.dead, "bad" if total.dead else "", "given up"),
        ("Slow", slow, "warn" if slow else "", f"over {_span(report.slow_ms)}"),
        ("Repeated", repeated, "bad" if repeated else "", "acked twice"),
        ("Unchecked", report.unchecked, "bad" if report.unchecked else "", "gone unseen"),
    )
    cells = "".join(
        f"<div class='tile {mood}'><span>{name}</span><b>{_n(count)}</b>"
        f"<small>{escape(said)}</small></div>"
        for name, count, mood, said in tiles
    )
    return f"<section class=tiles>{cells}</section>\n"


def _shown(report: Report) -> Sequence[GroupLine]:
    """Return the lines that a browser can bear: when there are more, those in most need."""
    if len(report.lines) <= LINES_MAX:
        return report.lines
    return sorted(report.lines, key=lambda line: line.verdicts.settled - line.verdicts.total)[
        :LINES_MAX
    ]


def _all_notes(report: Report) -> Sequence[str]:
    if len(report.lines) <= LINES_MAX:
        return report.notes
    note = (
        f"of {_n(len(report.lines))} pairs of topic and group those {_n(LINES_MAX)} are shown "
        "in which most is not settled; the numbers above count all"
    )
    return (*report.notes, note)


def _notes(notes: Sequence[str]) -> str:
    if not notes:
        return ""
    return f"<ul class=notes>{''.join(f'<li>{escape(note)}</li>' for note in notes)}</ul>\n"


def _foot(report: Report) -> str:
    command = f"onward pipeline reconcile {report.options}".strip()
    node = f" (node <code>{escape(report.node)}</code>)" if report.node else ""
    version = f" of Onward {escape(report.version)}" if report.version else ""
    return (
        f"<footer>Made {_time(report.made_at_ms)} by <code>{escape(command)}</code>{version} from "
        f"the broker at <code>{escape(report.servers)}</code>{node}. Times are UTC.</footer>\n"
    )


# --- charts ------------------------------------------------------------------------------------

_KINDS = (
    ("acked", "acked"), ("filtered", "filtered"), ("skipped", "skipped"),
    ("retrying", "retrying"), ("dead", "dead"), ("undelivered", "not delivered yet"),
    ("missing", "missing"),
)  # fmt: skip


_EACH = {1_000: "second", 60_000: "minute", 3_600_000: "hour", 86_400_000: "day"}


def _over_time(report: Report) -> str:
    if not report.bars:
        return ""
    first_ms = report.bars[0].at_ms
    count = (report.bars[-1].at_ms - first_ms) // report.bar_ms + 1
    width, height, left, bottom = 560 if count <= FEW else 1_000, 260, 56, 26
    room = width - left - LABEL_WIDE / 2  # The last label stands below the middle of its bar.
    top = _nice(max(bar.verdicts.total for bar in report.bars))
    step = min(room / count, BAR_WIDE_MAX)
    # A few bars stand together in the middle, not at an edge of an empty chart.
    begin = left + min((width - left - count * step) / 2, room - count * step)
    scale = (height - bottom - 10) / top
    parts = [_grid(top, width, height - bottom, left, scale)]
    for bar in report.bars:
        x = begin + (bar.at_ms - first_ms) // report.bar_ms * step
        parts.append(_stack(bar, x, step, height - bottom, scale))
    for place in _few(count):
        x = begin + (place + 0.5) * step
        label = _clock(first_ms + place * report.bar_ms, report.bar_ms)
        parts.append(f"<text x={x:.1f} y={height - 6} text-anchor=middle>{label}</text>")
    each = _EACH.get(report.bar_ms) or _span(report.bar_ms)
    title = f"Published and settled, per {each} of publishing"
    said = (
        "Each bar is what was published then, for all groups together; "
        "its parts say what became of it."
    )
    return _figure(title, said, _svg(width, height, title, parts), _legend(report.verdicts))


def _stack(bar: Bar, x: float, step: float, floor: float, scale: float) -> str:
    parts, y = [], floor
    for kind, word in _KINDS:
        count = getattr(bar.verdicts, kind)
        if count:
            # What is a single one among a million must be seen too.
            tall = max(count * scale, 1.5)
            y -= tall
            parts.append(
                f"<rect class=k-{kind} x={x + step * 0.1:.1f} y={y:.1f} width={step * 0.8:.1f} "
                f"height={tall:.1f}><title>{_time(bar.at_ms)}: {_n(count)} {word}</title></rect>"
            )
    return "".join(parts)


def _grid(top: int, width: int, floor: float, left: int, scale: float) -> str:
    lines = []
    for part in range(5):
        value = top * part / 4
        y = floor - value * scale
        lines.append(f"<line x1={left} x2={width} y1={y:.1f} y2={y:.1f} class=grid />")
        if value == int(value):
            lines.append(
                f"<text x={left - 8} y={y + 4:.1f} text-anchor=end>{_short(int(value))}</text>"
            )
    return "".join(lines)


def _by_group(report: Report) -> str:
    lines = [line for line in _shown(report) if line.verdicts.total]
    if not lines:
        return ""
    rows = "".join(
        f"<div class=row><div class=name>{_pair(line)}</div>{_share_bar(line.verdicts)}"
        f"<div class=value>{_share(line.verdicts.settled, line.verdicts.total)}</div></div>"
        for line in lines
    )
    return _figure("What became of them, group by group", "", rows, _legend(report.verdicts))


def _share_bar(verdicts: Verdicts) -> str:
    parts, x = [], 0.0
    for kind, word in _KINDS:
        count = getattr(verdicts, kind)
        if count:
            wide = max(100 * count / verdicts.total, 0.6)
            parts.append(
                f"<rect class=k-{kind} x={x:.2f} y=0 width={wide:.2f} height=10>"
                f"<title>{_n(count)} {word}</title></rect>"
            )
            x += wide
    said = ", ".join(f"{_n(getattr(verdicts, kind))} {word}" for kind, word in _KINDS)
    return (
        f"<svg viewBox='0 0 {max(x, 100):.2f} 10' preserveAspectRatio=none class=share role=img "
        f"aria-label='{said}'>{''.join(parts)}</svg>"
    )


def _latencies(report: Report) -> str:
    lines = [line for line in _shown(report) if line.p50_ms is not None]
    if not lines:
        return ""
    longest = max(max(line.p99_ms or 1, 10) for line in lines)
    top = 10 ** math.ceil(math.log10(longest))
    rows = "".join(
        f"<div class='row timed'><div class=name>{_pair(line)}</div>{_dots(line, top)}"
        f"<div class=value>{_span(line.p50_ms or 0)} · {_span(line.p95_ms or 0)} · "
        f"{_span(line.p99_ms or 0)}</div></div>"
        for line in lines
    )
    said = (
        "Half, 95 % and 99 % were acked within this time; "
        f"the scale goes by tens, from 1 ms to {_span(top)}."
    )
    keys = "".join(f"<span><i class=dot-{name}></i>{name}</span>" for name in ("p50", "p95", "p99"))
    return _figure("From publish to ack", said, rows, f"<p class=legend>{keys}</p>")


def _dots(line: GroupLine, top: int) -> str:
    places = {
        name: 1 + 98 * math.log10(max(value or 1, 1)) / math.log10(top)
        for name, value in (("p50", line.p50_ms), ("p95", line.p95_ms), ("p99", line.p99_ms))
    }
    decades = "".join(
        f"<i class=tick style='left:{1 + 98 * n / math.log10(top):.1f}%'></i>"
        for n in range(int(math.log10(top)) + 1)
    )
    span = places["p99"] - places["p50"]
    # From the widest to the smallest: where they meet, each is a ring around the next.
    dots = "".join(
        f"<i class='dot dot-{name}' style='left:{places[name]:.1f}%'></i>"
        for name in ("p99", "p95", "p50")
    )
    rail = f"<i class=rail style='left:{places['p50']:.1f}%;width:{span:.1f}%'></i>"
    return f"<div class=dots>{decades}{rail}{dots}</div>"


def _figure(title: str, said: str, drawing: str, legend: str) -> str:
    told = f"<p class=said>{said}</p>" if said else ""
    return f"<section><h2>{title}</h2>{told}{drawing}{legend}</section>\n"


def _svg(width: int, height: int, title: str, parts: Iterable[str]) -> str:
    size = "wide" if width >= 1_000 else "narrow"
    return (
        f"<div class={size}><svg viewBox='0 0 {width} {height}' role=img aria-label='{title}'>"
        f"{''.join(parts)}</svg></div>"
    )


def _legend(verdicts: Verdicts) -> str:
    keys = "".join(
        f"<span><i class=k-{kind}></i>{word} <b>{_n(getattr(verdicts, kind))}</b></span>"
        for kind, word in _KINDS
        if getattr(verdicts, kind)
    )
    return f"<p class=legend>{keys}</p>"


# --- tables ------------------------------------------------------------------------------------


def _group_table(report: Report) -> str:
    if not report.lines:
        return ""
    head = ("Topic", "Group", "Due", "Acked", "Filtered", "Skipped", "Retrying", "Dead",
            "Not delivered", "Missing", "Slow", "Repeated")  # fmt: skip
    rows = [
        (line.topic, line.group, line.verdicts.total, *line.verdicts, line.slow, line.repeated)
        for line in _shown(report)
    ]
    hint = "<p class='said hint'>There is more to the right: move the table sideways.</p>"
    return f"<section><h2>Numbers</h2>{hint}{_table(head, rows)}</section>\n"


def _lists(report: Report) -> str:
    total = report.verdicts
    slow, repeated = report.slow_total, report.repeated_total
    lists = (
        ("Missing", report.missing, total.missing,
         "The group is past them, and no outcome is known: they are lost."),
        ("Not delivered yet", report.undelivered, total.undelivered,
         "They wait for a member, or one has them right now."),
        ("Dead", report.dead, total.dead, "Look at the cause, then redrive or purge them."),
        ("Retrying", report.retrying, total.retrying, "They come again by themselves."),
        ("Slow", report.slow, slow,
         (f"Acked later than {_span(report.slow_ms)} after the publish. "
          "Of a range, time and member are those of the slowest message.")),
        ("Repeated", report.repeated, repeated,
         "Acked again without a replay: this should not be."),
    )  # fmt: skip
    return "".join(_list(name, found, count, said) for name, found, count, said in lists if count)


def _list(name: str, found: Sequence[Found], count: int, said: str) -> str:
    listed = sum(one.messages for one in found)
    rest = f" The first {_n(listed)} of {_n(count)} are listed." if count > listed else ""
    fields: tuple[tuple[str, Callable[[Found], object]], ...] = (
        ("Messages", lambda one: "" if one.last is None else one.messages),
        ("Step", lambda one: one.what), ("Took", lambda one: _took(one.took_ms)),
        ("Member", lambda one: one.member), ("Cause", lambda one: one.cause),
    )  # fmt: skip
    # A column in which nothing stands says nothing.
    shown = [(head, value) for head, value in fields if any(value(one) for one in found)]
    rows = [
        (_id(one), one.group, _moment(one.published_at_ms),
         *(value(one) for _, value in shown))
        for one in found
    ]  # fmt: skip
    table = _table(("Message", "Group", "Published", *(head for head, _ in shown)), rows)
    top = f"<h2>{name} <em>{_n(count)}</em></h2><p class=said>{said}{rest}</p>"
    return f"<section>{top}{table}</section>\n"


def _id(one: Found) -> str:
    """Write which message, or which range of messages, is meant.

    >>> _id(Found("orders", 7, "billing", 0)), _id(Found("orders", 7, "billing", 0, last=9))
    ('orders/7', 'orders/7 to orders/9')
    """
    first = f"{one.topic}/{one.offset}"
    return first if one.last in (None, one.offset) else f"{first} to {one.topic}/{one.last}"


def _table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    heads = "".join(f"<th scope=col>{name}</th>" for name in head)
    lines = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows)
    return (
        f"<div class=scroll tabindex=0><table><thead><tr>{heads}</tr></thead>"
        f"<tbody>{lines}</tbody></table></div>"
    )


def _cell(value: object) -> str:
    if isinstance(value, int):
        return f"<td class='n{'' if value else ' zero'}'>{_n(value)}</td>"
    text = str(value)
    # Only what is long may be wrapped: names and times are read whole.
    return f"<td{' class=text' if len(text) > 40 else ''}>{escape(text)}</td>"


# --- how things are written --------------------------------------------------------------------


def _pair(line: GroupLine) -> str:
    return f"<b>{escape(line.group)}</b> <span>{escape(line.topic)}</span>"


def _n(count: int) -> str:
    return f"{count:,}"


def _short(count: int) -> str:
    for unit, name in ((1_000_000_000, "G"), (1_000_000, "M"), (1_000, "k")):
        if count >= unit:
            return f"{count / unit:.4g}{name}"
    return str(count)


def _share(part: int, whole: int) -> str:
    """Write a part of a whole; all and nothing are said only when they are true.

    >>> _share(999_999, 1_000_000), _share(5, 5), _share(1, 2)
    ('99.99 %', '100 %', '50 %')
    """
    if not whole:
        return "-"
    if part == whole:
        return "100 %"
    return f"{math.floor(10_000 * part / whole) / 100:g} %"


def _span(duration_ms: int) -> str:
    """Write a duration in the unit that shows it best.

    >>> _span(850), _span(4_500), _span(60_000), _span(100_000), _span(150_000)
    ('850 ms', '4.5 s', '1 min', '100 s', '2.5 min')
    """
    for unit_ms, name in ((86_400_000, "d"), (3_600_000, "h"), (60_000, "min"), (1_000, "s")):
        if duration_ms >= 2 * unit_ms or duration_ms == unit_ms or unit_ms == 1_000 <= duration_ms:
            return f"{duration_ms / unit_ms:.3g} {name}"
    return f"{duration_ms} ms"


def _took(took_ms: int | None) -> str:
    return "" if took_ms is None else _span(took_ms)


def _moment(at_ms: int) -> str:
    return format_instant(at_ms).replace("T", " ").removesuffix("Z")


def _time(at_ms: int) -> str:
    return _moment(at_ms)[:19]


def _clock(at_ms: int, step_ms: int) -> str:
    text = format_instant(at_ms)
    return (
        text[5:10] if step_ms >= 86_400_000 else text[11:16] if step_ms >= 60_000 else text[11:19]
    )


def _nice(value: int) -> int:
    """Return the end of an axis: the next number that has four round quarters.

    >>> _nice(7), _nice(1_300), _nice(405_000), _nice(0)
    (8, 1600, 440000, 4)
    """
    quarters = 4 * max(1, int(10 ** (len(str(value)) - 2)))
    return max(1, -(-value // quarters)) * quarters


def _few(count: int) -> list[int]:
    """Return which of so many bars get a label, at most eight, a round number apart.

    >>> _few(90), _few(3)
    ([0, 15, 30, 45, 60, 75], [0, 1, 2])
    """
    step = next(one for one in (1, 2, 5, 10, 15, 20, 30, 60, 120, count) if count <= 8 * one)
    return list(range(0, count, step))


_HEAD = """<meta charset=utf-8>
<meta name=viewport content="width=device-width, initial-scale=1">
<meta http-equiv=Content-Security-Policy content="default-src 'none'; style-src 'unsafe-inline'">
<meta name=color-scheme content="light dark">
<meta name=robots content=noindex>
<title>Reconciliation</title>
"""
