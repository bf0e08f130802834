"""The contract of the layers, as `lint-imports` checks it: import-linter's own, in which the stages need no list.

A stage is a file of tasks/ that no other layer names. So a new one is held to its place at once, and pyproject.toml stays.
"""

from __future__ import annotations

from grimp import ImportGraph
from importlinter import ContractCheck
from importlinter.contracts.layers import Layer, LayersContract, ModuleTail

STAGES = "stages"


class LayersWithStages(LayersContract):
    """Layers of which the one called `stages` stands for every stage, independent of all others."""

    def check(self, graph: ImportGraph, verbose: bool) -> ContractCheck:
        layers: list[Layer] = list(self.layers)
        named = {tail.name for layer in layers for tail in layer.module_tails}
        files = {name for name in graph.find_children("tasks") if not graph.find_children(name)}
        row = next(
            index for index, layer in enumerate(layers) if {tail.name for tail in layer.module_tails} == {STAGES}
        )
        layers[row] = Layer({ModuleTail(name) for name in files - named}, is_independent=True)
        self.layers = layers
        return super().check(graph, verbose)
