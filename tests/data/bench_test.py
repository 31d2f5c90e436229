"""The order of the read paths holds on CPU time, which noisy machines leave alone."""

from aodiff.data import bench


def test_batch_elements_and_memory_maps_win():
    report = bench.run(rows=256, seconds=0.1)
    assert report["ratios"]["batch element / per record"] >= 3
    assert report["ratios"]["tokens / array_record"] >= 3
    # Starting late costs what starting early costs.
    assert report["seconds to first batch"]["step 1000000"] < 1
