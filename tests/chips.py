"""Programs for chips that this machine does not have."""

import jax
from jax.sharding import AxisType, Mesh, SingleDeviceSharding
import numpy as np
import pytest

from gradacc_jax.planning import absent as room
from gradacc_jax.planning import chips


def absent(name):
    """A sharding on a chip that is not there; skips where it has no compiler."""
    chip = chips.find(name)
    missing = chips.missing_compiler(chip)
    if missing:
        pytest.skip(f"no compiler for {chip.name} is installed: {missing}")
    return SingleDeviceSharding(room.devices(chip)[0])


def absent_mesh(name, count):
    """A mesh of chips that are not there, with the axis "data"; or skips."""
    chip = chips.find(name)
    missing = chips.missing_compiler(chip)
    if missing:
        pytest.skip(f"no compiler for {chip.name} is installed: {missing}")
    devices = np.array(room.devices(chip, count))
    return Mesh(devices, ("data",), axis_types=(AxisType.Auto,))


def absent_gpu():
    """A sharding on an RTX 4090 that is not there."""
    return absent("rtx-4090")


def absent_tpu():
    """A sharding on a TPU v5e that is not there."""
    return absent("v5e")


def on(sharding, tree):
    """The shapes of ``tree``, placed."""
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree
    )
