"""The device that a model runs on; the one file that names an accelerator API.

`torch.accelerator` is the same for CUDA, ROCm, XPU, MPS and the vendors' plug-ins.
"""

import torch

from kvtide.engine.errors import UnsupportedDevice

CPU = torch.device("cpu")


def free_bytes(device: torch.device) -> int:
    """Memory of an accelerator that nobody has."""
    free, _ = torch.accelerator.get_memory_info(device)
    return int(free)


def choose_device(wanted: str) -> torch.device:
    """The device for a setting.

    "cpu", "auto" (an accelerator if there is one), or a name of torch's such as "cuda"
    or "cuda:1".

    Raises:
        UnsupportedDevice: there is no such device here.
    """
    found = torch.accelerator.current_accelerator(check_available=True)
    if wanted == "cpu" or (wanted == "auto" and found is None):
        return CPU
    if wanted == "auto" and found is not None:
        return found
    try:
        device = torch.device(wanted)
    except RuntimeError as error:
        reason = "torch knows no device of this name"
        raise UnsupportedDevice(wanted, reason) from error
    if found is None:
        raise UnsupportedDevice(wanted, "torch finds no accelerator on this machine")
    if device.type != found.type:
        reason = f"this torch has {found.type} devices only"
        raise UnsupportedDevice(wanted, reason)
    count = torch.accelerator.device_count()
    # without a number it is the first
    if (device.index or 0) >= count:
        raise UnsupportedDevice(wanted, f"there are {count}, counted from 0")
    return device
