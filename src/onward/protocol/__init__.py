"""How client and broker speak: frames, their payloads, and the state of a connection.

Pure: bytes in, frames out. Nothing here knows of sockets, tasks or clocks; the shells in
`broker` and `client` move the bytes.

    frames.py      kinds of frames, the header, the preface
    payloads.py    what is inside a frame
    deliveries.py  what is inside the frames of a group's member
    receiver.py    bytes of a socket -> frames, with as few copies as possible
    connection.py  which frame is allowed when
"""
