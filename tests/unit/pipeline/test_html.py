"""The page of a reconciliation: whole, calm, and deaf to what hostile names say."""

import re

import pytest

from onward.pipeline.html import LINES_MAX, render
from onward.pipeline.report import Bar, Found, Gone, GroupLine, Report, Verdicts

EVIL = "<script>alert('x')</script>\"'&"


def report(**changes: object) -> Report:
    line = GroupLine("orders", "billing", Verdicts(acked=10), p50_ms=3, p95_ms=40, p99_ms=900)
    made = Report(
        servers="localhost:7700", since_ms=0, until_ms=600_000, made_at_ms=600_000, published=10,
        slow_ms=60_000, lines=[line], bars=[Bar(0, Verdicts(acked=10))],
    )  # fmt: skip
    return made._replace(**changes)


def test_a_page_says_in_one_sentence_that_all_is_settled():
    page = render(report())
    assert "<h1>All settled</h1>" in page
    assert "Every one of 10 deliveries that were due is settled." in page


def test_a_page_says_how_many_are_not_settled():
    lines = [GroupLine("orders", "billing", Verdicts(acked=7, dead=1, missing=2))]
    assert "<h1>3 not settled</h1>" in render(report(lines=lines))


def test_a_page_claims_no_proof_when_messages_were_gone_unseen():
    lost = [Gone("orders", 0, 650_000)]
    page = render(report(gone=lost))
    assert "<h1>Not proven</h1>" in page
    assert "650,000 messages were gone before they could be looked at" in page
    assert "<div class='tile bad'><span>Unchecked</span><b>650,000</b>" in page
    assert "<h1>Not proven</h1>" in render(report(gone=lost, lines=(), bars=(), published=0))
    lines = [GroupLine("orders", "billing", Verdicts(acked=7, missing=2))]
    page = render(report(gone=lost, lines=lines))
    assert "<h1>2 not settled</h1>" in page
    assert "650,000 messages were gone before they could be looked at" in page


def test_a_page_without_any_message_is_still_a_page():
    page = render(report(lines=(), bars=(), published=0))
    assert "<h1>Nothing to settle</h1>" in page
    assert page.endswith("</html>\n")


def test_what_hostile_names_and_causes_say_is_shown_and_never_executed():
    found = [Found(EVIL, 7, EVIL, 0, what=EVIL, member=EVIL, cause=EVIL, took_ms=90_000)]
    lines = [GroupLine(EVIL, EVIL, Verdicts(acked=1, retrying=1, dead=1, missing=1), 1, 1, 1, 2, 3)]
    page = render(
        report(
            servers=EVIL, lines=lines, missing=found, retrying=found, dead=found, slow=found,
            repeated=found, notes=[EVIL],
        )
    )  # fmt: skip
    assert "<script" not in page
    assert "&lt;script&gt;alert(&#x27;x&#x27;)" in page


def test_a_page_needs_nothing_from_outside_and_forbids_it():
    page = render(report())
    assert not re.search(r"https?:|//\w|\bsrc=|<link|<script|@import|url\(", page)
    assert "default-src 'none'" in page


def test_a_page_fits_a_phone_and_follows_the_choice_of_dark():
    page = render(report())
    assert "width=device-width" in page
    assert "prefers-color-scheme: dark" in page


def test_a_list_says_when_it_is_not_all():
    lines = [GroupLine("orders", "billing", Verdicts(dead=250))]
    found = [Found("orders", number, "billing", 0) for number in range(100)]
    assert "The first 100 of 250 are listed." in render(report(lines=lines, dead=found))


def test_one_of_a_million_can_be_seen_in_a_bar():
    bars = [Bar(0, Verdicts(acked=1_000_000, dead=1))]
    dead = re.search(r"<rect class=k-dead [^>]* height=([\d.]+)>", render(report(bars=bars)))
    assert dead is not None
    assert float(dead[1]) >= 1


def test_bars_stand_where_their_time_is():
    bars = [Bar(minute * 60_000, Verdicts(acked=1)) for minute in (0, 1, 10)]
    found = re.findall(r"<rect class=k-acked x=([\d.]+)", render(report(bars=bars, lines=())))
    first, second, last = map(float, found)
    assert (last - first) / (second - first) == pytest.approx(10, rel=0.01)


def test_a_single_bar_is_not_wide_and_stands_in_the_middle():
    page = render(report(lines=()))
    box = re.search(r"viewBox='0 0 (\d+) 260'", page)
    bar = re.search(r"<rect class=k-acked x=([\d.]+) y=[\d.]+ width=([\d.]+)", page)
    assert box is not None
    assert bar is not None
    wide, x, width = int(box[1]), float(bar[1]), float(bar[2])
    assert width < wide / 5
    assert x + width / 2 == pytest.approx((56 + wide) / 2, abs=1)


def test_the_smaller_dot_of_a_percentile_lies_on_the_larger():
    line = GroupLine("orders", "billing", Verdicts(acked=1), p50_ms=7, p95_ms=7, p99_ms=7)
    dots = re.findall(
        r"<i class='dot dot-(p\d+)' style='left:([\d.]+)%'>", render(report(lines=[line]))
    )
    assert [name for name, _ in dots] == ["p99", "p95", "p50"]
    assert len({place for _, place in dots}) == 1


def test_a_page_of_very_many_groups_shows_those_in_need_and_counts_all():
    lines = [GroupLine("orders", f"g{n}", Verdicts(acked=1)) for n in range(LINES_MAX + 10)]
    lines.append(GroupLine("orders", "behind", Verdicts(missing=1)))
    page = render(report(lines=lines))
    assert "<b>behind</b>" in page
    assert "<h1>1 not settled</h1>" in page
    assert f"of {LINES_MAX + 11} pairs of topic and group" in page
    assert page.count("<td>orders</td>") == LINES_MAX


def test_the_backlog_is_not_called_missing_and_is_listed_as_ranges():
    lines = [GroupLine("orders", "billing", Verdicts(acked=7, undelivered=50_001))]
    found = [Found("orders", 50_000, "billing", 0, last=100_000)]
    page = render(report(lines=lines, undelivered=found))
    assert "<span>Not delivered yet</span><b>50,001</b>" in page
    assert "orders/50000 to orders/100000" in page
    assert "<h2>Missing" not in page
    assert "are listed" not in page, "all of them are"


def test_slow_messages_are_listed_as_ranges_with_the_slowest_of_each():
    lines = [GroupLine("orders", "billing", Verdicts(acked=200), slow=150)]
    found = [Found("orders", 50, "billing", 0, member="ann", took_ms=95_000, last=199)]
    page = render(report(lines=lines, slow=found))
    for text in ("orders/50 to orders/199", "95 s", "<td>ann</td>", "of the slowest message"):
        assert text in page
    assert "are listed" not in page, "all of them are"


def test_the_last_label_of_the_time_axis_is_inside_the_picture():
    for count in (7, 8, 120):
        bars = [Bar(n * 1_000, Verdicts(acked=1)) for n in range(count)]
        page = render(report(bars=bars, bar_ms=1_000))
        places = [float(x) for x in re.findall(r"<text x=([\d.]+) y=\d+ text-anchor=middle>", page)]
        assert max(places) <= 1_000 - 30


def test_the_scale_of_the_chart_ends_close_above_its_highest_bar():
    page = render(report(bars=[Bar(0, Verdicts(acked=405_000))]))
    assert ">440k</text>" in page
    assert ">800k</text>" not in page


def test_the_foot_names_the_node_the_version_and_the_options():
    page = render(report(node="n-7", version="1.2.3", options="orders --slow 5s"))
    foot = page.split("<footer>")[1]
    for word in ("n-7", "1.2.3", "onward pipeline reconcile orders --slow 5s", "localhost:7700"):
        assert word in foot
