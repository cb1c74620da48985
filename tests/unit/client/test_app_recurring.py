"""`@app.recurring`: schedules are declared next to their functions; operators may pause them."""

from __future__ import annotations

import logging

import pytest

from onward import App, Client, connect
from onward.errors import InvalidRequest
from onward.testing.kit import kit


def make_app(cron: str = "0 9 * * *") -> App:
    app = App()

    @app.recurring("report", cron=cron, body={"of": "sales"}, tag=["a", "b"], key="k")
    @app.consumer("reports", group="reporter")
    async def report(order: dict[str, str]) -> None: ...

    return app


async def start(app: App, mq: Client) -> None:
    async with app.running(mq):
        pass


def test_a_function_with_a_schedule_is_called_by_the_clock() -> None:
    app, seen = App(), []

    @app.recurring("report", cron="0 9 * * *", body="daily")
    @app.consumer("reports", group="reporter")
    async def report(body: str) -> None:
        seen.append(body)

    with kit(app) as k:
        k.advance("2d")
        assert seen == ["daily", "daily"]


def test_a_schedule_may_be_for_a_topic_that_others_consume() -> None:
    app = make_app()
    app.recurring("tick", "ticks", every="10m")
    with kit(app) as k:
        assert [(one.name, one.topic) for one in k.mq.recurring()] == [
            ("report", "reports"), ("tick", "ticks"),
        ]  # fmt: skip


async def test_a_pause_survives_restarts_and_changes_of_the_code() -> None:
    async with connect("memory:") as mq:
        await start(make_app(), mq)
        await mq.pause_recurring("report")
        await start(make_app(), mq)
        assert (await mq.recurring())[0].paused
        await start(make_app(cron="0 10 * * *"), mq)
        (found,) = await mq.recurring()
        assert (found.cron, found.paused) == ("0 10 * * *", True)


async def test_a_schedule_that_is_as_declared_is_not_set_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, logger="onward.app")
    async with connect("memory:") as mq:
        await start(make_app(), mq)
        assert "recurring schedule 'report' set" in caplog.text
        caplog.clear()
        await start(make_app(), mq)
        assert "recurring schedule 'report'" not in caplog.text
        await start(make_app(cron="@hourly"), mq)
        assert "recurring schedule 'report' changed" in caplog.text


async def test_a_schedule_that_is_no_longer_declared_is_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, logger="onward.app")
    async with connect("memory:") as mq:
        await mq.set_recurring("old", "reports", "", every="1h")
        await mq.set_recurring("foreign", "elsewhere", "", every="1h")
        await start(make_app(), mq)
        assert {one.name for one in await mq.recurring()} == {"old", "foreign", "report"}
    assert "onward recurring delete old" in caplog.text
    assert "foreign" not in caplog.text


def test_what_is_wrong_with_a_declaration_is_said_where_it_is_written() -> None:
    app = make_app()
    with pytest.raises(InvalidRequest, match="either cron or every"):
        app.recurring("tick", "ticks")
    with pytest.raises(InvalidRequest, match="'report' is declared twice"):
        app.recurring("report", "reports", every="1h")
    with pytest.raises(InvalidRequest, match="say the topic, or decorate a consumer"):

        @app.recurring("tick", every="1h")
        def not_a_consumer() -> None: ...
