"""The only place where the stations of a message meet.

Reading order: `publish` (THE WRITE PATH), `deliver` (THE READ PATH), then `session` (one
connection), `catalogue` and `producers` (what is folded from the log), `commit` (the seam
between staging and durability), `requests` (topics, for people and programs), `housekeeping`
(checkpoints, sealing, retention), `broker` (all of it together) and `serve` (sockets, signals).
"""
