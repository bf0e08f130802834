"""What can be said of a kind of machine, by name, and in which unit: a number in another unit is refused where a file is read.

GB is 10^9 bytes and GiB 2^30; Gbit/s is a port's rate, as ib_write_bw prints it, and GB/s everything that is measured.
"""

from __future__ import annotations

CHECKS = {
    **dict.fromkeys(("gpu_count", "ib_ports_active", "nvme_count", "cpu_count", "soak_drop"), ""),
    **dict.fromkeys(("gpu_smi", "xid", "ecc", "rows", "throttle", "persistence", "sriov", "aznhc"), ""),
    **dict.fromkeys(("sm_clock", "memory_clock"), "MHz"),
    **dict.fromkeys(("memory_gib", "scratch_free"), "GiB"),
    **dict.fromkeys(("time_skew", "checkpoint_seconds"), "s"),
    **dict.fromkeys((f"matmul_{dtype}" for dtype in ("fp32", "tf32", "bf16", "fp16", "fp8")), "TFLOP/s"),
    **dict.fromkeys(("memory_bandwidth", "host_to_device", "device_to_host", "peer_to_peer"), "GB/s"),
    **dict.fromkeys(("scratch_write", "scratch_read", "store_write", "store_read"), "GB/s"),
    **dict.fromkeys(("scratch_files_written", "scratch_files_read"), "files/s"),
    **dict.fromkeys((f"version_{name}" for name in ("driver", "cuda", "nccl", "mpi", "ofed", "image")), ""),
    "nvlink_down": "links",
    "ib_rate": "Gbit/s",
    "link_flaps": "per 24 h",
    "temperature": "C",
    "training_tflops": "TFLOP/s",
    "scaling_efficiency": "",
}
"""Units of what is measured, by the name of the check; a share and a count have none."""

SPECS = {
    **dict.fromkeys(("gpu", "gpus", "vcpus", "nvlink_generation", "nvme_disks", "infiniband_ports", "rack_nodes"), ""),
    **dict.fromkeys(("ecc_sram_uncorrected", "ecc_sram_corrected", "ecc_dram_corrected"), ""),
    **dict.fromkeys(("gpu_memory_gb", "vm_gpu_memory_gb"), "GB"),
    **dict.fromkeys(("gpu_memory_bandwidth_gb_s", "nvlink_gb_s", "nvme_read_gb_s", "nvme_write_gb_s"), "GB/s"),
    **dict.fromkeys((f"peak_{dtype}_tflops" for dtype in ("fp32", "tf32", "bf16", "fp16", "fp8")), "TFLOP/s"),
    **dict.fromkeys((f"achievable_{dtype}_tflops" for dtype in ("bf16", "fp16", "fp8")), "TFLOP/s"),
    **dict.fromkeys(("memory_gib", "temp_disk_gib"), "GiB"),
    **dict.fromkeys(("infiniband_gbit_s", "ib_write_bw_gbit_s", "ethernet_gbit_s"), "Gbit/s"),
    "nvme_total_tib": "TiB",
    "remote_disk_mb_s": "MB/s",
}
"""Units of what a machine has. Of one GPU: gpu_memory_gb, nvlink_gb_s in one direction, peak_ and achievable_ without sparsity.
Of the machine: vm_gpu_memory_gb and the rest. ib_write_bw_gbit_s and ecc_ are the limits of AzNHC's own checks."""
