"""A Slurm for all tests of a session, started by the first one that needs it."""

from collections.abc import Iterator

import pytest
from slurm_cluster import SlurmCluster, slurm_cluster, why_not


@pytest.fixture(scope="session")
def _slurm() -> Iterator[SlurmCluster]:
    if reason := why_not():
        pytest.skip(reason)
    with slurm_cluster() as cluster:
        yield cluster


@pytest.fixture
def slurm(_slurm: SlurmCluster) -> Iterator[SlurmCluster]:
    """Two idle nodes."""
    yield _slurm
    _slurm.cancel_all()
