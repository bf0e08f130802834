"""Every setting: base.py has what all classes are made of, flows.py the tree of a flow, each other file one section."""
