"""Scripts are imported as each other imports them."""

from __future__ import annotations

import sys

from tests.conftest import PROJECT_ROOT

sys.path.insert(0, str(PROJECT_ROOT / "scripts"))
