"""Random sequences of queries over one frame, compared with the same queries over plain rows.

    seed ──▶ source (live, lake, both), Spark's flag ──▶ steps ──▶ the same steps over plain rows

A step makes a frame of earlier ones (a filter, a projection, a union, a join with itself, a cache,
a view, a sub-query) or only plans one (`explain`), and an action may follow at any time, on the
newest frame or on an older one. So whatever one scan leaves behind for another is seen: both
answers must be the same, row by row. `onward sql` is asked in the same way, by texts.

As a program it runs seeds in a session that `SparkSession.builder` made, without `session()`:

    python sequences.py SERVERS LAKE SEEDS        SEEDS is FIRST-END
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import reduce
from random import Random

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - the name that everybody knows it by

from onward.pipeline.lake_read import read
from onward.pipeline.place import Place, open_client
from onward.pipeline.queries import sql
from onward.pipeline.source import read_topic

FLAG = "spark.sql.python.filterPushdown.enabled"
"""Whether Spark offers filters to sources in Python."""
CODE = "spark.sql.codegen.wholeStage"
SOURCES = ("live", "lake", "both", "sql")
ARCHIVED, HALF = "archived", "half"
"""Topics: the lake has all of the first one, and the beginning of the second."""
COLUMNS = ("topic", "offset", "key", "published_at")
STEPS = 4
_PLAIN = "topic STRING, offset BIGINT, key STRING, published_at TIMESTAMP"

Row = tuple[str, int, str | None, datetime]


@dataclass(frozen=True)
class Data:
    """Where the messages are, and what they are."""

    place: Place
    lake: str
    rows: list[Row]


def published(place: Place) -> list[Row]:
    """Return the messages of both topics, read by an ordinary client."""
    epoch = datetime(1970, 1, 1, tzinfo=UTC)
    with open_client(place) as mq:
        return [
            (name, one.offset, one.key, epoch + timedelta(milliseconds=one.published_at_ms))
            for name in (ARCHIVED, HALF)
            for one in mq.read(name)
        ]


def run_seed(spark: SparkSession, data: Data, seed: int) -> None:
    """Run one sequence; raise AssertionError with all of it when an answer is wrong."""
    rng = Random(seed)
    source = SOURCES[seed % len(SOURCES)]
    is_on = rng.random() < 0.7
    # Of so few rows most of the time would go into generated code.
    with setting(spark, FLAG, is_on=is_on), setting(spark, CODE, is_on=False):
        if source == "sql":
            _Questions(spark, data, rng, f"seed {seed}, sql, flag {is_on}").run()
        else:
            _Frames(spark, data, rng, f"seed {seed}, {source}, flag {is_on}", source).run()


@contextmanager
def setting(spark: SparkSession, name: str, *, is_on: bool) -> Iterator[None]:
    """Switch a setting of Spark on or off in this block."""
    before = str(spark.conf.get(name))
    spark.conf.set(name, str(is_on).lower())
    try:
        yield
    finally:
        spark.conf.set(name, before)


def condition(rng: Random, rows: list[Row]) -> str:
    """Return a condition of which a source could make bounds, or one of which it could not."""
    topic, offset, key, at = rng.choice(rows)
    moment = f"timestamp'{at.isoformat(timespec='milliseconds').replace('+00:00', 'Z')}'"
    other = rng.choice(rows)[1]
    low, high = min(offset, other), max(offset, other)
    return rng.choice(
        [
            f"offset < {offset}", f"offset >= {offset}", f"offset = {offset}",
            f"offset between {low} and {high}", f"`offset` in ({offset}, {other}, {offset + 1})",
            f"topic = '{topic}'", f"topic <> '{topic}'", f"topic in ('{topic}', 'nowhere')",
            f"published_at >= {moment}", f"published_at < {moment}", f"published_at = {moment}",
            f"key = '{key}'", "key is not null", f"offset < {low} or offset > {high}",
            f"topic = '{topic}' and offset >= {offset} and published_at <= {moment}",
        ]
    )  # fmt: skip


# --- frames ------------------------------------------------------------------------------------


@dataclass
class _Frames:
    spark: SparkSession
    data: Data
    rng: Random
    name: str
    source: str
    said: list[str] = field(default_factory=list)
    cached: list[DataFrame] = field(default_factory=list)

    def run(self) -> None:
        rows = self.data.rows
        if self.source == "lake":
            rows = [row for row in rows if row[0] == ARCHIVED]
        self.made = [(self._load(), self.spark.createDataFrame(rows, _PLAIN))]
        self.said.append("0: load")
        try:
            for _ in range(STEPS):
                if self.rng.random() < 0.4:
                    self.compare([self.rng.choice([0, self.rng.randrange(len(self.made))])])
                self.step()
            self.compare([len(self.made) - 1])
            self.compare(range(len(self.made)))
        finally:
            for frame in self.cached:
                frame.unpersist()

    def _load(self) -> DataFrame:
        place, lake, names = self.data.place, self.data.lake, [ARCHIVED, HALF]
        if self.source == "live":
            return read_topic(self.spark, names, place=place, columns=COLUMNS)
        topics, end = (names, None) if self.source == "both" else ([ARCHIVED], "latest")
        return read(
            self.spark, place=place, topics=topics, lake=lake, columns=list(COLUMNS), end=end
        )

    def step(self) -> None:
        """Make a frame of earlier ones, twice: of the source's and of the plain ones."""
        rng, count = self.rng, len(self.made)
        one, other = rng.randrange(count), rng.randrange(count)
        first, second = (condition(rng, self.data.rows) for _ in range(2))
        kind = rng.choice(
            ["where", "where", "project", "union", "join", "semi", "anti", "cache", "view",
             "scalar", "within", "distinct", "explain"]
        )  # fmt: skip
        self.said.append(f"{count}: {kind} of {one} and {other}, {first}; {second}")
        self.made.append(
            tuple(
                self._make(kind, frames[one], frames[other], first, second, f"v{count}_{side}")
                for side, frames in enumerate(zip(*self.made, strict=True))
            )  # type: ignore[arg-type]
        )

    def _make(
        self, kind: str, one: DataFrame, other: DataFrame, first: str, second: str, view: str
    ) -> DataFrame:
        keys = ["topic", "offset"]
        match kind:
            case "project":
                return one.where(first).select(
                    "topic", "offset", F.upper("key").alias("key"), "published_at"
                )
            case "union":
                return one.where(first).union(other.where(second))
            case "join":
                right = other.where(second).select(*keys, F.col("key").alias("its_key")).distinct()
                joined = one.where(first).join(right, keys)
                return joined.select(*keys, F.col("its_key").alias("key"), "published_at")
            case "semi" | "anti":
                return one.join(other.where(second), keys, f"left_{kind}")
            case "cache":
                self.cached.append(one.where(first).cache())
                return self.cached[-1]
            case "view":
                one.createOrReplaceTempView(view)
                return self.spark.sql(f"select * from {view} where {first}")
            case "scalar":
                one.createOrReplaceTempView(view)
                asked = f"(select coalesce(avg(offset), 0) from {view} where {second})"
                return self.spark.sql(f"select * from {view} where {first} or offset >= {asked}")
            case "within":
                one.createOrReplaceTempView(view)
                asked = f"(select offset from {view} where {second})"
                return self.spark.sql(f"select * from {view} where {first} and offset in {asked}")
            case "distinct":
                return one.where(first).distinct()
            case "explain":
                one.where(first)._jdf.queryExecution().executedPlan()
                return one
            case _:
                return one.where(first)

    def compare(self, places: Sequence[int]) -> None:
        """Compare what some frames have now, in one query, with what they should have."""
        pairs = [self.made[at] for at in places]
        found, wanted = (digests(frames) for frames in zip(*pairs, strict=True))
        assert found == wanted, "\n".join(
            [f"{self.name}: frames {list(places)} are {found}, not {wanted}", *self.said]
        )


def digests(frames: Sequence[DataFrame]) -> list[tuple[object, ...]]:
    """Return a row for each frame that two have in common only if they have the same rows."""
    whole = F.sum(F.hash(*COLUMNS).cast("bigint"))
    rows = [
        frame.agg(F.lit(at), F.count("*"), F.min("offset"), F.max("offset"), whole)
        for at, frame in enumerate(frames)
    ]
    return sorted(tuple(row) for row in reduce(DataFrame.union, rows).collect())


# --- texts ---------------------------------------------------------------------------------------


def question(rng: Random, rows: list[Row]) -> str:
    """Return a query over `messages` whose answer does not depend on an order."""
    a, b, c = (condition(rng, rows) for _ in range(3))
    count = "select count(*) n, sum(offset) s from messages"
    every = "(select count(*) from messages)"
    late = f"(select * from messages where {a})"
    early = f"(select * from messages where {b})"
    same = "select 1 from messages o where o.offset = messages.offset and o.topic <> messages.topic"
    return rng.choice(
        [
            count, f"{count} where {a}",
            f"select topic, count(*) n from messages where {a} group by 1 order by 1",
            f"select (select count(*) from {late}) a, {every} b, (select max(offset) from {early})",
            f"({count} where {a} union all {count} where {b} union all {count}) order by 1, 2",
            f"with late as {late} select count(*) late, {every} every from late",
            f"select count(*) n, sum(offset) s from {late} l join {early} r using (topic, offset)",
            f"{count} where offset in (select offset from messages where {a}) and ({b})",
            f"{count} where not exists ({same}) and ({c})",
        ]
    )  # fmt: skip


@dataclass
class _Questions:
    spark: SparkSession
    data: Data
    rng: Random
    name: str

    def run(self) -> None:
        """Ask several questions, and look at their answers in another order."""
        plain_view(self.spark, self.data)
        asked = [question(self.rng, self.data.rows) for _ in range(STEPS)]
        frames = [
            sql(
                self.spark, query, place=self.data.place,
                lake=self.rng.choice([None, self.data.lake]),
            )
            for query in asked
        ]  # fmt: skip
        for at in self.rng.sample([*range(STEPS), 0], STEPS + 1):
            found = [tuple(row) for row in frames[at].collect()]
            wanted = plain_answer(self.spark, asked[at])
            assert found == wanted, f"{self.name}: {asked[at]}\nis {found}, not {wanted}"


def plain_view(spark: SparkSession, data: Data) -> None:
    """Make the view `plain` of the rows."""
    spark.createDataFrame(data.rows, _PLAIN).createOrReplaceTempView("plain")


def plain_answer(spark: SparkSession, query: str) -> list[tuple[object, ...]]:
    """Return the answer to a question over the view `plain`."""
    text = query.replace("messages", "plain")
    return [tuple(row) for row in spark.sql(text).collect()]


def main(servers: str, lake: str, seeds: str) -> None:
    first, _, end = seeds.partition("-")
    spark = SparkSession.builder.master("local[2]").getOrCreate()
    spark.conf.set("spark.sql.shuffle.partitions", "2")
    place = Place(servers)
    data = Data(place, lake, published(place))
    for seed in range(int(first), int(end)):
        run_seed(spark, data, seed)
    spark.stop()
    print(f"{int(end) - int(first)} sequences")


if __name__ == "__main__":
    main(*sys.argv[1:])
