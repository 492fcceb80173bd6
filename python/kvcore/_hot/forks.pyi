# SPDX-License-Identifier: Apache-2.0
from typing import final

@final
class Fork:
    """Claim the children of a request, all of them or none."""
