"""How the report of a reconciliation looks: its style sheet.

Colours are variables, once for light and once for dark; the kinds of outcome have the same names as
in `report.Verdicts`. On a narrow screen tables and the chart over time scroll by themselves, and a
shade at their edge says that there is more.
"""

from __future__ import annotations

STYLE = """
:root {
  --bg: #f6f7f9; --card: #fff; --ink: #1c2430; --soft: #667085; --line: #e4e7ec;
  --shade: #1c243040;
  --good: #1f8a5f; --warn: #b7791f; --bad: #c2413b;
  --acked: #3b7dd8; --filtered: #8fb5e8; --skipped: #b9c4d3;
  --retrying: #e0a13a; --dead: #c2413b; --undelivered: #8e4ec6; --missing: #7a1020;
}
@media (prefers-color-scheme: dark) {
  :root {
    --bg: #12161c; --card: #1a2029; --ink: #e6e9ee; --soft: #98a2b3; --line: #2b333f;
    --shade: #000000b0;
    --good: #4cc38a; --warn: #e0a94a; --bad: #f0716a;
    --acked: #5b9bf0; --filtered: #39608f; --skipped: #556072;
    --retrying: #d99a35; --dead: #e5605a; --undelivered: #a874db; --missing: #ff8f8a;
  }
}
* { box-sizing: border-box; margin: 0 }
body {
  background: var(--bg); color: var(--ink); -webkit-text-size-adjust: 100%;
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif;
}
main { max-width: 1080px; margin: 0 auto; padding: 20px 16px 40px }
header { border-left: 5px solid var(--soft); padding: 2px 0 2px 18px; margin: 12px 0 24px }
header.good { border-color: var(--good) }
header.bad { border-color: var(--bad) }
header.good h1 { color: var(--good) }
header.bad h1 { color: var(--bad) }
.eyebrow { color: var(--soft); font-size: 13px }
h1 {
  font-size: 30px; line-height: 1.2; font-weight: 650; letter-spacing: -.01em; margin: 2px 0 6px;
}
h2 { font-size: 17px; font-weight: 620; margin-bottom: 4px }
h2 em { color: var(--soft); font-style: normal; font-weight: 450; margin-left: 4px }
.window { color: var(--soft); margin-top: 4px }
.window b { color: var(--ink); font-weight: 550; white-space: nowrap }
section, .tile, .notes {
  background: var(--card); border: 1px solid var(--line); border-radius: 12px; margin-bottom: 16px;
}
section { padding: 18px }
.tiles {
  display: grid; grid-template-columns: repeat(4, 1fr); gap: 12px;
  padding: 0; border: 0; background: none;
}
.tile { padding: 12px 14px; margin: 0 }
.tile span, .tile small { display: block; color: var(--soft); font-size: 13px }
.tile b {
  display: block; font-size: 23px; font-weight: 620; line-height: 1.3;
  font-variant-numeric: tabular-nums;
}
.tile.good b { color: var(--good) }
.tile.warn b { color: var(--warn) }
.tile.bad b { color: var(--bad) }
.notes { padding: 12px 16px 12px 34px; color: var(--soft) }
.said { color: var(--soft); font-size: 13.5px; margin-bottom: 12px }
.wide svg, .narrow svg { width: 100%; height: auto; display: block }
.narrow svg { max-width: 560px; margin: 0 auto }
svg text { fill: var(--soft); font-size: 13px }
.grid { stroke: var(--line); stroke-width: 1 }
.row {
  display: grid; grid-template-columns: minmax(120px, 240px) 1fr minmax(70px, auto); gap: 14px;
  align-items: center; padding: 7px 0;
}
.row.timed { grid-template-columns: minmax(120px, 240px) 1fr 190px }
.row + .row { border-top: 1px solid var(--line) }
.name { overflow-wrap: anywhere }
.name b { font-weight: 560 }
.name span { color: var(--soft); font-size: 13px }
.value { text-align: right; font-variant-numeric: tabular-nums; font-size: 14px }
.share { width: 100%; height: 14px; display: block; border-radius: 7px; overflow: hidden }
.dots { position: relative; height: 18px }
.dots i { position: absolute; top: 50% }
.rail { height: 4px; margin-top: -2px; background: var(--filtered) }
.tick { width: 1px; height: 18px; margin-top: -9px; background: var(--line) }
.dot {
  width: 18px; height: 18px; margin: -9px 0 0 -9px; border-radius: 50%;
  border: 1px solid var(--card);
}
.dot.dot-p95 { width: 13px; height: 13px; margin: -6.5px 0 0 -6.5px }
.dot.dot-p50 { width: 8px; height: 8px; margin: -4px 0 0 -4px }
.dot-p50 { background: var(--acked) }
.dot-p95 { background: var(--retrying) }
.dot-p99 { background: var(--dead) }
.legend {
  display: flex; flex-wrap: wrap; gap: 4px 18px; margin-top: 12px; font-size: 13.5px;
  color: var(--soft);
}
.legend b { color: var(--ink); font-weight: 550 }
.legend i {
  display: inline-block; width: 10px; height: 10px; border-radius: 3px; margin-right: 6px;
}
.legend i[class^=dot] { border-radius: 50% }
.k-acked { fill: var(--acked); background: var(--acked) }
.k-filtered { fill: var(--filtered); background: var(--filtered) }
.k-skipped { fill: var(--skipped); background: var(--skipped) }
.k-retrying { fill: var(--retrying); background: var(--retrying) }
.k-dead { fill: var(--dead); background: var(--dead) }
.k-undelivered { fill: var(--undelivered); background: var(--undelivered) }
.k-missing { fill: var(--missing); background: var(--missing) }
.hint { display: none }
.scroll { margin: 0 -18px -6px; padding: 0 18px }
.scroll, .wide {
  overflow-x: auto; background-repeat: no-repeat;
  /* The first two move along with what is inside, and cover the shades at its ends. */
  background-image:
    linear-gradient(to right, var(--card) 50%, transparent),
    linear-gradient(to left, var(--card) 50%, transparent),
    linear-gradient(to right, var(--shade), transparent),
    linear-gradient(to left, var(--shade), transparent);
  background-position: left, right, left, right;
  background-size: 48px 100%, 48px 100%, 20px 100%, 20px 100%;
  background-attachment: local, local, scroll, scroll;
}
table { border-collapse: collapse; width: 100%; font-size: 14px; margin-top: 6px }
th {
  text-align: left; color: var(--soft); font-weight: 500; font-size: 13px; white-space: nowrap;
}
th, td { padding: 7px 12px 7px 0; border-bottom: 1px solid var(--line); vertical-align: top }
tbody tr:last-child td { border-bottom: 0 }
td { white-space: nowrap }
td.text { white-space: normal; min-width: 240px; overflow-wrap: anywhere }
th:last-child, td:last-child { padding-right: 0 }
td.n { font-variant-numeric: tabular-nums }
td.zero { color: var(--soft) }
code { font: 13px ui-monospace, SFMono-Regular, Menlo, monospace }
footer { color: var(--soft); font-size: 13px; padding: 6px 2px }
@media (max-width: 560px) {
  h1 { font-size: 25px }
  .tiles { grid-template-columns: repeat(2, 1fr) }
  section { padding: 14px }
  .scroll { margin: 0 -14px -6px; padding: 0 14px }
  .hint { display: block }
  .wide svg { min-width: 620px }
  .narrow svg text { font-size: 17px }
  .row, .row.timed { grid-template-columns: 1fr auto; gap: 4px 12px }
  .row .share, .row .dots { grid-column: 1 / -1; grid-row: 2 }
}
@media print {
  body { background: none }
  section, .tile { break-inside: avoid }
}
"""
