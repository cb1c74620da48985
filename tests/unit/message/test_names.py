import pytest

from onward.errors import InvalidName
from onward.message.names import check_group_name, check_member_name, check_topic_name


@pytest.mark.parametrize(
    "name", ["a", "orders.eu-1", "A_b", "...", "-", "x" * 128, "a@b", "a@", "celery@host.pidbox"]
)
def test_a_name_of_allowed_characters_is_returned_as_it_is(name: str) -> None:
    assert check_topic_name(name) == name
    assert check_group_name(name) == name


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("", "at least one character"),
        ("x" * 129, "at most 128 characters, this one has 129"),
        (".", "'.' and '..' are not names"),
        ("..", "'.' and '..' are not names"),
        ("a/b", "only letters"),
        ("orders\n", "only letters"),
        ("naïve", "only letters"),
        ("con\x00", "only letters"),
        ("%2e%2e", "only letters"),
        ("a b", "only letters"),
    ],
)
def test_a_refused_name_says_which_rule_it_breaks(name: str, rule: str) -> None:
    with pytest.raises(InvalidName, match=rule):
        check_topic_name(name)
    with pytest.raises(InvalidName, match=rule):
        check_group_name(name)


@pytest.mark.parametrize("name", ["@pipeline", "@sink.load-7", "@sink." + "x" * 123])
def test_the_topics_of_pipelines_are_for_everybody(name: str) -> None:
    assert check_topic_name(name) == check_topic_name(name, system=True) == name
    with pytest.raises(InvalidName):
        check_group_name(name)


@pytest.mark.parametrize("name", ["@", "@sink", "@sink.", "@sinks.a", "@pipelines", "@Pipeline"])
def test_what_only_looks_like_a_topic_of_pipelines_is_the_systems(name: str) -> None:
    with pytest.raises(InvalidName):
        check_topic_name(name)


@pytest.mark.parametrize("name", ["@sink.a b", "@sink." + "x" * 124, "@sink./"])
def test_a_topic_of_pipelines_follows_the_rules_of_names(name: str) -> None:
    with pytest.raises(InvalidName, match="a name has"):
        check_topic_name(name)


def test_a_system_topic_is_allowed_only_to_the_system() -> None:
    assert check_topic_name("@schedule", system=True) == "@schedule"
    with pytest.raises(InvalidName, match="the system's own"):
        check_topic_name("@schedule")
    with pytest.raises(InvalidName):
        check_group_name("@schedule")


@pytest.mark.parametrize("name", ["@", "@@a", "@..", "a@b c"])
def test_the_rest_of_a_system_name_follows_the_same_rules(name: str) -> None:
    with pytest.raises(InvalidName):
        check_topic_name(name, system=True)


def test_a_hostile_name_neither_floods_nor_colours_the_error() -> None:
    with pytest.raises(InvalidName) as caught:
        check_topic_name("\x1b[31m" + "x" * 10_000)
    assert len(str(caught.value)) < 200
    assert "\x1b" not in str(caught.value)


@pytest.mark.parametrize("name", ["a", "ann@host (4711)", "größe 7", "x" * 128])
def test_a_member_may_have_a_name_that_people_can_read(name: str) -> None:
    assert check_member_name(name) == name


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("", "at least one"),
        ("x" * 129, "at most 128"),
        ("a\nb", "printable"),
        ("\x1b[31m", "printable"),
        ("\ud800", "printable"),
    ],
)
def test_a_refused_name_of_a_member_says_which_rule_it_breaks(name: str, rule: str) -> None:
    with pytest.raises(InvalidName, match=rule) as caught:
        check_member_name(name)
    assert str(caught.value).isprintable()
