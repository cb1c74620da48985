"""A Spark session that works at once, on this machine or on a cluster.

    >>> from onward.pipeline.sessions import session             # doctest: +SKIP
    >>> spark = session()                                       # doctest: +SKIP
    >>> spark.read.format("onward").option("topic", "orders").load().count()    # doctest: +SKIP
    120

What it does that a bare SparkSession.builder does not: finds a Java, lets the workers run this
Python, sets the few options that matter (OPTIONS says why), ships this version of Onward to a
cluster, and proves there with one small job that executors come and have what they need.
The caller's `config` wins over all of it. Every failure is one sentence.

There is one session per program, as Spark has it: a second call gives the first session again.
After `spark.stop()` the next call starts a new one, with a Java and options of its own.
"""

import os
import re
import socket
import sys
import threading
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from onward.errors import Conflict, InvalidRequest, NotInstalled, OnwardError, Unavailable
from onward.pipeline.java import find_java
from onward.pipeline.place import Place
from onward.pipeline.quiet import is_quiet, listening

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

LOCAL = "local[*]"
MASTERS = ("local", "spark://", "yarn", "k8s://")
LOOPBACK = ("127.", "localhost", "[::1]")
MEMORY_LEAST_MB = 512
REACH_S_MAX = 10.0
END_S_MAX = 60.0
STOP_S_MAX = 15.0

_ROCKSDB = "spark.sql.streaming.stateStore.rocksdb"
OPTIONS = {
    "spark.sql.execution.arrow.pyspark.enabled": "true",
    "spark.sql.session.timeZone": "UTC",
    # State on disk, and only its changes written per batch: a windowed count is 1.5 times as fast.
    "spark.sql.streaming.stateStore.providerClass": (
        "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
    ),
    f"{_ROCKSDB}.changelogCheckpointing.enabled": "true",
    # Many sessions run on one machine; a user who wants the pages says so.
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
}
_SHUFFLE = "spark.sql.shuffle.partitions"
_JAVA_OPTIONS = "spark.driver.extraJavaOptions"
_SERVERS = "spark.onward.servers"


def session(
    master: str | None = None,
    *,
    place: Place | None = None,
    name: str = "onward",
    config: Mapping[str, str] | None = None,
    memory: str = "1g",
) -> "SparkSession":
    """Return the session of this program; start it when there is none.

    `master` is `local[*]` unless said otherwise. `place` is where sources and sinks without an
    option `servers` find the broker. `memory` is for the driver and for each executor.
    """
    if find_spec("pyspark") is None:
        raise NotInstalled("pyspark is not installed: run pip install 'onward[spark]'")
    running = _running()
    if running is not None:
        return _reuse(running, master=master, place=place, config=config or {})
    master = master or LOCAL
    check_master(master)
    check_memory(memory)
    end_java()
    options = _options(master, place=place, memory=memory, config=config or {})
    with _environment(_variables(master, place)):
        spark = _start(master, name=name, options=options)
    try:
        _make_ready(spark, master=master, config=config or {})
    except BaseException:
        spark.stop()
        raise
    return spark


def end_java() -> None:
    """End the Java that a stopped session leaves behind, if there is one.

    It keeps the memory, the options and the environment that it was started with: a session that is
    started after it has ended has its own.
    """
    if "pyspark" not in sys.modules:
        return
    from pyspark import SparkContext

    gateway = SparkContext._gateway
    is_ours = getattr(gateway, "proc", None) is not None  # Not of `spark-submit` or `pyspark`.
    if gateway is None or not is_ours or SparkContext._active_spark_context is not None:
        return
    gateway.shutdown()
    gateway.proc.stdin.close()  # The end of its stdin is its end.
    gateway.proc.wait(END_S_MAX)
    SparkContext._gateway = SparkContext._jvm = None


def stop_soon() -> threading.Thread:
    """Begin to stop Spark and to end its Java, whatever they do; return the thread that does it.

    Not in the thread of a job: its connection to Java waits for an answer already.
    """
    stopping = threading.Thread(target=_stop_or_kill, name="onward-stop", daemon=True)
    stopping.start()
    return stopping


def _stop_or_kill() -> None:
    if "pyspark" not in sys.modules:
        return
    from pyspark import SparkContext

    java = getattr(SparkContext._gateway, "proc", None)
    asking = threading.Thread(target=_stop, name="onward-stop-java", daemon=True)
    asking.start()
    asking.join(STOP_S_MAX)
    if asking.is_alive() and java is not None:
        java.kill()


def _stop() -> None:
    from pyspark import SparkContext

    # What fails here ends with this program, a moment later; pyspark warns of what we want.
    with suppress(Exception), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if (context := SparkContext._active_spark_context) is not None:
            context.stop()
        end_java()


def is_local(master: str) -> bool:
    """Whether the driver is the only machine: there is nothing to ship and nobody to wait for.

    >>> is_local("local[2]"), is_local("spark://10.0.0.1:7077")
    (True, False)
    """
    return master.startswith("local") and not master.startswith("local-cluster")


def _running() -> "SparkSession | None":
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

    # Not getActiveSession: in a thread that Spark does not know yet it says that there is none.
    return SparkSession.builder.getOrCreate() if SparkContext._active_spark_context else None


def _reuse(
    spark: "SparkSession", *, master: str | None, place: Place | None, config: Mapping[str, str]
) -> "SparkSession":
    has = spark.sparkContext.master
    if master is not None and master != has:
        raise Conflict(
            f"this program has a spark session on '{has}' already: stop it before one on '{master}'"
        )
    servers = spark.conf.get(_SERVERS, None)
    if place is not None and servers is not None and servers != place.servers:
        raise Conflict(
            f"this program has a spark session for the broker at {servers} already: "
            f"stop it before one for {place.servers}"
        )
    for key, value in config.items():
        if spark.conf.isModifiable(key):
            spark.conf.set(key, value)
    return spark


def check_master(master: str) -> None:
    """Refuse at once what Spark would try for a minute.

    >>> check_master("mesos://10.0.0.1")
    Traceback (most recent call last):
    onward.errors.InvalidRequest: 'mesos://10.0.0.1' is no spark master: use local[N], ...
    """
    if not master.startswith(MASTERS):
        raise InvalidRequest(
            f"'{master}' is no spark master: use local[N], spark://HOST:PORT, yarn or k8s://URL"
        )
    if not master.startswith("spark://"):
        return
    addresses = [_address(master, one) for one in master.removeprefix("spark://").split(",")]
    if not any(_answers(host, port) for host, port in addresses):
        raise Unavailable(f"no spark master answers at '{master}'")


def check_memory(memory: str) -> None:
    """Refuse what Spark's Java would not start with.

    >>> check_memory("100m")
    Traceback (most recent call last):
    onward.errors.InvalidRequest: memory '100m' is too little for spark: give it 512m or more
    """
    found = re.fullmatch(r"(\d+)([mg])", memory.lower())
    if found is None:
        raise InvalidRequest(f"memory '{memory}' is not like 512m or 4g")
    if int(found[1]) * (1024 if found[2] == "g" else 1) < MEMORY_LEAST_MB:
        least = f"{MEMORY_LEAST_MB}m"
        raise InvalidRequest(f"memory '{memory}' is too little for spark: give it {least} or more")


def _address(master: str, text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit():
        raise InvalidRequest(f"'{master}' is no spark master: an address is HOST:PORT")
    return host.strip("[]"), int(port)


def _answers(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=REACH_S_MAX).close()
    except OSError:
        return False
    return True


def _options(
    master: str, *, place: Place | None, memory: str, config: Mapping[str, str]
) -> dict[str, str]:
    options = OPTIONS | {"spark.driver.memory": memory, "spark.executor.memory": memory}
    if _is_on_loopback(master):
        options |= {"spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1"}
    if place is not None:
        options[_SERVERS] = place.servers
    options |= config
    quiet = Path(__file__).with_name("log4j2.properties")
    if quiet.is_file():  # Not when this runs from the zip on a cluster.
        ours = f"-Dlog4j2.configurationFile={quiet.as_uri()}"
        options[_JAVA_OPTIONS] = f"{ours} {config.get(_JAVA_OPTIONS, '')}".strip()
    return options


def _is_on_loopback(master: str) -> bool:
    return is_local(master) or master.removeprefix("spark://").startswith(LOOPBACK)


def _variables(master: str, place: Place | None) -> dict[str, str]:
    """Return what must stand in the environment when Spark starts; what the user set stays."""
    wanted = {"PYSPARK_PYTHON": sys.executable, "PYSPARK_DRIVER_PYTHON": sys.executable}
    if _is_on_loopback(master):
        wanted["SPARK_LOCAL_IP"] = "127.0.0.1"
    variables = {name: value for name, value in wanted.items() if name not in os.environ}
    variables["JAVA_HOME"] = find_java()
    if place is not None:
        # Readers are planned in a process of Spark's, which inherits what we have now.
        variables["ONWARD_ADDRESS"] = place.servers
        if place.token is not None:
            variables["ONWARD_TOKEN"] = place.token
    return variables


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Have these variables in the environment for a while, and then what was there before."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _start(master: str, *, name: str, options: Mapping[str, str]) -> "SparkSession":
    from py4j.protocol import Py4JError
    from pyspark.errors import PySparkException
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.master(master).appName(name)
    for key, value in options.items():
        builder = builder.config(key, value)
    try:
        if is_quiet():
            _launch({"spark.master": master, "spark.app.name": name, **options})
        return builder.getOrCreate()
    except (PySparkException, Py4JError) as error:
        why = _why_not(master, error)  # Asks Java: before it ends.
        end_java()
        raise why from None


def _launch(options: Mapping[str, str]) -> None:
    """Start Java as Spark would, but for its stderr, which is a pipe of ours."""
    from pyspark import SparkConf, SparkContext
    from pyspark.java_gateway import launch_gateway

    conf = SparkConf()
    for key, value in options.items():
        conf.set(key, value)
    with listening() as pipe:
        gateway = launch_gateway(conf, popen_kwargs={"stderr": pipe})  # type: ignore[no-untyped-call]
    SparkContext._gateway, SparkContext._jvm = gateway, gateway.jvm


def _why_not(master: str, error: Exception) -> OnwardError:
    text = str(error)
    if "JAVA_GATEWAY_EXITED" in text:
        return Unavailable("spark's java did not start: what it says is on stderr, above")
    if any(sign in text for sign in ("unresponsive", "has been killed", "stopped SparkContext")):
        return Unavailable(f"what answers at '{master}' is no spark master, or not of this version")
    if "Could not parse Master URL" in text:
        return InvalidRequest(f"'{master}' is no spark master")
    line = next((line for line in text.splitlines() if "Exception" in line), text)
    reason = re.sub(r"^.*?Exception: (\[[A-Z_.]+\] )?", "", line.strip())
    return Unavailable(f"spark did not start on '{master}': {reason[:500]}")


def _make_ready(spark: "SparkSession", *, master: str, config: Mapping[str, str]) -> None:
    if not is_local(master):
        from onward.pipeline.shipping import check_workers, ship

        ship(spark)
        check_workers(spark)
    if _SHUFFLE not in config:
        # The default of 200 makes a small micro-batch eight times as slow as one per core.
        spark.conf.set(_SHUFFLE, str(max(1, spark.sparkContext.defaultParallelism)))
    from onward.pipeline.expressions import hush
    from onward.pipeline.progress import listen

    hush()
    listen(spark)
