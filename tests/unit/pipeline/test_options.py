"""Options of the source: every one of them, and a sentence for each that is wrong."""

import pytest
from pyspark.sql.datasource import CaseInsensitiveDict

from onward.errors import InvalidName, InvalidRequest
from onward.pipeline.options import (
    EARLIEST,
    KAFKA_NAMES,
    LATEST,
    OPTION_NAMES,
    Bound,
    source_options,
    spark_options,
)


def read(**options: str):
    return source_options({"topic": "orders", **options})


def test_every_option_is_read_whatever_its_case():
    given = {
        "servers": "a:7700", "token": "secret", "timeout": "5s", "topic": "orders, refunds",
        "startingOffsets": '{"orders": 7}', "endingTimestamp": "1000", "group": "totals",
        "maxRowsPerTrigger": "1_000", "maxBytesPerTrigger": "1MiB", "minPartitions": "3",
        "maxRowsPerPartition": "50", "columns": "offset, body", "onDataLoss": "LAKE",
        "lake": "/lake", "bodySchema": "id BIGINT", "badBodies": "null",
    }  # fmt: skip
    plain = source_options(given)
    assert source_options(CaseInsensitiveDict(given)) == plain
    assert source_options({name.upper(): value for name, value in given.items()}) == plain
    assert plain.place == ("a:7700", "secret", "5s")
    assert (plain.topics, plain.pattern, plain.group) == (("orders", "refunds"), None, "totals")
    assert plain.start == Bound(offsets={"orders": 7})
    assert plain.end == Bound(time_ms=1000)
    assert (plain.rows_per_trigger, plain.bytes_per_trigger) == (1000, 1 << 20)
    assert (plain.partitions_min, plain.rows_per_partition) == (3, 50)
    assert plain.columns == ("offset", "body")
    assert (plain.on_loss, plain.lake) == ("lake", "/lake")
    assert (plain.body_schema, plain.bad_bodies) == ("id BIGINT", "null")


def test_a_path_is_a_topic_and_a_pattern_is_kept_as_it_is():
    assert source_options({"path": "orders"}).topics == ("orders",)
    assert source_options({"topicPattern": "orders[.].*"}).pattern == "orders[.].*"
    assert source_options({"topic": "@trace"}).topics == ("@trace",)


@pytest.mark.parametrize("word", ["earliest", "latest", "Latest"])
def test_a_start_can_be_a_word(word: str):
    assert read(startingOffsets=word).start == Bound(word=word.lower())


def test_a_start_can_be_offsets_a_number_or_a_time():
    text = '{"orders": -1, "refunds": "earliest"}'
    found = source_options({"topic": "orders,refunds", "startingOffsets": text}).start
    assert found == Bound(offsets={"orders": LATEST, "refunds": EARLIEST})
    assert read(startingOffsets="12").start == Bound(offsets={"orders": 12})
    at = read(startingTimestamp="1970-01-01T00:01:00Z").start
    assert at == Bound(time_ms=60_000)


def test_loss_is_an_error_unless_said_otherwise():
    assert read().on_loss == "fail"
    assert read(failOnDataLoss="true", lake="/lake").on_loss == "fail"
    assert read(failOnDataLoss="false").on_loss == read(onDataLoss="skip").on_loss == "skip"
    assert read(lake="/lake").on_loss == "lake"


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"topic": ""}, "give the option 'topic'"),
        ({"topicPattern": "x"}, "named once, not by 'topic' and 'topicPattern'"),
        ({"topic": "", "topicPattern": "("}, "'topicPattern' is no regular expression"),
        ({"topic": "a,,b"}, "option 'topic' has an empty name"),
        ({"startingOffset": "1"}, "no option 'startingOffset'; did you mean 'startingOffsets'"),
        ({"zzz": "1"}, "there is no option 'zzz'; there are: servers, token"),
        ({"startingOffsets": "first"}, "'startingOffsets' is earliest, latest, group or JSON"),
        ({"startingOffsets": "[1]"}, "'startingOffsets' is earliest, latest, group or JSON"),
        ({"startingOffsets": '{"refunds": 1}'}, "names topic 'refunds', which is not read"),
        ({"startingOffsets": '{"orders": -3}'}, "of topic 'orders' is an offset"),
        ({"startingOffsets": '{"orders": true}'}, "of topic 'orders' is an offset"),
        ({"startingOffsets": "group"}, "startingOffsets=group needs the option 'group'"),
        ({"startingOffsets": "latest", "startingTimestamp": "1"}, "not both"),
        ({"startingTimestamp": "yesterday"}, "'yesterday' is not a time"),
        ({"endingOffsets": "earliest"}, "'endingOffsets' is latest, group or JSON"),
        ({"maxRowsPerTrigger": "0"}, "'maxRowsPerTrigger' is a number from 1 on"),
        ({"minPartitions": "many"}, "'minPartitions' is a number from 1 on"),
        ({"maxBytesPerTrigger": "big"}, "option 'maxBytesPerTrigger': 'big' is not a size"),
        ({"maxBytesPerTrigger": "0"}, "at least one byte"),
        ({"onDataLoss": "ignore"}, "'onDataLoss' is fail, skip or lake, not 'ignore'"),
        ({"failOnDataLoss": "no"}, "'failOnDataLoss' is true or false"),
        ({"failOnDataLoss": "true", "onDataLoss": "skip"}, "not both"),
        ({"onDataLoss": "lake"}, "onDataLoss=lake needs the option 'lake'"),
        ({"badBodies": "keep"}, "'badBodies' is fail or null"),
        ({"columns": "offset,"}, "option 'columns' has an empty name"),
    ],
)
def test_what_is_wrong_is_said_in_a_sentence(options: dict[str, str], sentence: str):
    with pytest.raises(InvalidRequest) as caught:
        read(**options)
    assert sentence in str(caught.value)


def test_a_topic_that_cannot_be_is_refused():
    with pytest.raises(InvalidName, match="a/b"):
        source_options({"topic": "a/b"})


def test_an_argument_that_does_not_exist_is_named_as_it_was_written():
    with pytest.raises(InvalidRequest) as caught:
        spark_options({"topic": "orders", "startOffset": 7})
    assert str(caught.value) == (
        "there is no option 'startOffset'; did you mean 'starting_offsets'?"
    )
    with pytest.raises(InvalidRequest, match="no option 'zzz'; there are: servers, .* bad_bodies"):
        spark_options({"zzz": None})


def test_arguments_of_python_become_options_of_spark():
    snake = {"topic_pattern": "x.*", "fail_on_data_loss": False, "columns": ["offset", "key"]}
    assert spark_options(snake) == {
        "topicPattern": "x.*", "failOnDataLoss": "false", "columns": "offset,key",
    }  # fmt: skip
    assert set(spark_options({"max_rows_per_trigger": 1, "on_data_loss": "skip"})) < {*OPTION_NAMES}


def test_names_of_kafkas_connector_mean_the_same_here():
    ours = source_options(
        {"servers": "a:1", "topic": "orders", "maxRowsPerTrigger": "7", "maxRowsPerPartition": "3"}
    )
    theirs = {
        "kafka.bootstrap.servers": "a:1", "subscribe": "orders", "maxOffsetsPerTrigger": "7",
        "maxRecordsPerPartition": "3", "includeHeaders": "true",
    }  # fmt: skip
    assert source_options(theirs) == source_options(CaseInsensitiveDict(theirs)) == ours
    assert source_options({"subscribePattern": "o.*"}).pattern == "o.*"
    assert "headers" not in (read(includeHeaders="false").columns or ("headers",))
    found = read(startingOffsets='{"orders": {"0": 12}}').start
    assert found == Bound(offsets={"orders": 12})
    assert set(KAFKA_NAMES.values()) <= set(OPTION_NAMES)


def test_an_option_and_its_other_name_together_are_an_error():
    with pytest.raises(InvalidRequest, match="option 'topic' is given twice, by two of its names"):
        read(subscribe="refunds")
    with pytest.raises(InvalidRequest, match="is an offset, 'earliest' or 'latest'"):
        read(startingOffsets='{"orders": {"0": 12, "1": 3}}')
