"""Messages that wait for their time: which are due, in which order, and where they stay until then.

    @schedule ──▶ tail (rows in memory, bodies in the log) ──▶ runs (sorted files, bodies included)
                            └──────────────── order ───────────────┘  what is due, oldest first

    order      the rows of all parts in the order of (at_ms, number), and where firing has come to
    marks      numbers that will not fire: cancelled, replaced, fired early
    counts     how many of a run fire when, for the calendar
    recurring  schedules that come again: cron with a time zone, or every so often

The number of a scheduled message is its offset in `@schedule`. Nothing here looks at a clock: the
time comes in, decisions go out. Files are touched through the log's disk only.
"""
