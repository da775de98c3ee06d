"""The operating system's count of this process."""

import sys

import pytest
import torch

from leantune.memory.measured.process import machine_memory, process_peak, reset_process_peak, return_freed_memory

BLOCK = 64 << 20


def test_peak_sees_a_block_that_came_and_went():
    return_freed_memory()  # what earlier tests left in the heap would hold the block
    before = process_peak()
    block = torch.ones(BLOCK, dtype=torch.uint8)
    during = process_peak()
    assert during.current - before.current > 0.9 * BLOCK
    del block
    return_freed_memory()
    after = process_peak()
    assert after.peak >= during.current - (1 << 20)
    assert after.current < during.current - 0.9 * BLOCK


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux can reset the peak")
def test_peak_can_begin_again():
    return_freed_memory()
    block = torch.ones(BLOCK, dtype=torch.uint8)
    high = process_peak().peak
    del block
    return_freed_memory()
    if not reset_process_peak():
        pytest.skip("this system does not allow /proc/self/clear_refs")
    assert process_peak().peak < high - 0.9 * BLOCK


def test_machine_has_more_than_this_process_uses():
    assert machine_memory() > process_peak().current
