import asyncio
import contextlib
import threading
import time

import pytest

from onward.clock import Clock
from onward.testing.loop import Deadlock, VirtualClock, run, running_loop


def test_a_day_passes_in_no_time() -> None:
    async def main() -> float:
        await asyncio.sleep(86_400 * 3)
        return running_loop().time()

    before = time.monotonic()
    assert run(main(), seed=1) == 86_400 * 3
    assert time.monotonic() - before < 5


def test_timers_fire_in_the_order_of_their_time() -> None:
    fired: list[tuple[int, int]] = []

    async def wait(ms: int, clock: VirtualClock) -> None:
        await asyncio.sleep(ms / 1000)
        fired.append((ms, clock.monotonic_ms()))

    async def main() -> None:
        clock = VirtualClock(running_loop())
        async with asyncio.TaskGroup() as group:
            for ms in (570, 3, 290, 1, 1_001):
                group.create_task(wait(ms, clock))

    run(main(), seed=1)
    assert fired == [(ms, ms) for ms in (1, 3, 290, 570, 1_001)]


def test_the_clock_follows_the_loop_and_its_wall_can_be_set() -> None:
    async def main() -> list[tuple[int, int]]:
        clock = VirtualClock(running_loop(), start_ms=10_000)
        seen: Clock = clock
        await asyncio.sleep(0.5)
        before = (seen.now_ms(), seen.monotonic_ms())
        clock.jump(-700)
        return [before, (seen.now_ms(), seen.monotonic_ms())]

    assert run(main(), seed=1) == [(10_500, 500), (9_800, 500)]


def test_waiting_for_what_never_comes_is_a_deadlock_that_names_who_waits() -> None:
    async def stuck() -> None:
        await asyncio.Event().wait()

    async def main() -> None:
        await asyncio.create_task(stuck(), name="the stuck one")

    with pytest.raises(Deadlock, match="the stuck one .*stuck"):
        run(main(), seed=1)


def test_a_run_in_which_time_stands_still_is_a_deadlock(monkeypatch: pytest.MonkeyPatch) -> None:
    def spin() -> None:
        running_loop().call_soon(spin)

    async def main() -> None:
        spin()
        await asyncio.sleep(1)

    monkeypatch.setattr("onward.testing.loop.TURNS_WITHOUT_TIME_MAX", 1_000)
    with pytest.raises(Deadlock, match="time stands still"):
        run(main(), seed=1)


def test_a_timeout_ends_a_wait() -> None:
    async def main() -> float:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(7.5):
                await asyncio.Event().wait()
        return running_loop().time()

    assert run(main(), seed=1) == 7.5


def test_the_threadsafe_call_works_on_the_loops_own_thread_only() -> None:
    async def main() -> list[str]:
        loop, seen, done = running_loop(), [], asyncio.Event()

        def elsewhere() -> None:
            try:
                loop.call_soon_threadsafe(seen.append, "wrong")
            except RuntimeError as error:
                seen.append(str(error))

        loop.call_soon_threadsafe(done.set)
        await done.wait()
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        return seen

    assert run(main(), seed=1) == ["a virtual loop has one thread: use run_in_executor"]


def test_an_executor_runs_its_calls_in_order_on_the_loops_thread() -> None:
    async def main() -> tuple[list[int], list[int], float]:
        ran: list[int] = []

        def work(number: int) -> int:
            assert threading.get_ident() == loop_thread
            ran.append(number)
            return number

        loop, loop_thread = running_loop(), threading.get_ident()
        results = await asyncio.gather(*(loop.run_in_executor(None, work, n) for n in range(9)))
        return ran, results, loop.time()

    ran, results, passed = run(main(), seed=1)
    assert ran == results == list(range(9))
    assert passed > 0


def test_an_error_in_an_executor_reaches_who_waits_for_it() -> None:
    def work() -> None:
        raise OSError("broken")

    async def main() -> None:
        await asyncio.to_thread(work)

    with pytest.raises(OSError, match="broken"):
        run(main(), seed=1)


def test_an_error_that_nobody_caught_fails_the_run() -> None:
    def broken() -> None:
        raise ValueError("in a callback")

    async def main() -> None:
        running_loop().call_soon(broken)
        await asyncio.sleep(1)

    with pytest.raises(ValueError, match="in a callback"):
        run(main(), seed=1)


def test_tasks_left_over_are_cancelled_at_the_end() -> None:
    cancelled: list[str] = []

    async def background() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.append("background")

    async def main() -> asyncio.Task[None]:
        task = asyncio.create_task(background())
        await asyncio.sleep(0)
        return task

    assert run(main(), seed=1).cancelled()
    assert cancelled == ["background"]


def test_the_same_seed_gives_the_same_run_and_another_one_another() -> None:
    async def main() -> list[tuple[str, int]]:
        loop, trace = running_loop(), []

        async def walk() -> None:
            for _ in range(20):
                await asyncio.sleep(loop.random.random())
                await asyncio.to_thread(lambda: None)
                task = asyncio.current_task()
                assert task is not None
                trace.append((task.get_name(), loop.now_us))

        async with asyncio.TaskGroup() as group:
            for _ in range(5):
                group.create_task(walk())
        return trace

    assert run(main(), seed=7) == run(main(), seed=7)
    assert run(main(), seed=7) != run(main(), seed=8)
