"""Reading settings: one name, written three ways, and every value knows where it came from.

The later one wins:

    default  <  file: [log] segment_bytes_max = "64MiB"
             <  environment: ONWARD_LOG_SEGMENT_BYTES_MAX=64MiB
             <  flag: --log.segment-bytes-max 64MiB

What can be set is listed in settings.py. A name with the unit `_ms` is read as a duration ("10m"),
one with `bytes` in it as a size ("64MiB"). A name that does not exist is an error that suggests
the nearest one, never a value that is ignored. Settings that a program makes by itself are held to
the same limits by `check`, before a broker starts with them. Secrets are in no text that this
module makes.
"""

import ipaddress
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import get_args, get_type_hints

import msgspec

from onward.durations import format_duration, format_size, parse_ms, parse_size_bytes
from onward.errors import InvalidRequest
from onward.settings import (
    Settings,
    Token,
)


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """One setting: its names, its type, its default and its sentence."""

    table: str
    key: str
    kind: object  # the annotated type, which knows the limits
    default: object
    description: str

    @property
    def name(self) -> str:
        """The name in files and everywhere else: `log.segment_bytes_max`."""
        return f"{self.table}.{self.key}"

    @property
    def variable(self) -> str:
        """The name in the environment: `ONWARD_LOG_SEGMENT_BYTES_MAX`."""
        return f"ONWARD_{self.table}_{self.key}".upper()

    @property
    def flag(self) -> str:
        """The name on the command line: `--log.segment-bytes-max`."""
        return f"--{self.table}.{self.key.replace('_', '-')}"

    @property
    def is_secret(self) -> bool:
        """Return True if its value is shown nowhere, and cannot be a flag: others see those."""
        return self.name == "replica.token"

    @property
    def is_duration(self) -> bool:
        """Tell whether its value is a time in milliseconds: the unit is in its name."""
        return "ms" in self.key.split("_")

    def format(self, value: object) -> str:
        """Write a value as a person would.

        >>> SETTINGS["log.retention_ms"].format(604_800_000)
        '7d'
        """
        if isinstance(value, bool):
            return "true" if value else "false"
        if isinstance(value, tuple | list):
            return ", ".join(map(str, value))
        if isinstance(value, int) and self.is_duration:
            return format_duration(value)
        if isinstance(value, int) and "bytes" in self.key:
            return format_size(value)
        return str(value)

    def parse(self, raw: object) -> object:
        """Read a value as a person or a TOML file writes it.

        >>> SETTINGS["log.segment_bytes_max"].parse("64MiB")
        67108864
        """
        return self._convert(self._read(raw), raw)

    def check(self, value: object) -> None:
        """Refuse a value that a program gave if it is of another kind, or out of range.

        >>> SETTINGS["server.port"].check(7701)
        """
        if self.name == "auth.tokens":
            _check_tokens(value)
        else:
            # Text with a unit is for people: a program gives the number that the name says.
            self._convert(value if isinstance(value, str) else self._read(value), value)

    def _convert(self, value: object, raw: object) -> object:
        try:
            return msgspec.convert(value, type=self.kind, strict=True)
        except msgspec.ValidationError as error:
            # Whatever was wrong with a token, its text must not reach a screen or a log.
            shown = "" if self.is_secret or self.name == "auth.tokens" else f"{raw!r}: "
            raise InvalidRequest(shown + self._expected(error)) from None

    def _expected(self, error: msgspec.ValidationError) -> str:
        """Return what a value may be, in the units in which people write it."""
        if choices := get_args(get_args(self.kind)[0]):
            return f"expected one of {', '.join(map(str, choices))}"
        if limit := _OUT_OF_RANGE.match(str(error)):
            bound = self.format(int(limit[2]))
            unit = " bytes" if "bytes" in self.key and bound.isdecimal() else ""
            return f"at {_BOUNDS[limit[1]]} {bound}{unit}"
        return str(error).replace("`", "").lower()

    def _read(self, raw: object) -> object:
        if self.name == "auth.tokens":
            return _read_tokens(raw)
        if isinstance(raw, str) and isinstance(self.default, tuple):
            return [text.strip() for text in raw.split(",") if text.strip()]
        if isinstance(raw, str | int) and self.is_duration:
            return parse_ms(raw)
        if isinstance(raw, str | int) and "bytes" in self.key:
            return parse_size_bytes(raw)
        if isinstance(raw, str) and isinstance(self.default, bool):
            return _WORDS.get(raw.lower(), raw)
        if isinstance(raw, str) and isinstance(self.default, int) and raw.isdecimal():
            return int(raw)
        return raw


TABLES = ("server", "log", "topics", "schedule", "groups", "replica", "auth")


def _list_settings() -> Iterator[Setting]:
    for table in TABLES:
        kind = type(getattr(_DEFAULTS, table))
        for key, annotated in get_type_hints(kind, include_extras=True).items():
            default = getattr(getattr(_DEFAULTS, table), key)
            text = next(meta.description for meta in annotated.__metadata__ if meta.description)
            yield Setting(table=table, key=key, kind=annotated, default=default, description=text)


_DEFAULTS = Settings()
_OUT_OF_RANGE = re.compile(r"Expected `int` ([<>]=) (-?\d+)")
_BOUNDS = {"<=": "most", ">=": "least"}
_WORDS = {"true": True, "yes": True, "on": True, "1": True} | dict.fromkeys(
    ("false", "no", "off", "0"), False
)

SETTINGS: dict[str, Setting] = {setting.name: setting for setting in _list_settings()}
"""Every setting by its name, in the order of the documentation."""

FILE_PLACES = (Path("onward.toml"), Path("/etc/onward/onward.toml"))
"""Where a settings file is looked for when none is named; the first that exists is read."""

OTHER_VARIABLES = frozenset(
    {
        "ONWARD_CONFIG", "ONWARD_ADDRESS", "ONWARD_TOKEN", "ONWARD_DEBUG", "ONWARD_LAKE",
        "ONWARD_SPARK_MASTER", "ONWARD_WORKER", "ONWARD_SIM_SEED", "ONWARD_TORTURE_SEED",
        "ONWARD_TORTURE_MESSAGES", "ONWARD_TORTURE_SPARK_KILLS", "ONWARD_TORTURE_REPLICA_KILLS",
    }
)  # fmt: skip
"""Variables that are ours but no settings of a broker."""

# Kubernetes puts these into every container beside a service called onward or onward-server.
_FOREIGN = re.compile(
    r"\w+_SERVICE_HOST=.*|\w+_SERVICE_PORT(_\w+)?=.*"
    r"|\w+_PORT=(tcp|udp|sctp)://.*|\w+_PORT_\d+_(TCP|UDP|SCTP)(_\w+)?=.*",
    re.ASCII | re.DOTALL,
)


def load(
    *,
    path: Path | None = None,
    environ: Mapping[str, str] | None = None,
    flags: Mapping[str, object] | None = None,
) -> Settings:
    """Read the settings from a file, the environment and flags, and check that they fit together.

    Nothing is looked up that is not given: `find_file` finds the file, the caller brings
    `os.environ`. Flags are named as settings are.

    >>> settings = load(environ={"ONWARD_LOG_RETENTION_MS": "30d"}, flags={"server.port": "7701"})
    >>> settings.log.retention_ms, settings.sources["server.port"]
    (2592000000, 'flag --server.port')
    """
    values: dict[str, dict[str, object]] = {table: {} for table in TABLES}
    sources: dict[str, str] = {}
    for setting, raw, source in _given(path, environ or {}, flags or {}):
        try:
            values[setting.table][setting.key] = setting.parse(raw)
        except InvalidRequest as error:
            raise InvalidRequest(f"{setting.name} ({source}): {error}") from None
        sources[setting.name] = source
    tables = {
        table: msgspec.convert(values[table], type(getattr(_DEFAULTS, table))) for table in TABLES
    }
    settings = Settings(**tables, sources=sources)
    check(settings)
    return settings


def find_file(*, named: str | None, environ: Mapping[str, str]) -> Path | None:
    """Return the settings file to read: the named one, else ONWARD_CONFIG, else a usual place.

    >>> find_file(named="mine.toml", environ={})
    PosixPath('mine.toml')
    """
    chosen = named or environ.get("ONWARD_CONFIG")
    if chosen:
        return Path(chosen)
    return next((place for place in FILE_PLACES if place.is_file()), None)


def check(settings: Settings, *, listens: bool = True) -> None:
    """Refuse settings that are wrong one by one, or together.

    They may be from a program, so nothing is taken for granted. A broker inside a program does not
    listen, so nobody can reach it.

    >>> from onward.settings import ServerSettings
    >>> check(Settings())
    >>> from onward.settings import ServerSettings
    >>> check(Settings(server=ServerSettings(port=70_000)))
    Traceback (most recent call last):
    onward.errors.InvalidRequest: server.port (program): 70000: at most 65535
    """
    _check_each(settings)
    server, topics = settings.server, settings.topics
    if listens and not settings.auth.tokens and not is_loopback(server.host):
        raise InvalidRequest(
            f"server.host {server.host!r} can be reached from other machines, and auth.tokens is "
            "empty: set auth.tokens, or listen on 127.0.0.1"
        )
    if topics.message_bytes_max > topics.batch_bytes_max:
        raise InvalidRequest("topics.message_bytes_max is larger than topics.batch_bytes_max")
    if topics.batch_bytes_max > server.inflight_bytes_max:
        raise InvalidRequest("topics.batch_bytes_max is larger than server.inflight_bytes_max")
    if server.advertise:
        _check_advertised(server.advertise)
    if settings.replica.of and settings.log.durability not in ("disk",):
        raise InvalidRequest("a replica syncs what it stores: log.durability is 'disk'")


def _check_advertised(address: str) -> None:
    """Refuse what no client could connect to."""
    host, _, port = address.rpartition(":")
    is_port = port.isascii() and port.isdigit() and 0 < int(port) < 65_536
    if not is_port or not re.fullmatch(r"[\w.-]+|\[[0-9A-Fa-f:.]+\]", host):
        raise InvalidRequest(
            f"server.advertise {address!r}: expected a host and a port, such as 'broker-1:7700'"
        )
    if host in ("0.0.0.0", "[::]"):
        raise InvalidRequest(
            f"server.advertise {address!r}: nobody can connect to this address; name the host"
        )


def _check_each(settings: object) -> None:
    if not isinstance(settings, Settings):
        raise InvalidRequest(
            f"settings are onward.settings.Settings, not {type(settings).__name__}"
        )
    for table in TABLES:
        given, wanted = getattr(settings, table), type(getattr(_DEFAULTS, table))
        if not isinstance(given, wanted):
            raise InvalidRequest(
                f"{table} (program): expected {wanted.__name__}, got {type(given).__name__}"
            )
    for setting in SETTINGS.values():
        try:
            setting.check(getattr(getattr(settings, setting.table), setting.key))
        except InvalidRequest as error:
            source = settings.sources.get(setting.name, "program")
            raise InvalidRequest(f"{setting.name} ({source}): {error}") from None


def is_loopback(host: str) -> bool:
    """Say whether only this machine can reach an address.

    >>> is_loopback("127.0.0.1"), is_loopback("0.0.0.0")
    (True, False)
    """
    try:
        return host == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False  # some other name: whatever it means today, it may mean more tomorrow


def rows(settings: Settings) -> Iterator[tuple[Setting, object, str]]:
    """Yield every setting with its value and where that came from; secrets as `***`.

    >>> [value for setting, value, source in rows(Settings()) if setting.name == "server.port"]
    [7700]
    """
    for setting in SETTINGS.values():
        value = getattr(getattr(settings, setting.table), setting.key)
        shown = [str(token) for token in value] if isinstance(value, tuple) else value
        if setting.is_secret and value:
            shown = "***"
        yield setting, shown, settings.sources.get(setting.name, "default")


_Given = Iterator[tuple[Setting, object, str]]


def _given(path: Path | None, environ: Mapping[str, str], flags: Mapping[str, object]) -> _Given:
    if path is not None:
        yield from _given_in_file(path)
    yield from _given_in_environment(environ)
    for name, raw in flags.items():
        setting = _setting(name, "flag")
        if setting.is_secret:
            raise InvalidRequest(
                f"{name} is a secret: set {setting.variable}, or write it to a file"
            )
        yield setting, raw, f"flag {setting.flag}"


def _given_in_file(path: Path) -> _Given:
    source = f"file {path}"
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidRequest(
            f"cannot read {source}: {(error.strerror or 'failed').lower()}"
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"{source} is not TOML: {error}") from None
    for table, keys in tables.items():
        if not isinstance(keys, dict):
            raise _unknown(table, source)
        if not keys and not any(name.startswith(f"{table}.") for name in SETTINGS):
            raise _unknown(table, source)
        for key, raw in keys.items():
            yield _setting(f"{table}.{key}", source), raw, source


def _given_in_environment(environ: Mapping[str, str]) -> _Given:
    by_variable = {setting.variable: setting for setting in SETTINGS.values()}
    for variable, raw in environ.items():
        if not variable.startswith("ONWARD_") or variable in OTHER_VARIABLES:
            continue
        if _FOREIGN.fullmatch(f"{variable}={raw}"):
            continue
        if variable not in by_variable:
            known = [*by_variable, *OTHER_VARIABLES]
            raise InvalidRequest(f"unknown variable {variable}{_nearest(variable, known)}")
        yield by_variable[variable], raw, f"environment {variable}"


def _setting(name: str, source: str) -> Setting:
    if name not in SETTINGS:
        raise _unknown(name, source)
    return SETTINGS[name]


def _unknown(name: str, source: str) -> InvalidRequest:
    tables = {setting.table for setting in SETTINGS.values()}
    table, _, key = name.partition(".")
    if table not in tables and not any(other.endswith(f".{key or table}") for other in SETTINGS):
        return InvalidRequest(f"unknown table [{table}] in {source}{_nearest(table, tables)}")
    return InvalidRequest(f"unknown setting {name} in {source}{_nearest(name, SETTINGS)}")


def _nearest(name: str, known: Iterable[str]) -> str:
    # The right key in the wrong table is nearer than any spelling.
    same_key = [other for other in known if other.partition(".")[2] == name.rpartition(".")[2]]
    near = same_key or get_close_matches(name, known, n=1, cutoff=0.5)
    return f"; did you mean {near[0]}?" if near else ""


def _read_tokens(raw: object) -> tuple[Token, ...]:
    texts = [text for text in raw.split(",") if text] if isinstance(raw, str) else raw
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise InvalidRequest("a list of 'name:secret' is expected")
    tokens = tuple(Token(name, secret) for name, _, secret in (t.partition(":") for t in texts))
    _check_tokens(tokens)
    return tokens


def _check_tokens(tokens: object) -> None:
    if not isinstance(tokens, tuple) or not all(isinstance(token, Token) for token in tokens):
        raise InvalidRequest("a tuple of Token(name, secret) is expected")
    if not all(isinstance(text, str) for token in tokens for text in (token.name, token.secret)):
        raise InvalidRequest("the name and the secret of a token are text")
    # What was given is not repeated in the error: it may be a secret without a name.
    if not all(token.name and token.secret for token in tokens):
        raise InvalidRequest("each token is written 'name:secret'")
    if len({token.name for token in tokens}) < len(tokens):
        raise InvalidRequest("two tokens have the same name")
    if any(token.name.startswith("@") for token in tokens):
        # The broker acts under such a name (`permissions.BROKER`), and is never refused.
        raise InvalidRequest("the name of a token does not begin with '@'")
