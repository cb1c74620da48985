"""A driver of its own that archives one topic: for tests that kill it with all its children."""

import sys

from onward.pipeline.jobs.archive import archive
from onward.pipeline.place import Place
from onward.pipeline.sessions import session


def main(servers: str, lake: str, topic: str) -> None:
    place = Place(servers=servers, token=None, timeout="30s")
    spark = session("local[1]", place=place, name="archive to be killed", memory="512m")
    archive(spark, place=place, lake=lake, topics=[topic], group=f"{topic}-copy", rows_per_file=400)


if __name__ == "__main__":
    main(*sys.argv[1:])
