"""The linter of words finds a planted phrase where people read it, and nothing in code."""

import pytest

from benchmarks.prose import in_module, in_page

pytestmark = pytest.mark.unit

PAGE = """# Plans

The stage reckons the time, and the run goes
on. `headway plan reckons` stays.

```python
price = reckons(run)
```

Then [it](reckons.md) is measured anew.
"""
MODULE = """
def mend():
    names = {"reckons": "anew"}
    raise ValueError(f"{names} is broken: mend it")
"""


def test_a_phrase_in_a_page_is_named_with_its_line_and_the_better_words():
    assert sorted(in_page(PAGE)) == [
        (3, "goes on", "continue, resume"),
        (3, "reckons", "compute, estimate"),
        (10, "anew", "again"),
    ]


def test_a_phrase_in_what_users_see_of_a_module_is_named():
    assert list(in_module(MODULE, command=False)) == [(4, "mend", "fix, repair")]
    assert {phrase for _, phrase, _ in in_module(MODULE, command=True)} == {"reckons", "anew", "mend"}
