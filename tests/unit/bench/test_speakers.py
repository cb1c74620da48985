import pytest

from onward.bench.speakers import OnwardSpeaker, RedisSpeaker, Refused, TopicsSpeaker
from onward.errors import MessageTooLarge
from onward.message.batch import check_batch, decode_batch
from onward.protocol.frames import Kind, frame
from onward.protocol.payloads import decode_publish, encode_error, published_frame


def published(count: int) -> bytes:
    return b"".join(published_frame(1, number, number, 2) for number in range(count))


def test_each_request_is_a_sound_batch_with_the_next_sequence():
    speaker = OnwardSpeaker("bench", [b"a", b"bc"], producer_id=7, in_flight=2)
    for sequence in range(1, 6):
        payload = bytes(speaker.request())[12:]
        durability, topic, batch_at = decode_publish(payload)
        header = check_batch(payload, batch_at)
        assert (durability, topic) == (2, "bench")
        assert (header.producer_id, header.sequence) == (7, sequence)
        assert decode_batch(payload, batch_at, raw_bytes_max=1000).bodies == [b"a", b"bc"]


def test_a_request_stays_as_it_is_until_it_is_answered():
    speaker = OnwardSpeaker("bench", [b"a"], producer_id=7, in_flight=3)
    requests = [speaker.request() for _ in range(3)]
    as_sent = [bytes(one) for one in requests]
    assert [bytes(one) for one in requests] == as_sent
    assert len(set(as_sent)) == 3


def test_what_is_made_ahead_is_what_would_be_made_later_and_does_not_run_out():
    ahead, later = (OnwardSpeaker("bench", [b"a"], producer_id=7, ahead=n) for n in (3, 0))
    for _ in range(7):
        made, expected = bytes(ahead.request()), bytes(later.request())
        assert made[:12] == expected[:12]
        headers = [check_batch(one, 12 + 4 + len("bench")) for one in (made, expected)]
        assert headers[0].sequence == headers[1].sequence


def test_a_request_to_the_next_topic_is_sound_too():
    speaker = TopicsSpeaker(iter(["t-0", "t-1", "t-2"]), [b"a"], producer_id=7)
    for name in ("t-1", "t-2"):
        payload = bytes(speaker.request())[12:]
        _, topic, batch_at = decode_publish(payload)
        assert topic == name
        assert check_batch(payload, batch_at).count == 1


@pytest.mark.parametrize("size", [1, 7, 28, 29, 30, 1000])
def test_answers_of_onward_are_counted_however_they_are_cut(size: int):
    speaker = OnwardSpeaker("bench", [b"a"], producer_id=7)
    stream = published(10)
    pieces = [stream[at : at + size] for at in range(0, len(stream), size)]
    assert sum(speaker.answers(piece) for piece in pieces) == 10


@pytest.mark.parametrize("size", [1, 2, 3, 7, 22, 1000])
def test_answers_of_redis_are_counted_however_they_are_cut(size: int):
    speaker = RedisSpeaker("bench", [b"a", b"b"])
    stream = b"".join(b"$15\r\n1794798457515-%d\r\n" % (number % 10) for number in range(20))
    pieces = [stream[at : at + size] for at in range(0, len(stream), size)]
    assert sum(speaker.answers(piece) for piece in pieces) == 10


def test_an_error_is_never_counted_as_an_answer():
    error = frame(Kind.ERROR, 1, encode_error(MessageTooLarge("too large")))
    with pytest.raises(Refused, match="too large"):
        OnwardSpeaker("bench", [b"a"], producer_id=7).answers(error)
    with pytest.raises(Refused, match="OOM"):
        RedisSpeaker("bench", [b"a"]).answers(b"-OOM command not allowed\r\n")
    with pytest.raises(Refused, match="OOM"):
        RedisSpeaker("bench", [b"a"]).answers(b"$3\r\n1-1\r\n-OOM command not allowed\r\n")


def test_a_greeting_is_complete_only_with_the_whole_welcome():
    speaker = OnwardSpeaker("bench", [b"a"], producer_id=7)
    welcome = frame(Kind.WELCOME, 0, b'{"version":1}')
    assert not any(speaker.is_greeted(welcome[:size]) for size in range(len(welcome)))
    assert speaker.is_greeted(welcome)
