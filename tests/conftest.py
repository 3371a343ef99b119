"""What all tests share: fixed seeds and threads, one hypothesis profile, and a `device` per device of the machine."""

import random

import hypothesis
import numpy as np
import pytest
import torch

torch.set_num_threads(2)  # sums are split alike on every machine


class TorchRandom:
    """torch's generator as hypothesis wants it, so that every example starts from the same state."""

    seed = staticmethod(torch.manual_seed)
    getstate = staticmethod(torch.get_rng_state)
    setstate = staticmethod(torch.set_rng_state)


torch_random = TorchRandom()  # hypothesis keeps a weak reference
hypothesis.register_random(torch_random)
hypothesis.settings.register_profile("qat", deadline=None, max_examples=50, derandomize=True)
hypothesis.settings.load_profile("qat")


@pytest.fixture(autouse=True)
def seed() -> int:
    """Seed Python, NumPy and torch before each test."""
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002  the global generator is the one that libraries use
    torch.manual_seed(0)
    return 0


def devices() -> list:
    """The devices of this machine as test parameters; those on a GPU carry the mark `gpu`."""
    return ["cpu", *([pytest.param("cuda", marks=pytest.mark.gpu)] if torch.cuda.is_available() else [])]


@pytest.fixture(scope="session", params=devices())
def device(request: pytest.FixtureRequest) -> torch.device:
    """Each device in turn."""
    return torch.device(request.param)
