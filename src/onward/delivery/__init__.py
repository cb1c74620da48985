"""Who gets which message next, and what became of it: pure decisions over ranges of offsets.

    ranges   sets of offsets            trace   rows that say how ranges ended: the durable truth
    retry    how often, how soon        record  a group's settings
    filter   which messages             share   one group's state in one topic: a fold of rows
    lease    who holds what, how long   group   all groups: what a checkpoint saves

Nothing here looks at a clock, a file or a socket: facts and the time come in, decisions go out. The
running broker and its recovery fold the same rows and so end in the same state.
"""
