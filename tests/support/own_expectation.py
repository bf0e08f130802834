"""The code of an Expectation of a user's own, for the plugins folder of a home."""

PLUGIN = """
from great_expectations.execution_engine import PandasExecutionEngine
from great_expectations.expectations.expectation import ColumnMapExpectation
from great_expectations.expectations.metrics import ColumnMapMetricProvider, column_condition_partial


class Odd(ColumnMapMetricProvider):
    condition_metric_name = "column_values.odd"

    @column_condition_partial(engine=PandasExecutionEngine)
    def _pandas(cls, column, **kwargs):
        return column % 2 == 1


class ExpectOdd(ColumnMapExpectation):
    map_metric = "column_values.odd"
"""
