import hashlib

import numpy as np
import xxhash

from vitscale.ground.files.digests import file_digests


def test_file_digests(tmp_path):
    data = np.random.default_rng(0).bytes((4 << 20) + 17)
    (tmp_path / "file").write_bytes(data)
    assert file_digests(tmp_path / "file") == (
        len(data),
        hashlib.sha256(data).hexdigest(),
        xxhash.xxh3_128_hexdigest(data),
    )
