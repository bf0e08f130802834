"""What an account may have against what a plan needs: the limits of Azure ML, vCPUs by family, and the request to file."""

import datetime

import pytest

from tasks.hardware.sku import load_sku
from tasks.planning.quota import Limits, Request, judge, keep_limits, of_usages, plain_family, read_limits

pytestmark = pytest.mark.unit

H100 = Request("Standard_ND96isr_H100_v5", "standardNDSH100v5Family", 96, 4)


def failed(request, limits):
    return [check for check in judge(request, limits) if not check.passed]


def of(**more):
    return Request(**{**H100.__dict__, **more})


def test_four_machines_of_h100_need_384_vcpus():
    """MicrosoftDocs: a quota is counted in vCPUs; 4 x 96."""
    assert not failed(H100, Limits(dedicated={"standardNDSH100v5Family": 384}))
    (short,) = failed(H100, Limits(dedicated={"standardNDSH100v5Family": 383}, region="eastus"))
    assert (short.name, short.measured) == ("dedicated vCPUs in eastus", 384.0) and "383" in short.limit
    for word in (
        "region eastus",
        "family standardNDSH100v5Family",
        "384 vCPUs",
        "training a language model",
        "3 machines",
    ):
        assert word in short.remedy


def test_what_is_used_already_is_not_free_and_is_asked_for_on_top():
    limits = Limits(dedicated={"standardNDSH100v5Family": 480}, used={"StandardNDSH100v5Family": 192})
    (short,) = failed(H100, limits)
    assert "<= 288" in short.limit and "new limit 576 vCPUs" in short.remedy


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ("Standard NDASv4_A100 Family", "standardNDASv4_A100Family"),
        ("standard NDAMSv4_A100Family", "standardNDAMSv4_A100Family"),
        ("StandardNCadsH100v5Family", "StandardNCADSH100v5Family"),
    ],
)
def test_families_are_the_same_in_every_spelling(ours, theirs):
    assert plain_family(ours) == plain_family(theirs)
    assert not failed(of(family=ours), Limits(dedicated={theirs: 384}))


def test_a_gpu_family_that_nobody_asked_for_has_none_in_azure_ml():
    (short,) = failed(H100, Limits(dedicated={"standardDSv3Family": 300}))
    assert short.limit.startswith("<= 0") and "not one machine fits" in short.remedy


def test_an_account_that_nobody_looked_at_is_a_warning_and_no_refusal():
    quota = judge(H100, Limits())[0]
    assert quota.passed and quota.warned and quota.limit == "not known"
    assert "limits.yaml" in quota.remedy and "384 vCPUs" in quota.remedy


def test_low_priority_has_one_figure_for_all_families_and_seven_days():
    low = of(low_priority=True, nodes=1, days=8.0)
    (days,) = failed(low, Limits(low_priority=100))
    assert days.limit == "<= 7 on low-priority machines" and "2 jobs" in days.remedy and "dedicated" in days.remedy
    (vcpus,) = failed(of(low_priority=True, nodes=2, days=7.0), Limits(low_priority=100))
    assert vcpus.measured == 192.0 and "all families" in vcpus.remedy


def test_a_job_of_azure_ml_has_21_days():
    assert not failed(of(days=21.0), Limits(dedicated={H100.family: 384}))
    (days,) = failed(of(days=22.0), Limits(dedicated={H100.family: 384}))
    assert days.measured == 22.0 and "2 jobs" in days.remedy and "--continue-from" in days.remedy


def test_a_job_of_azure_ml_has_100_machines_with_rdma():
    plenty = Limits(dedicated={H100.family: 10**6})
    assert not failed(of(nodes=100), plenty)
    (nodes,) = failed(of(nodes=101), plenty)
    assert nodes.limit == "<= 100" and "Slurm" in nodes.remedy
    assert not failed(of(nodes=101, rdma=False), plenty)


def test_virtual_machines_have_neither_days_nor_machines():
    assert not failed(of(nodes=500, days=90.0, service="vm"), Limits(dedicated={H100.family: 10**6}))


@pytest.mark.parametrize("wrong", [{"nodes": 0}, {"vcpus": -96}, {"days": -1.0}, {"days": float("nan")}])
def test_what_cannot_be_is_refused(wrong):
    with pytest.raises(ValueError, match=str(next(iter(wrong.values())))):
        judge(of(**wrong), Limits())


def test_the_limits_of_everybody_come_from_the_sizes_file(tmp_path):
    limits = read_limits(tmp_path, region="eastus", sku=load_sku("Standard_ND96isr_H100_v5"))
    assert (limits.job_days, limits.low_priority_job_days, limits.rdma_nodes, limits.default_vcpus) == (21, 7, 100, 0)
    assert limits.dedicated is None and limits.low_priority is None


def test_an_accounts_limits_come_from_its_file_by_service_and_region(tmp_path):
    (tmp_path / "limits.yaml").write_text(
        "azureml:\n  eastus: {date: 2026-11-20, dedicated: {standardNDSH100v5Family: 192}, low_priority: 100}\n"
        "vm:\n  eastus: {dedicated: {standardNDSH100v5Family: 960}}\n"
    )
    ours = read_limits(tmp_path, region="eastus")
    assert failed(H100, ours) and ours.date == "2026-11-20" and ours.source.endswith("limits.yaml")
    assert not failed(of(service="vm"), read_limits(tmp_path, region="eastus", service="vm"))
    assert read_limits(tmp_path, region="westus").dedicated is None


@pytest.mark.parametrize(
    "text", ["azureml: {eastus: {dedicatd: {}}}", "azureml: [1]", "- 1", "azureml: {eastus: {low_priority: -1}}"]
)
def test_a_damaged_file_of_limits_is_refused_by_name(tmp_path, text):
    (tmp_path / "limits.yaml").write_text(text)
    with pytest.raises(ValueError, match="limits"):
        read_limits(tmp_path, region="eastus")


def usage(
    name, limit, used=0, *, of="/subscriptions/s/providers/Microsoft.MachineLearningServices/locations/eastus/usages"
):
    return {"id": f"{of}/{name}", "currentValue": used, "limit": limit, "name": {"value": name, "localizedValue": name}}


USAGES = [
    usage("Total Cluster Dedicated Regional vCPUs", 300, 100),
    usage("Total Cluster LowPriority Regional vCPUs", 100),
    usage("Standard NDSH100v5 Family Cluster Dedicated vCPUs", 960, 96),
    usage("Standard DSv2 Family Cluster Dedicated vCPUs", -1),
    usage("Standard NDSH100v5 Family Cluster Dedicated vCPUs", 0, of="/subscriptions/s/workspaces/w"),
]


def test_what_azure_ml_tells_of_an_account_becomes_limits(tmp_path):
    told = of_usages(USAGES)
    assert told == {
        "dedicated": {"Standard NDSH100v5 Family": 960},
        "total": 300,
        "low_priority": 100,
        "used": {"total": 100, "Standard NDSH100v5 Family": 96},
    }
    keep_limits(tmp_path, "eastus", told, today=datetime.date(2026, 11, 22))
    keep_limits(tmp_path, "westus", of_usages([]), today=datetime.date(2026, 11, 22))
    limits = read_limits(tmp_path, region="eastus")
    assert limits.date == "2026-11-22"
    (ceiling,) = failed(H100, limits)
    assert "<= 200 (total of the region 300)" in ceiling.limit and "new limit 484" in ceiling.remedy
    (tmp_path / "limits.yaml").write_text("azureml: {eastus: {dedicated: {standardNDSH100v5Family: 480}}}")
    assert not failed(H100, read_limits(tmp_path, region="eastus")), "what a person wrote counts first"
