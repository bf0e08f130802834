"""NCCL's environment by VM size."""

import json
from pathlib import Path

import pytest

import tasks.hardware
from tasks.hardware.environment import nccl_environment, topology_file

FAMILIES = json.loads((Path(tasks.hardware.__file__).parent / "nccl.json").read_text())["families"]


def test_hopper_has_its_channels_and_its_topology():
    said = nccl_environment("Standard_ND96isr_H100_v5")
    assert said["NCCL_TOPO_FILE"] == topology_file("Standard_ND96isr_H100_v5") == "/opt/microsoft/ndv5-topo.xml"
    assert (said["NCCL_MIN_NCHANNELS"], said["NCCL_PXN_DISABLE"], said["UCX_TLS"]) == ("32", "1", "rc")
    assert nccl_environment("nd96isr_h200_v5") == said


def test_a100_with_and_without_infiniband():
    nd, nc = nccl_environment("STANDARD_ND96ASR_V4"), nccl_environment("Standard_NC96ads_A100_v4")
    assert (nd["NCCL_IB_PCI_RELAXED_ORDERING"], nd["NCCL_TOPO_FILE"]) == ("1", "/opt/microsoft/ndv4-topo.xml")
    assert (nc["NCCL_IB_DISABLE"], nc["NCCL_GRAPH_FILE"]) == ("1", "/opt/microsoft/ncv4-graph.xml")


def test_amd_has_no_topology_file():
    assert topology_file("Standard_ND96isr_MI300X_v5") == ""
    assert "NCCL_TOPO_FILE" not in nccl_environment("Standard_ND96isr_MI300X_v5")


def test_an_unknown_size_is_an_error_that_names_the_known_ones():
    with pytest.raises(
        ValueError, match=r"'Standard_D4s_v5'; known are Standard_NC24ads_A100_v4, .*Standard_ND96isr_MI300X_v5"
    ):
        nccl_environment("Standard_D4s_v5")


def test_every_entry_names_its_source_and_no_size_is_there_twice():
    assert all(family["source"] for family in FAMILIES)
    names = [sku for family in FAMILIES for sku in family["skus"]]
    assert len(names) == len(set(names))
    assert all(isinstance(value, str) for family in FAMILIES for value in family["environment"].values())
