"""Settings: one name in three places, no mistake is swallowed, no secret is shown."""

from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec import structs

from onward import App, connect_sync
from onward.broker.serve import serve
from onward.config import (
    OTHER_VARIABLES,
    SETTINGS,
    Setting,
    check,
    find_file,
    is_loopback,
    load,
    rows,
)
from onward.errors import InvalidRequest
from onward.settings import (
    AuthSettings,
    LogSettings,
    ServerSettings,
    Settings,
    Token,
    TopicSettings,
)
from onward.testing.kit import kit

EVERY = pytest.mark.parametrize("setting", SETTINGS.values(), ids=lambda setting: setting.name)


def write(folder: Path, text: str) -> Path:
    path = folder / "onward.toml"
    path.write_text(text)
    return path


def test_without_anything_given_the_settings_are_the_defaults():
    assert load() == Settings()
    assert {source for _, _, source in rows(load())} == {"default"}


def test_one_setting_has_one_name_in_a_file_in_the_environment_and_as_a_flag():
    setting = SETTINGS["log.segment_bytes_max"]
    assert setting.variable == "ONWARD_LOG_SEGMENT_BYTES_MAX"
    assert setting.flag == "--log.segment-bytes-max"


def test_a_flag_wins_over_the_environment_and_that_over_the_file(tmp_path: Path):
    path = write(tmp_path, "[server]\nport = 1\nheartbeat_ms = 1000\nhello_ms = 7\n")
    environ = {"ONWARD_SERVER_PORT": "2", "ONWARD_SERVER_HEARTBEAT_MS": "2s"}
    settings = load(path=path, environ=environ, flags={"server.port": "3"})
    assert (settings.server.port, settings.server.heartbeat_ms, settings.server.hello_ms) == (
        3,
        2_000,
        7,
    )
    assert settings.sources == {
        "server.port": "flag --server.port",
        "server.heartbeat_ms": "environment ONWARD_SERVER_HEARTBEAT_MS",
        "server.hello_ms": f"file {path}",
    }


def test_the_unit_is_read_by_the_name(tmp_path: Path):
    path = write(tmp_path, '[log]\nretention_ms = "30d"\nsegment_bytes_max = "64MiB"\n')
    log = load(path=path).log
    assert (log.retention_ms, log.segment_bytes_max) == (30 * 86_400_000, 64 << 20)


@EVERY
def test_every_default_reads_back_from_its_own_text(setting: Setting):
    assert setting.parse(setting.format(setting.default)) == setting.default


@EVERY
def test_every_setting_can_be_given_in_the_environment(setting: Setting):
    settings = load(environ={setting.variable: setting.format(setting.default)})
    assert settings.sources == {setting.name: f"environment {setting.variable}"}


@EVERY
def test_every_setting_explains_itself_in_one_sentence(setting: Setting):
    assert setting.description.endswith(".")
    assert setting.description[0].isupper()


@pytest.mark.parametrize("word", ["false", "no", "off", "0", "False"])
def test_a_switch_is_turned_off_with_the_usual_words(word: str):
    assert load(environ={"ONWARD_TOPICS_AUTO_CREATE": word}).topics.auto_create is False


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[log]\nsegment_byte_max = 1\n", "did you mean log.segment_bytes_max?"),
        ("[server]\ndurability = 'disk'\n", "did you mean log.durability?"),
        ("[lgo]\nfoldr = 'x'\n", r"unknown table \[lgo\].*did you mean log\?"),
        ("[lgo]\n", r"unknown table \[lgo\].*did you mean log\?"),
        ("port = 1\n", "did you mean server.port?"),
        ("[[log]]\nfolder = 'x'\n", r"unknown"),
        ("[log.folder]\nx = 1\n", "log.folder"),
    ],
)
def test_an_unknown_name_in_a_file_is_an_error_that_suggests_the_nearest(
    tmp_path: Path, text: str, expected: str
):
    with pytest.raises(InvalidRequest, match=expected):
        load(path=write(tmp_path, text))


def test_an_unknown_variable_is_an_error_that_suggests_the_nearest():
    with pytest.raises(InvalidRequest, match="did you mean ONWARD_LOG_FOLDER?"):
        load(environ={"ONWARD_LOG_FOLDR": "x"})


def test_an_unknown_flag_is_an_error_that_suggests_the_nearest():
    with pytest.raises(InvalidRequest, match=r"did you mean log\.folder\?"):
        load(flags={"log.foldr": "x"})


def test_variables_that_are_not_settings_are_left_alone():
    environ = {
        "PATH": "/bin",
        "ONWARD_ADDRESS": "localhost:7700",
        # Kubernetes sets these beside a service with the name onward-server.
        "ONWARD_SERVER_SERVICE_HOST": "10.0.0.1",
        "ONWARD_SERVER_SERVICE_PORT": "7700",
        "ONWARD_SERVER_PORT": "tcp://10.0.0.1:7700",
        "ONWARD_SERVER_PORT_7700_TCP_ADDR": "10.0.0.1",
    }
    assert load(environ=environ) == Settings()


@pytest.mark.parametrize(
    ("name", "raw"),
    [
        ("server.port", "http"),
        ("server.port", 70_000),
        ("server.port", -1),
        ("server.port", True),
        ("server.port", 1.5),
        ("server.host", 7),
        ("server.heartbeat_ms", "5 parsecs"),
        ("server.heartbeat_ms", 1),
        ("log.durability", "hope"),
        ("log.folder", ""),
        ("log.segment_bytes_max", "huge"),
        ("log.segment_bytes_max", [1]),
        ("topics.auto_create", "maybe"),
        ("topics.auto_create", 3),
        ("auth.tokens", 7),
        ("auth.tokens", [7]),
    ],
)
def test_a_wrong_value_is_an_error_that_names_the_setting_and_its_source(name: str, raw: object):
    with pytest.raises(InvalidRequest, match=rf"^{name} \(flag --"):
        load(flags={name: raw})


IN_A_PROGRAM = [
    (Settings(server=ServerSettings(port=70_000)), "server.port (program): 70000: at most 65535"),
    (Settings(server=ServerSettings(port=True)), "server.port (program): True: expected int, got"),
    (Settings(server=ServerSettings(port="1")), "server.port (program): '1': expected int, got"),  # type: ignore[arg-type]
    (Settings(server=ServerSettings(host=7)), "server.host (program): 7: expected str, got int"),  # type: ignore[arg-type]
    (Settings(log=LogSettings(folder="")), "log.folder (program): '': expected str of length >="),
    (Settings(log=LogSettings(segment_bytes_max=2_000)), "log.segment_bytes_max (program): 2000: "),
    (Settings(log=LogSettings(retention_ms="7d")), "log.retention_ms (program): '7d': expected"),  # type: ignore[arg-type]
    (Settings(log=LogSettings(retention_ms=1.5)), "log.retention_ms (program): 1.5: expected"),  # type: ignore[arg-type]
    (
        Settings(log=LogSettings(durability="hope")),
        "log.durability (program): 'hope': expected one",
    ),  # type: ignore[arg-type]
    (Settings(topics=TopicSettings(auto_create=3)), "topics.auto_create (program): 3: expected"),  # type: ignore[arg-type]
    (Settings(topics=TopicSettings(message_bytes_max=17 << 20)), "larger than topics.batch_bytes"),
    (Settings(auth=AuthSettings(tokens=["ann:s3cret"])), "auth.tokens (program): a tuple of Token"),  # type: ignore[arg-type]
    (Settings(auth=AuthSettings(tokens=(Token("ann", ""),))), "auth.tokens (program): each token"),
    (Settings(auth=AuthSettings(tokens=(Token(7, "s3cret"),))), "auth.tokens (program): the name"),  # type: ignore[arg-type]
    (Settings(auth=AuthSettings(tokens=(Token("a", "b"),) * 2)), "two tokens have the same name"),
    (Settings(auth=AuthSettings(tokens=(Token("@broker", "b"),))), "does not begin with '@'"),
    (Settings(log=None), "log (program): expected LogSettings, got NoneType"),  # type: ignore[arg-type]
    ({"log": {}}, "settings are onward.settings.Settings, not dict"),
]


@pytest.mark.parametrize(("settings", "said"), IN_A_PROGRAM, ids=[said for _, said in IN_A_PROGRAM])
def test_settings_of_a_program_are_refused_like_those_of_a_file(
    settings: Settings, said: str, tmp_path: Path
):
    folder = tmp_path / "log"
    starts: list[Callable[[], object]] = [
        lambda: check(settings),
        lambda: serve(settings),
        lambda: connect_sync("memory:", settings=settings).open(),
        lambda: connect_sync(f"file:{folder}", settings=settings).open(),
        app_on(f"file:{folder}", settings).main,
        lambda: kit(App(), settings=settings),
    ]
    for start in starts:
        with pytest.raises(InvalidRequest) as caught:
            start()
        assert said in str(caught.value)
        assert "s3cret" not in str(caught.value)
    assert not folder.exists()


def app_on(address: str, settings: Settings) -> App:
    app = App(address, settings=settings)
    app.consumer("orders", group="billing")(lambda body: None)
    return app


@pytest.mark.parametrize("wrong", [-1, None, 10**40, [1], {}], ids=repr)
@pytest.mark.parametrize("name", sorted(SETTINGS.keys() - {"auth.tokens", "replica.token"}))
def test_a_wrong_value_is_the_same_error_in_a_program_and_elsewhere(name: str, wrong: object):
    setting = SETTINGS[name]
    table = structs.replace(getattr(Settings(), setting.table), **{setting.key: wrong})
    given = structs.replace(Settings(), **{setting.table: table})
    elsewhere = error_of(lambda: load(flags={name: wrong}))
    assert error_of(lambda: check(given)) == elsewhere.replace(f"flag {setting.flag}", "program")


def test_a_secret_is_shown_nowhere_and_is_no_flag(tmp_path: Path):
    file = tmp_path / "onward.toml"
    file.write_text('[replica]\nof = "broker-1:7700"\ntoken = "s3cret"\n')
    for settings in (load(path=file), load(environ={"ONWARD_REPLICA_TOKEN": "s3cret"})):
        assert settings.replica.token == "s3cret"
        assert "s3cret" not in repr(settings)
        assert "***" in [value for setting, value, _ in rows(settings) if setting.is_secret]
    refused = error_of(lambda: load(flags={"replica.token": "s3cret"}))
    assert "set ONWARD_REPLICA_TOKEN, or write it to a file" in refused
    file.write_text('[replica]\ntoken = ["s3cret"]\n')
    wrong = error_of(lambda: load(path=file))
    assert wrong.startswith("replica.token (file ")
    assert "s3cret" not in refused + wrong


def error_of(call: Callable[[], object]) -> str:
    try:
        call()
    except InvalidRequest as error:
        return str(error)
    return ""


def test_a_value_that_was_loaded_and_is_wrong_now_names_where_it_came_from():
    settings = load(flags={"server.port": 7})
    wrong = structs.replace(settings, server=structs.replace(settings.server, port=-1))
    with pytest.raises(
        InvalidRequest, match=r"^server\.port \(flag --server\.port\): -1: at least 0"
    ):
        check(wrong)


def test_a_broker_inside_a_program_listens_nowhere_and_needs_no_tokens_for_that():
    open_to_all = Settings(server=ServerSettings(host="0.0.0.0"))
    with connect_sync("memory:", settings=open_to_all) as mq:
        assert mq.publish("orders", "a").offset == 0
    with pytest.raises(InvalidRequest, match=r"set auth\.tokens"):
        serve(open_to_all)


@pytest.mark.parametrize("text", ["port = ", "\x00", "[server"])
def test_a_file_that_is_not_toml_is_an_error_that_names_the_file(tmp_path: Path, text: str):
    with pytest.raises(InvalidRequest, match=r"onward\.toml is not TOML"):
        load(path=write(tmp_path, text))


def test_a_named_file_that_does_not_exist_is_an_error(tmp_path: Path):
    with pytest.raises(InvalidRequest, match="no such file"):
        load(path=tmp_path / "nope.toml")


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "example.com", ""])
def test_a_broker_without_tokens_does_not_listen_to_other_machines(host: str):
    with pytest.raises(InvalidRequest, match=r"set auth\.tokens, or listen on 127\.0\.0\.1"):
        load(flags={"server.host": host})
    assert load(flags={"server.host": host, "auth.tokens": "ann:s3cret"}).server.host == host


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "localhost", "::1", "[::1]"])
def test_loopback_needs_no_tokens(host: str):
    assert is_loopback(host)
    assert load(flags={"server.host": host}).server.host == host


def test_limits_that_contradict_each_other_are_refused():
    with pytest.raises(InvalidRequest, match="larger than topics.batch_bytes_max"):
        load(flags={"topics.message_bytes_max": "17MiB"})
    with pytest.raises(InvalidRequest, match="larger than server.inflight_bytes_max"):
        load(flags={"topics.batch_bytes_max": "65MiB"})


def test_tokens_are_read_from_a_list_and_from_a_comma_separated_text(tmp_path: Path):
    expected = (Token("ann", "s3:cret"), Token("bob", "x"))
    path = write(tmp_path, '[auth]\ntokens = ["ann:s3:cret", "bob:x"]\n')
    assert load(path=path).auth.tokens == expected
    assert load(environ={"ONWARD_AUTH_TOKENS": "ann:s3:cret,bob:x"}).auth.tokens == expected


def test_a_secret_is_not_in_anything_that_is_shown():
    settings = load(flags={"auth.tokens": "ann:s3cret"})
    token = settings.auth.tokens[0]
    shown = [repr(settings), str(settings), repr(token), str(token), f"{token}"]
    shown += [str(list(rows(settings))), str(token.__rich_repr__())]
    assert not any("s3cret" in text for text in shown)
    assert "ann:***" in repr(settings)


@pytest.mark.parametrize("raw", ["s3cret", ":s3cret", ["s3cret"], "ann:s3cret,ann:s3cret"])
def test_a_secret_is_not_in_the_error_about_a_wrong_token(raw: object):
    with pytest.raises(InvalidRequest) as caught:
        load(flags={"auth.tokens": raw})
    assert "s3cret" not in str(caught.value)


def test_settings_do_not_change_once_they_are_loaded():
    with pytest.raises(AttributeError):
        load().server.port = 1  # type: ignore[misc]


def test_the_file_is_the_named_one_else_the_one_of_the_environment_else_in_a_usual_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    assert find_file(named=None, environ={}) is None
    write(tmp_path, "")
    assert find_file(named=None, environ={}) == Path("onward.toml")
    assert find_file(named=None, environ={"ONWARD_CONFIG": "b.toml"}) == Path("b.toml")
    assert find_file(named="a.toml", environ={"ONWARD_CONFIG": "b.toml"}) == Path("a.toml")


def test_variables_of_commands_and_tests_are_no_settings_and_are_in_the_reference():
    assert {"ONWARD_LAKE", "ONWARD_SPARK_MASTER", "ONWARD_WORKER"} < OTHER_VARIABLES
    load(environ=dict.fromkeys([*OTHER_VARIABLES, "ONWARD_TORTURE_SEED"], "1"))
    page = (Path(__file__).parents[2] / "docs/reference/config.md").read_text()
    assert {name for name in OTHER_VARIABLES if f"`{name}`" not in page} == set()


@pytest.mark.parametrize(
    "address", ["broker-1:7700", "10.0.0.1:1", "[::1]:65535", "a.example:7700"]
)
def test_an_address_to_advertise_is_a_host_and_a_port(address: str):
    assert load(flags={"server.advertise": address}).server.advertise == address


@pytest.mark.parametrize(
    "address",
    [
        "broker-1",
        ":7700",
        "a:0",
        "a:65536",
        "a:x",
        "a:1,b:2",
        "unix:/x:1",
        "tcp://a:1",
        "0.0.0.0:1",
    ],
)
def test_an_address_that_nobody_can_connect_to_is_not_advertised(address: str):
    with pytest.raises(InvalidRequest, match=r"server\.advertise"):
        load(flags={"server.advertise": address})
