"""Record the golden files: `python -m tests.disk.golden.record`, once for each version
of the format. A file of a version that was released never changes.
"""

from infinistore.disk.format import VERSION
from tests.disk.test_format import GOLDEN, WRITTEN

for name, data in WRITTEN.items():
    (GOLDEN / f"{name}-v{VERSION}.bin").write_bytes(data)
