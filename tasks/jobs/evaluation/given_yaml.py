"""YAML that a user gives for a task of lm-evaluation-harness: plain data, or refused.

What is looked at are the nodes that YAML itself makes of the text: a tag may be written in many ways, and is one then. The other
half is in lm_eval_run.py: the harness takes code from its own folder alone.
"""

from __future__ import annotations

from collections.abc import Iterator

import yaml

PLAIN = frozenset(
    f"tag:yaml.org,2002:{name}" for name in ("str", "int", "float", "bool", "null", "seq", "map", "merge")
)
LOADERS = frozenset({"json", "parquet"})
"""What `dataset_path` may say; others of the library `datasets` run what they read, such as `pandas`, which unpickles."""
REFUSED = frozenset({"include", "custom_dataset", "use_prompt"})
"""Keys that read further files as YAML, or call what they name."""


def check_plain(text: str, *, place: str) -> None:
    """Raise ValueError for what is no YAML, or names code or further YAML. `place` is the file, as errors say it."""
    try:
        nodes = [node for root in yaml.compose_all(text, Loader=yaml.SafeLoader) if root for node in _nodes(root)]
    except yaml.YAMLError as error:
        raise ValueError(f"{place} is no YAML ({error})") from None
    for node in nodes:
        if node.tag not in PLAIN:
            raise ValueError(
                f"{place} names Python code or has a tag ({node.tag}), which given data may not: write it as templates"
            )
        for key, value in node.value if isinstance(node, yaml.MappingNode) else ():
            _check_key(str(key.value), value, place=place)


def _check_key(key: str, value: yaml.Node, *, place: str) -> None:
    if key in REFUSED:
        raise ValueError(f"{place} has `{key}`, which given data may not: write the whole task into one file")
    if key == "dataset_path" and value.value not in LOADERS:
        raise ValueError(f"{place} has dataset_path = {value.value!r:.60}: say json or parquet, and give data_files")
    if key == "metric" and "/" in str(value.value):
        raise ValueError(f"{place} has metric = {value.value!r:.60}, a path: name a metric of the harness")


def _nodes(root: yaml.Node) -> Iterator[yaml.Node]:
    """Every node once, though an alias may name it often, or name what it stands in."""
    left, seen = [root], set()
    while left:
        node = left.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        yield node
        if isinstance(node, yaml.MappingNode):
            left += [part for pair in node.value for part in pair]
        elif isinstance(node, yaml.SequenceNode):
            left += node.value
