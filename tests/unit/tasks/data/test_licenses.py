"""What a licence says by its id: allowed, forbidden, not judged; and a waiver until its last day."""

from datetime import date

import pytest

from tasks.config.data import LicenseWaiver
from tasks.data.licenses import Terms, checks, judge

pytestmark = pytest.mark.unit
TODAY = date(2026, 11, 29)


def verdict(license_, *waivers):
    (one,) = judge({"dataset/d@1": Terms(license_)}, waivers, TODAY)
    return one.verdict, one.why


@pytest.mark.parametrize("name", ["apache-2.0", "MIT", "cc-by-4.0", "cc0-1.0", "odc-by", "apache-2.0, mit"])
def test_what_allows_both_is_allowed(name):
    assert verdict(name) == ("allows", "")


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("cc-by-nc-4.0", "it forbids commercial use"),
        ("cc-by-nc-sa-3.0", "it forbids commercial use"),
        ("cc-by-nd-4.0", "it forbids derived works"),
        ("cc-by-nc-nd-4.0", "it forbids commercial use and derived works"),
        ("mit, cc-by-nc-4.0", "it forbids commercial use"),
    ],
)
def test_what_forbids_one_is_a_failed_check(name, why):
    assert verdict(name) == ("forbids", why)
    (check,) = checks(judge({"dataset/d@1": Terms(name)}, (), TODAY))
    assert (check.passed, check.measured, check.name) == (False, name, "licence of dataset/d") and why in check.limit


@pytest.mark.parametrize(
    "name", ["", "other", "unknown", "llama3.2", "gemma", "cc-by-sa-4.0", "gpl-3.0", "apache-2.0, gemma"]
)
def test_what_no_table_has_is_not_judged_and_is_not_a_failed_check(name):
    assert verdict(name)[0] == "not judged"
    assert checks(judge({"dataset/d@1": Terms(name)}, (), TODAY)) == ()


def test_a_waiver_counts_for_what_it_names_until_its_last_day():
    def waiver(of="dataset/d", until=TODAY):
        return LicenseWaiver(of=of, who="ada", why="a contract", until=until)

    assert verdict("cc-by-nc-4.0", waiver()) == ("waived", "by ada until 2026-11-29: a contract")
    assert verdict("cc-by-nc-4.0", waiver(of="dataset/e"))[0] == "forbids"
    ended = verdict("cc-by-nc-4.0", waiver(until=date(2026, 11, 28)))
    assert ended == ("forbids", "it forbids commercial use; the waiver of ada ended on 2026-11-28")
