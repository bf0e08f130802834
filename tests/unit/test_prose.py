"""The linter of words finds a planted phrase where people read it, and nothing in code."""

import pytest

from benchmarks.prose import in_failures, in_module, in_page

pytestmark = pytest.mark.unit

PAGE = """# Plans

The stage reckons the time, and the run goes
on. `headway plan reckons` stays.

```python
price = reckons(run)
```

Then [it](reckons.md) is measured anew.
"""
MODULE = '''
def mend():
    """Measure anew."""
    print(f"\\n{names} go on")
    raise ValueError(f"{names} is broken: mend it")
'''
FAILURES = """{
 "node": {"pattern": "told of",
  "sentence": "It goes on.", "again": "anew"}
}"""


def test_a_phrase_in_a_page_is_named_with_its_line_and_the_better_words():
    assert sorted(in_page(PAGE)) == [
        (3, "goes on", "continue, resume"),
        (3, "reckons", "compute, estimate"),
        (10, "anew", "again"),
    ]


def test_a_phrase_in_a_string_of_a_module_is_named_and_in_a_docstring_only_of_a_command():
    assert sorted(in_module(MODULE, command=False)) == [(4, "go on", "continue, resume"), (5, "mend", "fix, repair")]
    assert sorted(in_module(MODULE, command=True))[0] == (3, "anew", "again")


def test_a_phrase_in_a_sentence_of_a_failure_is_named_and_in_its_pattern_not():
    assert list(in_failures(FAILURES)) == [(3, "goes on", "continue, resume")]
