"""Sessions: who may speak, for how long, and what their mistakes cost."""

import asyncio

import pytest

from onward.message.batch import encode_batch
from onward.protocol.frames import Kind, frame
from onward.protocol.payloads import decode_error, decode_goodbye, publish_head
from onward.settings import AuthSettings, Token
from onward.testing.clock import ManualClock

from .speaking import Speaker, open_broker, settings_with, turns


async def test_a_welcome_tells_the_limits() -> None:
    broker = await open_broker(settings=settings_with(topics={"batch_bytes_max": 5 << 20}))
    speaker = await Speaker.to(broker)
    welcome = speaker.connection.welcome
    assert welcome is not None
    assert welcome.batch_bytes_max == 5 << 20
    assert welcome.frame_bytes_max == broker.frame_bytes_max
    assert welcome.publishes_max == broker.publishes_max
    await broker.stop()


async def test_only_who_knows_a_token_is_let_in() -> None:
    auth = AuthSettings(tokens=(Token("ann", "secret"), Token("bob", "hidden")))
    broker = await open_broker(settings=settings_with(auth=auth))
    good = await Speaker.to(broker, token="hidden")
    assert [session.principal for session in broker.sessions] == ["bob"]
    for token in (None, "", "guess"):
        bad = await Speaker.to(broker, token=token)
        kind, _, payload = bad.frames[-1]
        assert kind == Kind.ERROR
        assert decode_error(payload).code == "unauthenticated"
        assert bad.is_lost
    assert not good.is_lost
    await broker.stop()


async def test_a_connection_too_many_is_told_so_and_closed() -> None:
    broker = await open_broker(settings=settings_with(server={"connections_max": 1}))
    first, second = await Speaker.to(broker), await Speaker.to(broker)
    assert not first.is_lost
    assert second.is_lost
    kind, _, payload = second.frames[0]
    assert kind == Kind.GOODBYE
    assert decode_goodbye(payload).code == "overloaded"
    assert len(broker.sessions) == 1
    await broker.stop()


async def test_a_ping_is_answered() -> None:
    broker = await open_broker()
    speaker = await Speaker.to(broker)
    speaker.say(Kind.PING, 5)
    await turns()
    assert [kind for kind, _ in speaker.of(5)] == [Kind.PONG]
    await broker.stop()


async def test_after_bye_the_connection_is_closed() -> None:
    broker = await open_broker()
    speaker = await Speaker.to(broker)
    speaker.transport.write(speaker.connection.bye())
    await turns()
    assert speaker.is_lost
    assert broker.sessions == {}
    await broker.stop()


async def test_garbage_ends_its_own_connection_with_a_reason() -> None:
    broker = await open_broker()
    speaker = await Speaker.to(broker, greet=False)
    speaker.transport.write(b"GET / HTTP/1.1\r\n\r\n" + bytes(50))
    await turns()
    assert speaker.is_lost
    assert broker.sessions == {}
    await broker.stop()


async def test_a_frame_cut_off_in_the_middle_costs_only_its_connection() -> None:
    broker = await open_broker()
    speaker, other = await Speaker.to(broker), await Speaker.to(broker)
    whole = frame(Kind.REQUEST, 1, b'{"op":"status"}')
    speaker.transport.write(whole[:-3])
    await turns()
    speaker.transport.abort()
    await turns()
    assert isinstance(await other.request("status"), dict)
    await broker.stop()


async def test_who_never_says_hello_is_dropped() -> None:
    clock = ManualClock()
    broker = await open_broker(clock=clock)
    speaker = await Speaker.to(broker, greet=False)
    clock.advance(4_999)
    await broker.housekeeping.tick()
    await turns()
    assert not speaker.is_lost
    clock.advance(2)
    await broker.housekeeping.tick()
    await turns()
    assert speaker.is_lost
    await broker.stop()


async def test_who_is_silent_for_long_is_dropped_and_who_pings_is_not() -> None:
    clock = ManualClock()
    broker = await open_broker(clock=clock)
    silent, alive = await Speaker.to(broker), await Speaker.to(broker)
    for _ in range(5):
        clock.advance(5_000)
        await broker.housekeeping.tick()
        alive.say(Kind.PING)
        await turns()
    assert silent.is_lost
    assert not alive.is_lost
    await broker.stop()


async def test_a_frame_must_come_to_its_end_in_time() -> None:
    clock = ManualClock()
    settings = settings_with(server={"frame_ms": 1_000})
    broker = await open_broker(clock=clock, settings=settings)
    speaker = await Speaker.to(broker)
    speaker.transport.write(frame(Kind.REQUEST, 1, b'{"op":"status"}')[:-3])
    await turns()
    clock.advance(1_001)
    await broker.housekeeping.tick()
    await turns()
    assert speaker.is_lost
    await broker.stop()


async def test_work_that_takes_long_drops_nobody() -> None:
    clock = ManualClock()
    broker = await open_broker(clock=clock)
    speaker = await Speaker.to(broker)
    # A rewrite takes a minute; meanwhile the clock that sessions see goes on.
    for _ in range(60):
        clock.advance(1_000)
        await broker.housekeeping.tick()
        speaker.say(Kind.PING)
        await turns()
    await broker.housekeeping.tidy()
    await broker.housekeeping.tick()
    await turns()
    assert not speaker.is_lost
    await broker.stop()


async def test_what_was_sent_after_a_fault_is_not_looked_at() -> None:
    broker = await open_broker()
    speaker = await Speaker.to(broker)
    await speaker.publish("orders")
    speaker.say(Kind.READ, 5, b"no json")
    speaker.say_publish("orders")
    speaker.say(Kind.READ, 6, b"no json")
    await turns()
    assert [kind for kind, _, _ in speaker.frames[2:]] == [Kind.ERROR]
    assert broker.catalogue.find("orders").next_offset == 1
    await broker.stop()


async def test_who_does_not_read_the_answers_is_not_answered_more_until_it_does() -> None:
    broker = await open_broker()
    speaker = await Speaker.to(broker)
    (session,) = broker.sessions
    for number in range(20):
        await speaker.request("topic.create", topic=f"topic-{number}")
    speaker.transport.pause_reading()
    asked = list(range(1_000, 1_500))
    # In one piece: it is received before it is known that nobody reads the answers.
    requests = [frame(Kind.REQUEST, id_, b'{"op":"topic.list"}') for id_ in asked]
    speaker.transport.write(b"".join(requests))
    last = speaker.say_publish("topic-0")
    await turns(100)
    assert session.unsent_bytes < 80_000
    assert broker.catalogue.find("topic-0").next_offset == 0
    speaker.transport.resume_reading()
    await turns(2_000)
    assert [id_ for _, id_, _ in speaker.frames if id_ >= 1_000] == asked
    assert speaker.answer(last) != "overloaded"
    assert broker.catalogue.find("topic-0").next_offset == 1
    assert session.routes is broker.publishing.routes.of("")
    await broker.stop()


async def test_who_leaves_with_answers_unread_costs_nothing_more() -> None:
    broker = await open_broker()
    speaker, other = await Speaker.to(broker), await Speaker.to(broker)
    speaker.transport.pause_reading()
    speaker.transport.write(frame(Kind.REQUEST, 1, b'{"op":"status"}') * 1_000)
    await turns()
    speaker.transport.abort()
    await turns()
    assert len(broker.sessions) == 1
    assert isinstance(await other.request("status"), dict)
    await broker.stop()


def large_publish(size: int) -> bytes:
    batch = encode_batch([bytes(size)])
    return publish_head(1, "orders", durability=0, batch_bytes=len(batch)) + batch


async def test_large_frames_come_to_their_end_in_turn_when_all_hold_too_much() -> None:
    settings = settings_with(
        server={"inflight_bytes_max": 1 << 20}, log={"segment_bytes_max": 8 << 20}
    )
    broker = await open_broker(settings=settings)
    # What is complete has a limit of its own, which is not looked at here.
    broker.publishing._inflight_bytes_max = 1 << 30
    whole = large_publish(700_000)
    speakers = [await Speaker.to(broker) for _ in range(6)]
    for speaker in speakers:
        speaker.transport.write(whole[:300_000])
        await turns()
    waiting = [session.waits_for_room for session in broker.sessions]
    assert waiting == [False, True, True, True, True, True]
    for speaker in reversed(speakers):
        speaker.transport.write(whole[300_000:])
        await turns()
    await turns(200)
    assert not any(isinstance(speaker.answer(1), str) for speaker in speakers)
    assert broker.catalogue.find("orders").next_offset == 6
    assert not any(session.is_paused for session in broker.sessions)
    assert broker.intake._large_bytes == 0
    await broker.stop()


async def test_who_sends_one_large_frame_after_the_other_lets_others_have_their_turn() -> None:
    settings = settings_with(
        server={"inflight_bytes_max": 100_000}, log={"segment_bytes_max": 8 << 20}
    )
    broker = await open_broker(settings=settings)
    busy, other = await Speaker.to(broker), await Speaker.to(broker)
    whole = large_publish(90_000)
    for speaker in (busy, other):
        speaker.transport.write(whole[:80_000])
        await turns()
    assert [session.waits_for_room for session in broker.sessions] == [False, True]
    busy.transport.write(whole[80_000:] + whole[:80_000])
    await turns()
    assert [session.waits_for_room for session in broker.sessions] == [True, False]
    other.transport.write(whole[80_000:])
    busy.transport.write(whole[80_000:])
    await turns()
    assert broker.catalogue.find("orders").next_offset == 3
    assert not any(session.is_paused for session in broker.sessions)
    await broker.stop()


async def test_a_large_frame_that_stalls_gives_its_room_to_others_in_time() -> None:
    clock = ManualClock()
    settings = settings_with(
        server={"inflight_bytes_max": 100_000, "frame_ms": 1_000},
        log={"segment_bytes_max": 8 << 20},
    )
    broker = await open_broker(clock=clock, settings=settings)
    stalled, other = await Speaker.to(broker), await Speaker.to(broker)
    whole = large_publish(90_000)
    stalled.transport.write(whole[:80_000])
    await turns()
    other.transport.write(whole[:80_000])
    await turns()
    other.transport.write(whole[80_000:])
    await turns()
    assert other.of(1) == []
    clock.advance(1_001)
    await broker.housekeeping.tick()
    await turns()
    assert stalled.is_lost
    assert not other.is_lost
    assert not isinstance(other.answer(1), str)
    await broker.stop()


async def test_who_connects_after_a_step_down_is_not_sent_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("onward.broker.broker.SEND_AWAY_S", 0.02)
    broker = await open_broker()
    before = await Speaker.to(broker)
    await broker.retire()
    after = await Speaker.to(broker)
    async with asyncio.timeout(10):
        while not before.is_lost:  # noqa: ASYNC110  # the broker tells nobody
            await asyncio.sleep(0.01)
    assert not after.is_lost
    await broker.stop()
