"""A world in which everything goes wrong on purpose, and the same way again from one seed.

For the tests of Onward and of programs that use it. Reading order: `clock` (time by hand), `disk`
(errors, a full disk, power cuts), `loop` (virtual time), `network` (delay, loss, partitions).

    run(coroutine, seed=7)
      └─ VirtualLoop ─ VirtualClock       hours pass in milliseconds
           ├─ LossyNetwork                what is between clients and broker
           └─ FaultyDisk                  what is below the log

Every part takes its chance from a `random.Random` that is given to it: nothing is global.
"""
