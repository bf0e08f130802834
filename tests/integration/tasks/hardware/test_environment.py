"""NCCL's environment by VM size."""

import pytest
import yaml

from tasks.hardware.sku import nccl_environment, topology_file


def test_hopper_has_its_channels_and_its_topology():
    said = nccl_environment("Standard_ND96isr_H100_v5")
    assert said["NCCL_TOPO_FILE"] == topology_file("Standard_ND96isr_H100_v5") == "/opt/microsoft/ndv5-topo.xml"
    assert (said["NCCL_MIN_NCHANNELS"], said["NCCL_PXN_DISABLE"], said["UCX_TLS"]) == ("32", "1", "rc")
    assert nccl_environment("nd96isr_h200_v5") == said


def test_a100_with_and_without_infiniband():
    nd, nc = nccl_environment("STANDARD_ND96ASR_V4"), nccl_environment("Standard_NC96ads_A100_v4")
    assert (nd["NCCL_IB_PCI_RELAXED_ORDERING"], nd["NCCL_TOPO_FILE"]) == ("1", "/opt/microsoft/ndv4-topo.xml")
    assert (nc["NCCL_IB_DISABLE"], nc["NCCL_GRAPH_FILE"]) == ("1", "/opt/microsoft/ncv4-graph.xml")


@pytest.mark.parametrize("size", ["nd96is_h100_v5", "nd96is_h200_v5"])
def test_hopper_without_infiniband_has_none_of_its_variables(size):
    said = nccl_environment(size)
    assert said["NCCL_IB_DISABLE"] == "1" and said["NCCL_TOPO_FILE"] == "/opt/microsoft/ndv5-topo.xml"
    assert [name for name in said if "_IB_" in name] == ["NCCL_IB_DISABLE"]
    assert not any("mlx5" in value for value in said.values())


def test_amd_has_no_topology_file():
    assert topology_file("Standard_ND96isr_MI300X_v5") == ""
    assert "NCCL_TOPO_FILE" not in nccl_environment("Standard_ND96isr_MI300X_v5")


def test_a_file_of_the_home_has_the_last_word(tmp_path):
    said = {"name": "nd96isr_h100_v5", "based_on": "nd96isr_h100_v5", "environment": {"NCCL_MIN_NCHANNELS": "16"}}
    (tmp_path / "nd96isr_h100_v5.yaml").write_text(yaml.safe_dump(said))
    found = nccl_environment("Standard_ND96isr_H100_v5", tmp_path)
    assert (found["NCCL_MIN_NCHANNELS"], found["NCCL_PXN_DISABLE"]) == ("16", "1")


def test_an_unknown_size_is_an_error_that_names_the_known_ones():
    with pytest.raises(
        ValueError, match=r"'Standard_D4s_v5'.*known are .*Standard_NC24ads_A100_v4, .*Standard_ND96isr_MI300X_v5"
    ):
        nccl_environment("Standard_D4s_v5")
