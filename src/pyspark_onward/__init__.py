"""What makes `.format("onward")` work: Spark looks for modules named pyspark_* and their source.

Spark imports every such module on the path, in its own processes, whenever it looks for a format it
does not know. So this never raises: without pyarrow, or with another pyspark than ours, there is
just no source here, and Spark says that it does not know the format.
"""

from contextlib import suppress

with suppress(ImportError):
    from onward.pipeline.connector import OnwardSource as DefaultSource  # noqa: F401
