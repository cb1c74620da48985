"""Where messages stay: one log per node, the only truth.

Reading order: `disk` (the seam to the operating system), `entry` (one record), `index` (where
an offset is), `segment` (one file), `log` (all of it: stage, perform, finish, find, read),
`recovery` (opening after anything), `checkpoint` (what is kept beside the log), `retention` (what
goes), and for people `inspect` (what is there), `check` (is it sound) and `repair` (make it so).

    index 1          ...            index 4711 | index 4712      ...         next
    00000000000000000001.log (sealed, .idx)    | 00000000000000004712.log (open, runs in memory)
"""
