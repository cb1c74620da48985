"""What programs import: a client that is a pleasure, and never hides what happened.

Reading order: `client` (all that can be asked), `producer` (publishes share batches, repeats are
safe), `reader` (a stream with credit), `link` (one connection), `keeper` (finds a broker and comes
back to it), `address`, `embedded` (a broker in this process), `pipe`, `sync` (for threads).
"""
