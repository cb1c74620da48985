"""What travels: messages, the batches that carry them, and the names of topics and groups.

Pure: bytes and values in, bytes and values out. Nothing here knows of sockets, files or clocks.

    names.py        which names a topic or a group may have
    headers.py      the headers of one message as bytes
    columns.py      one column of a batch as bytes
    compression.py  zstd and lz4, always bounded
    batch.py        a batch: header, directory, columns
    entry.py        an entry of the log: the record around batches
    cut.py          entries with only what is wanted of them
    message.py      one message as a user sees it
"""
