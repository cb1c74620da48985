"""A world in which everything goes wrong on purpose, and the same way again from one seed.

For the tests of Onward and of programs that use it. Reading order: `clock` (time by hand), `disk`
(errors, a full disk, power cuts), `loop` (virtual time), `network` (delay, loss, partitions), then
what stands on them: `simulator` (a whole run), `scenario`, `node` (the broker's machine, with its
`commit`), `workload` (programs), `members` and `operator` (those of groups), `trouble`, `history`
and `checker` (what they saw, and whether it is possible; `group_history` and `group_checker` for
groups, `wire_history` and `start_checker` for the frames of their members, `retention_checker` for
what outlives retention), `fold` (whether the log says it all).

    simulate(seed=7)
      └─ VirtualLoop ─ VirtualClock       hours pass in milliseconds
           ├─ LossyNetwork                what is between clients and broker
           └─ FaultyDisk                  what is below the log

Every part takes its chance from a `random.Random` that is given to it: nothing is global.
"""
