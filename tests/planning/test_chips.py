"""What is known of chips, by the names that people type."""

import importlib.util
import os
import re

import jax
import pytest

from gradacc_jax import chips, estimate_memory
from gradacc_jax.planning import absent
from gradacc_jax.planning import chips as room

GIB = 2**30


@pytest.mark.parametrize(
    ("typed", "name"),
    [
        ("RTX 4090", "rtx-4090"),
        ("4090", "rtx-4090"),
        ("NVIDIA GeForce RTX 3060", "rtx-3060"),
        ("rtx3060 12GB", "rtx-3060"),
        ("A100-80GB", "a100-80"),
        ("NVIDIA A100-SXM4-40GB", "a100-40"),
        ("H100 80GB HBM3", "h100"),
        ("Tesla T4", "t4"),
        ("tpu-v5e", "v5e"),
        ("v5litepod", "v5e"),
        ("TPU v5", "v5p"),
        ("Trillium", "v6e"),
    ],
)
def test_a_chip_is_known_by_what_people_call_it(typed, name):
    assert room.find(typed).name == name


def test_a_name_that_is_two_chips_or_none_is_an_error_that_names_them():
    with pytest.raises(ValueError, match=r"'a100' may be a100-40 or a100-80"):
        room.find("a100")
    with pytest.raises(ValueError, match=r"'gtx 1080' is not known.*rtx-4090"):
        room.find("gtx 1080")


def test_every_chip_is_found_by_its_name_and_by_what_it_calls_itself():
    for chip in chips().values():
        assert room.find(chip.name) == room.find(chip.title) == chip
        assert chip.source
        assert chip.memory_bytes > 7 * GIB
        # A product in fewer bits is no slower, and all are far faster than memory.
        assert chip.bfloat16_flops >= chip.float32_flops > chip.bandwidth


def test_jax_takes_a_part_of_a_gpu_that_the_environment_can_change(monkeypatch):
    for variable in room.FRACTION_VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    gpu, tpu = chips()["rtx-4090"], chips()["v5e"]
    assert gpu.usable_bytes == int(0.75 * gpu.memory_bytes)
    assert tpu.usable_bytes == tpu.memory_bytes
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.5")
    assert gpu.usable_bytes == gpu.memory_bytes // 2
    monkeypatch.setenv("XLA_CLIENT_MEM_FRACTION", "0.9")  # the newer name
    assert gpu.usable_bytes == int(0.9 * gpu.memory_bytes)
    assert tpu.usable_bytes == tpu.memory_bytes


def test_a_budget_is_bytes_or_text_and_at_most_what_the_chip_has():
    chip = chips()["rtx-4090"]
    assert room.budget(chip, None) == chip.usable_bytes
    assert room.budget(chip, "10GiB") == room.budget(chip, 10 * GIB) == 10 * GIB
    assert room.budget(chip, "1.5 gb") == 1_500_000_000
    # Its maker calls it a 24 GB card, and it has a little less than 24 GiB.
    assert room.budget(chip, "24GiB") == chip.memory_bytes
    with pytest.raises(ValueError, match=r"memory='80GiB' is more than rtx-4090 has"):
        room.budget(chip, "80GiB")
    for wrong in ("lots", "0", 0, -1, "3 apples"):
        with pytest.raises(ValueError, match=r"memory=.* is no number of bytes"):
            room.budget(chip, wrong)


@pytest.mark.parametrize(("chip", "extra"), [("4090", "gpu"), ("v5e", "tpu")])
def test_a_missing_compiler_is_told_with_the_command_that_installs_it(
    monkeypatch, chip, extra
):
    find = importlib.util.find_spec
    gone = {name for modules, _ in room.COMPILERS.values() for name in modules}
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name in gone else find(name)
    )
    absent.devices.cache_clear()
    command = f"pip install 'gradacc_jax[absent-{extra}]'"
    with pytest.raises(ImportError, match=re.escape(command)):
        estimate_memory(lambda x: x, 1.0, chip=chip)
    assert command in str(chips())


def test_what_a_compiler_is_told_by_the_environment_is_not_left_there(monkeypatch):
    monkeypatch.setenv("TPU_WORKER_HOSTNAMES", "mine")
    monkeypatch.delenv("TPU_SKIP_MDS_QUERY", raising=False)
    with absent._environment({"TPU_SKIP_MDS_QUERY": "1", "TPU_WORKER_HOSTNAMES": "x"}):
        assert os.environ["TPU_WORKER_HOSTNAMES"] == "x"
        assert os.environ["TPU_SKIP_MDS_QUERY"] == "1"
    assert os.environ["TPU_WORKER_HOSTNAMES"] == "mine"
    assert "TPU_SKIP_MDS_QUERY" not in os.environ


def test_a_gpu_is_described_by_its_figures():
    text = absent.target_text(chips()["rtx-4090"])
    assert "core_count: 128" in text
    assert "cuda_compute_capability { major: 8 minor: 9 }" in text
    assert f"device_memory_size: {chips()['rtx-4090'].memory_bytes}" in text
    for chip in chips().values():
        if chip.platform == "gpu":
            assert absent.target_text(chip).count("{") == absent.target_text(
                chip
            ).count("}")


def test_the_device_that_is_here_is_found_by_itself():
    chip = room.present()
    assert chip.name == jax.devices()[0].device_kind
    assert chip.memory_bytes == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def test_a_device_that_is_here_tells_its_own_memory():
    class Device:
        device_kind, platform = "NVIDIA GeForce RTX 4090", "gpu"

        def memory_stats(self):
            return {"bytes_limit": 12 * GIB}

    chip = room.present(Device())
    assert chip.name == "rtx-4090"
    # What the allocator has taken already, not 75 % of it.
    assert chip.usable_bytes == pytest.approx(12 * GIB, abs=1)
